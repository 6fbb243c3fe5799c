"""What clients do wrong, on purpose or not: an answer with a reason, and the server lives on."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import threading

import httpx
import openai
import psutil
import pytest
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import OverloadedError

from server_process import ServerProcess, events, wait_until

LONG = {"max_new_tokens": 6000}
KEY = 'key"of the\\house-4711'
QUOTED = "key%22of%20the%5Chouse-4711"
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def server(tiny_and_long):
    options = ("--max-concurrent-requests", "6", "--api-key", KEY, "--json-logs")
    options += ("--cors-allow-origin", ORIGIN, "--log-level", "debug")
    running = ServerProcess(tiny_and_long, "--port", "0", "--threads", "1", *options)
    yield running
    running.stop()
    for spelling in (KEY, QUOTED, json.dumps(KEY)[1:-1]):
        assert spelling not in running.output
    for line in running.errors:
        if line.startswith("nanobind:"):
            break  # what a C++ library writes when the process is gone already
        json.loads(line)  # every line of the log is an object


@pytest.fixture(scope="module")
def http(server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=120, headers=headers) as client:
        server.stats = lambda: client.get("/stats").json()
        yield client


@pytest.fixture(autouse=True)
def _idle_afterwards(http, server):
    yield
    if server.process.poll() is not None:
        return  # by the last one
    wait_until(server.is_idle)
    answer = http.post("/generate", json={"inputs": "Hello", "parameters": {"max_new_tokens": 2}})
    assert answer.status_code == 200, answer.text


def post(http, path, body):
    return http.post(path, content=body, headers={"content-type": "application/json"})


def nested(depth):
    return b'{"inputs": ' + b"[" * depth + b"]" * depth + b"}"


BAD_BODIES = {
    "nothing": b"",
    "not JSON": b"inputs=Hello",
    "cut off": b'{"inputs": "Hel',
    "invalid UTF-8": b'{"inputs": "\xff\xfe"}',
    "lone surrogate": b'{"inputs": "\\ud800", "prompt": "\\ud800"}',
    "a field that is half a pair": b'{"inputs": "A", "prompt": "A", "\\ud800": 1}',
    "null": b"null",
    "a list": b"[1, 2]",
    "a number": b"7",
    "nested deeply": nested(100_000),
    "nested a little": nested(50),
    "a huge integer": b'{"inputs": "A", "parameters": {"seed": 1' + b"0" * 5000 + b"}}",
    "a large integer": b'{"inputs": "A", "parameters": {"max_new_tokens": 1' + b"0" * 30 + b"}}",
    "not a number": b'{"inputs": "A", "parameters": {"temperature": NaN}}',
    "infinity": b'{"inputs": "A", "parameters": {"temperature": Infinity}}',
    "a wrong type": b'{"inputs": 12}',
    "text for a number": b'{"inputs": "A", "parameters": {"max_new_tokens": "5"}}',
    "an unknown field": b'{"inputs": "A", "paramters": {}}',
    "an empty prompt": b'{"inputs": ""}',
    "a null byte in a name": b'{"in\\u0000puts": "A"}',
}


@pytest.mark.parametrize(
    "path", ["/", "/generate", "/generate_stream", "/invocations", "/tokenize"]
)
@pytest.mark.parametrize("what", BAD_BODIES)
def test_bad_bodies_on_native_routes(http, path, what):
    answer = post(http, path, BAD_BODIES[what])
    if path == "/tokenize" and "A" in str(BAD_BODIES[what]) and answer.status_code == 200:
        pytest.fail("accepted")
    assert answer.status_code in (415, 422), answer.text
    body = answer.json()
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == "validation"
    assert len(body["error"]) < 400
    assert "\n" not in body["error"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
)
@pytest.mark.parametrize("what", BAD_BODIES)
def test_bad_bodies_on_openai_routes(http, path, what):
    answer = post(http, path, BAD_BODIES[what])
    assert answer.status_code in (415, 422), answer.text
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "start", "item", "end"),
    [
        ("/v1/completions", b'{"prompt": [', b"null,", b"1]}"),
        ("/v1/completions", b'{"prompt": [[', b"null,", b"1]]}"),
        ("/v1/completions", b'{"prompt": "A", "stop": [', b"null,", b"1]}"),
        ("/v1/completions", b'{"prompt": "A", "logit_bias": {', b'"%d":[],', b'"1":1}}'),
        ("/v1/embeddings", b'{"input": [', b"null,", b"1]}"),
        ("/v1/chat/completions", b'{"messages": [', b"{},", b"{}]}"),
        ("/generate", b'{"inputs": "A", "parameters": {', b'"%d":1,', b'"x":1}}'),
        ("/generate", b"{", b'"%d":1,', b'"inputs":"A"}'),
        ("/vertex", b'{"instances": [', b"1,", b"1]}"),
    ],
)
def test_one_thing_that_is_wrong_is_reported_and_not_a_million(
    http, server, path, start, item, end
):
    """Reports of each took seconds, in which nobody was served, and gigabytes."""
    size = 1_900_000
    several = b"%d" in item
    items = b"".join(item % i for i in range(size // 12)) if several else item * (size // len(item))
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    answer = post(http, path, start + items + end)
    after = process.cpu_times()
    assert answer.status_code == 422
    assert len(answer.content) < 400
    # Of the processor's time, which says the same on a machine that others use.
    assert after.user + after.system - before.user - before.system < 1


@pytest.mark.parametrize("path", ["/tokenize", "/generate", "/"])
def test_half_a_pair_is_no_text(http, path):
    answer = post(http, path, b'{"inputs": "A \\ud83d"}')
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("inputs: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", -1.5),
        ("top_p", 0),
        ("top_p", 1.0),
        ("typical_p", 1.5),
        ("top_k", 0),
        ("frequency_penalty", 2.5),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("best_of", 2),
        ("best_of", 1000),
        ("truncate", 0),
        ("watermark", True),
        ("adapter_id", "mine"),
        ("top_n_tokens", 1000),
        ("grammar", {"type": "regex"}),
        ("grammar", {"type": "unheard-of", "value": "a"}),
        ("seed", -1),
    ],
)
def test_wrong_parameters_are_named(http, field, value):
    answer = http.post("/generate", json={"inputs": "A", "parameters": {field: value}})
    assert answer.status_code == 422
    assert field in answer.json()["error"]


def deep(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
CHAIN = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
GRAMMARS = {
    "catastrophic": ("regex", "(a+)+$"),
    "repeated": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "look-ahead": ("regex", "(?=a)b"),
    "bad range": ("regex", "[z-a]"),
    "long": ("regex", "x" * 200_000),
    "itself": ("json", {"$ref": "#"}),
    "loop": ("json", LOOP),
    "endless": ("json", CHAIN),
    "large": ("json", {"enum": [f"value {i}" for i in range(30_000)]}),
    "pattern": ("json", {"type": "string", "pattern": "(x+x+)+y"}),
    "many items": ("json", {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
    "big numbers": ("json", {"type": "integer", "minimum": 10**40, "maximum": 10**40 + 1}),
    "elsewhere": ("json", {"$ref": "https://example.com/schema.json"}),
    "deep": ("json", deep(40)),
    "too deep": ("json", deep(450)),
    "a chain": (
        "json",
        {
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(20_000)},
            "$ref": "#/$defs/0",
        },
    ),
    "text": ("json", "not a schema"),
    "a number": ("json", 7),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_that_cost_too_much_are_refused_in_time(http, name):
    kind, value = GRAMMARS[name]
    body = {"inputs": "A", "parameters": {"max_new_tokens": 3, "timeout": 20.0}}
    body["parameters"]["grammar"] = {"type": kind, "value": value}
    answer = http.post("/generate", json=body)
    assert answer.status_code in (200, 422, 424), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]
        assert len(answer.json()["error"]) < 600


@pytest.mark.parametrize("seed", [random.randrange(2**32)])
def test_random_bytes_get_answers(http, seed):
    print("seed:", seed)
    draw = random.Random(seed)
    whole = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 1}}).encode()
    for _ in range(100):
        body = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        path = draw.choice(["/", "/generate", "/generate_stream"])
        assert post(http, path, bytes(body)).status_code in (200, 422)


def test_a_large_body_is_not_read(http):
    answer = http.post("/generate", json={"inputs": "word " * 2_000_000})
    assert answer.status_code == 413
    assert "payload_limit" in answer.json()["error"]

    def pieces():
        for _ in range(100):
            yield b"x" * 100_000

    headers = {"content-type": "application/json"}
    answer = http.post("/v1/completions", content=pieces(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "payload_too_large"


def test_a_long_prompt_is_refused_by_length_and_others_go_on(http):
    """Others are served while it is cut into tokens: the answers cross."""
    order = []

    def long():
        answer = http.post("/generate", json={"inputs": "many words " * 150_000})
        order.append(answer)

    thread = threading.Thread(target=long)
    thread.start()
    while thread.is_alive():
        order.append(http.get("/health"))
    thread.join()
    [refused] = [answer for answer in order if answer.request.method == "POST"]
    assert refused.status_code == 422
    assert "tokens" in refused.json()["error"]
    assert all(answer.status_code == 200 for answer in order if answer is not refused)
    assert len(order) > 1


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_no_route_but_the_probes_opens_without_the_key(server, header):
    with httpx.Client(base_url=server.url, headers={"Authorization": header}) as client:
        for path in ("/health", "/ping", "/metrics"):
            assert client.get(path).status_code == 200
        for path in ("/info", "/v1/models", "/", "/stats", "/openapi.json", "/nothing"):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/generate", "/v1/completions", "/tokenize", "/invocations"):
            answer = client.post(path, json={"inputs": "A", "prompt": "A"})
            assert answer.status_code == 401
            body = answer.json()
            if path.startswith("/v1"):
                error = body["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            else:
                assert set(body) == {"error", "error_type"}
                assert body["error_type"] == "unauthorized"


def test_a_browser_sees_what_was_refused(http, server):
    """Without the header it shows a page's script nothing, and calls it a network error."""
    large = {"inputs": "word " * 1_000_000}
    with httpx.Client(base_url=server.url, headers={"Origin": ORIGIN}) as client:
        answers = [
            client.post("/generate", json={"inputs": "A"}),
            client.post(
                "/generate", json=large, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
            ),
            client.post("/generate", json={}, headers={"Authorization": f"Bearer {KEY}"}),
            client.options("/generate", headers={"Access-Control-Request-Method": "POST"}),
        ]
    assert [answer.status_code for answer in answers] == [401, 413, 422, 200]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_request_ids_go_in_and_out(http, server):
    answer = http.get("/info", headers={"x-request-id": "mine-42"})
    assert answer.headers["x-request-id"] == "mine-42"
    wait_until(lambda: any('"request_id": "mine-42"' in line for line in server.errors))
    forged = http.get("/info", headers={"x-request-id": "a b" * 100})
    assert forged.headers["x-request-id"].startswith("req-")


def test_a_key_is_in_no_line_of_the_log(http, server):
    """Wherever it was sent, and in part; the fixture looks at every line."""
    assert http.get(f"/{QUOTED}/{QUOTED}", params={"key": KEY}).status_code == 404
    assert http.get(f"/{'a' * 190}{QUOTED}").status_code == 404
    assert http.get("/info", headers={"X-Key": KEY, "Referer": QUOTED}).status_code == 200
    for body in ({"prompt": KEY, KEY: KEY}, {"prompt": "A", "model": KEY, "stop": [KEY] * 9}):
        assert http.post("/v1/completions", json=body).status_code == 422
    wait_until(lambda: server.logged(path="/***/***", status=404))
    wait_until(lambda: server.logged(path=f"/{'a' * 190}***", status=404))


def test_without_the_flag_no_processor_may_be_named(http):
    body = {"prompt": "x", "logits_processors": [{"name": "only", "token_ids": [40]}]}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 422
    assert "lets requests name none, not 'only'" in answer.json()["error"]["message"]


# -- time -----------------------------------------------------------------------------


def failures(http, kind):
    text = http.get("/metrics").text
    [found] = re.findall(rf'^tgi_request_failure{{err="{kind}"}} (\S+)$', text, re.MULTILINE)
    return float(found)


def test_a_full_server_says_when_to_come_back(http, server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which it takes for a ban of this
    hub = InferenceClient(server.url, token=KEY)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    held, lines, before = [], [], failures(http, "overloaded")
    try:
        for _ in range(6):
            request = http.build_request(
                "POST", "/generate_stream", json={"inputs": "A", "parameters": LONG}
            )
            held.append(http.send(request, stream=True))
            lines.append(held[-1].iter_lines())  # dropping it would close the response
            next(lines[-1])
        for path, body in (("/generate", {"inputs": "A"}), ("/v1/completions", {"prompt": "A"})):
            answer = http.post(path, json=body)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
        assert http.post("/generate", json={"inputs": "A"}).json()["error_type"] == "overloaded"
        assert failures(http, "overloaded") == before + 3
        with pytest.raises(OverloadedError, match="max_concurrent_requests"):
            hub.text_generation("A")
        with pytest.raises(openai.RateLimitError) as refused:
            client.with_options(max_retries=0).completions.create(model="x", prompt="A")
        assert int(refused.value.response.headers["retry-after"]) >= 1
    finally:
        for response in held:
            response.close()
    wait_until(server.is_idle)
    # With its usual retries the client waits for its turn.
    assert client.completions.create(model="x", prompt="A").choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_stops_a_request(http, server, stream):
    body = {"prompt": "A", "max_tokens": 6000, "timeout": 0.4, "stream": stream}
    body["ignore_eos"] = True
    if stream:
        with http.stream("POST", "/v1/completions", json=body) as response:
            found = events(response)
        assert found[-1] == "[DONE]"
        error = found[-2]["error"]
    else:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 424
        error = answer.json()["error"]
    assert error["code"] == "timeout"
    assert "0.4 s" in error["message"]
    wait_until(server.is_idle)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/chat/completions"])
def test_hanging_up_frees_the_pages(http, server, path):
    body = {"inputs": "A", "parameters": LONG}
    if path.startswith("/v1"):
        body = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 6000}
        body["temperature"] = 0  # it could draw the end token
    with server.connect(path, body, headers=f"Authorization: Bearer {KEY}\r\n"):
        wait_until(lambda: server.stats()["running"] == 1)
        before = server.stats()["generated_tokens"]
    wait_until(server.is_idle)
    assert server.stats()["generated_tokens"] - before < 5000


def test_a_slow_reader_holds_nobody_up(http, server):
    """It reads nothing at all; its answer ends all the same, and others do not notice."""
    body = {"inputs": "A", "parameters": {"max_new_tokens": 1500}}
    headers = f"Authorization: Bearer {KEY}\r\n"
    connection = server.connect("/generate_stream", body, headers=headers, buffer=1024)
    wait_until(lambda: server.stats()["running"] == 1)
    answer = http.post("/generate", json={"inputs": "B", "parameters": {"max_new_tokens": 20}})
    assert answer.status_code == 200
    wait_until(server.is_idle)
    received = b""
    while b'"input_length"' not in received:  # nothing of it was lost
        received += connection.recv(65536)
    assert received.count(b"data: ") == 1500
    connection.close()


def test_a_second_signal_ends_it_at_once(http, server):
    """The first lets what runs go on, and takes no more connections."""
    headers = f"Authorization: Bearer {KEY}\r\n"
    with server.connect("/generate", {"inputs": "A", "parameters": LONG}, headers=headers):
        wait_until(lambda: server.stats()["running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not listens(server))
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 130  # what ran is given three times as long


def listens(server):
    with socket.socket() as connection:
        host, port = server.url.removeprefix("http://").split(":")
        return connection.connect_ex((host, int(port))) == 0
