"""Spans of requests, read from what a real exporter sends to a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server_process import serving, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """What a collector of OpenTelemetry does, as far as an exporter sees it."""

    def __init__(self):
        self.requests, self.paths = [], set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.paths.add(self.path)
                outer.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def spans(self):
        """(span, its attributes) of all there are, in the order of their ends."""
        return [
            (span, {a.key: _value(a.value) for a in span.attributes})
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(tiny_with_text, collector):
    flags = ("--otlp-endpoint", collector.url, "--served-model-name", "tiny")
    flags += ("--otlp-service-name", "house")
    with (
        serving(tiny_with_text, *flags, env={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        yield client


@pytest.fixture
def next_span(collector):
    before = len(collector.spans())

    def wait(number=1):
        wait_until(lambda: len(collector.spans()) >= before + number, 60)
        return collector.spans()[before:]

    return wait


def test_a_chat_has_one_span_under_the_callers(http, collector, next_span):
    body = {"messages": [{"role": "user", "content": "Tell me a secret word"}]}
    body |= {"max_tokens": 7, "temperature": 0.5, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=HEADERS) as answer:
        assert answer.read().endswith(b"[DONE]\n\n")
    [(span, found)] = next_span()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "chat tiny"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.status.code != Status.STATUS_CODE_ERROR
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.request.max_tokens"] == 7
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.output_tokens"] <= 7
    assert found["gen_ai.usage.input_tokens"] > 4
    assert set(found["gen_ai.response.finish_reasons"]) <= {"stop", "length"}
    times = [found[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e")]
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= times[0] <= times[1]
    assert span.start_time_unix_nano < span.end_time_unix_nano
    assert collector.paths == {"/v1/traces"}
    everything = b"".join(request.SerializeToString() for request in collector.requests)
    assert b"house" in everything
    assert b"secret" not in everything


def test_every_kind_of_request_and_every_prompt(http, next_span):
    http.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 2}})
    http.post("/v1/completions", json={"prompt": ["A", "B"], "max_tokens": 2, "n": 2})
    http.post("/v1/embeddings", json={"input": "A"})
    spans = next_span(4)
    names = sorted(span.name for span, _ in spans)
    assert names == ["embeddings tiny", *["text_completion tiny"] * 3]
    assert all(not span.parent_span_id for span, _ in spans)  # nobody called
    choices = sorted(found.get("gen_ai.request.choice.count", 0) for _, found in spans)
    assert choices == [0, 1, 2, 2]


def test_what_fails_is_marked(http, next_span):
    body = {"prompt": "A", "max_tokens": 450, "n": 8, "ignore_eos": True, "timeout": 0.05}
    assert http.post("/v1/completions", json=body).status_code == 424
    [(span, found)] = next_span()
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert found["error.type"] == "timeout"
    assert found["gen_ai.usage.output_tokens"] < 8 * 450


def test_a_client_that_hangs_up_is_marked(http, next_span):
    body = {"prompt": "A", "max_tokens": 450, "n": 8, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    [(span, found)] = next_span()
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert found["error.type"] == "cancelled"


def test_a_collector_that_is_gone_delays_nobody(tiny_with_text):
    gone = Collector()
    gone.close()
    with serving(tiny_with_text, "--otlp-endpoint", gone.url) as running:
        body = {"prompt": "A", "max_tokens": 2}
        assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).is_success


def test_without_the_library_or_with_a_wrong_endpoint_it_does_not_start(tiny_with_text):
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; "  # as if it were not installed
        "from pagedllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    for endpoint, said in (
        ("http://localhost:4318", "pip install 'pagedllm[otel]'"),
        ("localhost:4318", "'localhost:4318' is no URL of a collector"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", code, "serve", str(tiny_with_text), "--port", "0",
             "--otlp-endpoint", endpoint],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert run.returncode == 2
        assert said in run.stderr
        assert run.stderr.count("\n") == 1
