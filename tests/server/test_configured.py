"""A server with much of what can be set: spans of requests, read from what a real exporter
sends to a collector, and HTTPS, a proxy's path, a page's origin, a plugin's routes, a template.
"""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server_process import ServerProcess, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
ORIGIN = "https://page.example"
TEMPLATE = """
{%- for message in messages %}
{%- if message.content == "mumble" %}{{ raise_exception("speak up") }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}"""


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
def certificate(tmp_path_factory):
    """Of nobody's authority, with its key."""
    folder = tmp_path_factory.mktemp("certificate")
    found = folder / "certificate.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run(
        [*make, "-addext", "subjectAltName=IP:127.0.0.1", "-out", found[0], "-keyout", found[1]],
        check=True,
        capture_output=True,
    )
    return found


@pytest.fixture(scope="module")
def server(tiny_and_long, collector, certificate, house):
    flags = ("--otlp-endpoint", collector.url, "--otlp-service-name", "office")
    flags += ("--served-model-name", "tiny", "--chat-template", TEMPLATE, "--routes", "house")
    flags += ("--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1])
    flags += ("--root-path", "/llm", "--cors-allow-origin", ORIGIN)
    environment = house | {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    running = ServerProcess(tiny_and_long, "--port", "0", "--threads", "1", *flags, env=environment)
    yield running
    assert running.stop() == 0, running.output


@pytest.fixture(scope="module")
def http(server, certificate):
    context = ssl.create_default_context(cafile=certificate[0])
    with httpx.Client(base_url=server.url, verify=context, timeout=120) as client:
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
    assert b"office" in everything
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
    body = {"prompt": "A", "max_tokens": 4000, "n": 8, "ignore_eos": True, "timeout": 0.05}
    assert http.post("/v1/completions", json=body).status_code == 424
    [(span, found)] = next_span()
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert found["error.type"] == "timeout"
    assert found["gen_ai.usage.output_tokens"] < 8 * 4000


def test_a_client_that_hangs_up_is_marked(http, next_span):
    body = {"prompt": "A", "max_tokens": 4000, "n": 8, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    [(span, found)] = next_span()
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert found["error.type"] == "cancelled"


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


# -- the rest of what is set ----------------------------------------------------------


def test_https_whose_certificate_is_nobodys(server, http):
    assert server.url.startswith("https://")
    assert http.get("/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_origins_a_proxys_path_and_routes_of_plugins(http):
    answer = http.get("/info", headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    shown = answer.headers["access-control-expose-headers"]  # to a script in a browser
    assert {"x-request-id", "retry-after", "x-total-time"} <= set(shown.split(", "))
    other = http.get("/info", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert http.get("/house").json() == {"device": "cpu"}
    for path in ("/v1/completions", "/llm/v1/completions"):
        wrong = http.post(path, json={"prompt": ""})
        assert wrong.status_code == 422
        assert wrong.json()["error"]["type"] == "invalid_request_error"


def test_what_the_chat_template_refuses(http):
    body = {"messages": [{"role": "user", "content": "mumble"}]}
    for path in ("/chat_tokenize", "/invocations"):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "template_error")
        assert "speak up" in answer.json()["error"]
        assert "--chat-template" in answer.json()["error"]
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == "messages"


def test_without_its_collector_it_goes_on_and_finishes_what_runs_when_told_to_stop(
    server, http, collector
):
    collector.close()
    assert http.post("/v1/completions", json={"prompt": "A", "max_tokens": 2}).is_success
    body = {"inputs": "A", "parameters": {"max_new_tokens": 2000}}
    with http.stream("POST", "/generate_stream", json=body) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        found = [json.loads(line.removeprefix("data: ")) for line in (first, *lines) if line]
    assert len(found) == found[-1]["details"]["generated_tokens"] == 2000
    assert server.stop(how=None) == 0
    with pytest.raises(httpx.ConnectError):
        http.get("/health")
