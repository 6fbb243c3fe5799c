"""TGI's contract where no client looks: headers, wrappings, what is said of the server."""

from __future__ import annotations

import pytest

from server_process import events

PARAMETERS = {"max_new_tokens": 4, "details": True}
MESSAGES = [{"role": "user", "content": "Say something."}]
HEADERS = {
    "x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time",
    "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token",
    "x-prompt-tokens", "x-generated-tokens",
}  # fmt: skip
INFO = """
model_id model_sha model_dtype model_device_type model_pipeline_tag max_concurrent_requests
max_best_of max_stop_sequences max_input_tokens max_total_tokens validation_workers
max_client_batch_size router version sha docker_label
"""


def test_headers_and_the_roots_list(http):
    body = {"inputs": "Once upon a time", "parameters": PARAMETERS}
    plain = http.post("/generate", json=body)
    [wrapped] = (root := http.post("/", json={**body, "stream": False})).json()
    assert wrapped["generated_text"] == plain.json()["generated_text"]
    for answer in (plain, root):
        assert set(answer.headers) >= HEADERS
        assert answer.headers["x-compute-type"] == "cpu"
        assert answer.headers["x-compute-characters"] == "16"
        assert answer.headers["x-generated-tokens"] == "4"
        total, queue, inference, each = (
            float(answer.headers[f"x-{name}"])
            for name in ("total-time", "queue-time", "inference-time", "time-per-token")
        )
        assert total + 2 >= queue + inference  # in whole milliseconds, each rounded
        assert each <= inference


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": ["Once", "upon"]}), ("/v1/chat/completions", {})],
)
def test_openai_answers_have_them_too(http, path, body):
    body = body or {"messages": MESSAGES}
    answer = http.post(path, json={**body, "max_tokens": 3, "ignore_eos": True})
    known = HEADERS if "prompt" in body else HEADERS - {"x-compute-characters"}
    assert set(answer.headers) >= known
    usage = answer.json()["usage"]
    assert answer.headers["x-prompt-tokens"] == str(usage["prompt_tokens"])
    assert answer.headers["x-generated-tokens"] == str(usage["completion_tokens"])
    if "prompt" in body:
        assert answer.headers["x-compute-characters"] == "8"
    with http.stream("POST", path, json={**body, "max_tokens": 3, "stream": True}) as stream:
        assert stream.headers["x-compute-type"] == "cpu"


def check_stream_headers(answer):
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"  # for a proxy, such as nginx
    assert answer.headers["x-request-id"]
    assert "content-length" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "A", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 2}),
    ],
)
def test_headers_of_openai_streams(http, path, body):
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        check_stream_headers(answer)
        assert events(answer)


def test_counters_have_what_is_refused_and_every_route(http):
    def counted():
        lines = http.get("/metrics").text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tgi_request_"))
        return [
            float(found[f"tgi_request_{name}"])
            for name in ("count", "success", 'failure{err="validation"}', "max_new_tokens_count")
        ]

    before = counted()
    for path, body in (
        ("/generate", {"inputs": "A", "parameters": {"max_new_tokens": 2}}),
        ("/v1/completions", {"prompt": "A", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 2}),
    ):
        assert http.post(path, json=body).status_code == 200
    for path, body in (
        ("/generate", {"inputs": ""}),
        ("/generate_stream", {"inputs": "A", "parameters": {"temperature": 0}}),
        ("/v1/completions", {"prompt": "A", "max_tokens": 9999}),
        ("/tokenize", {"inputs": ""}),  # generates nothing, and so counts for nothing
    ):
        assert http.post(path, json=body).status_code == 422
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [7, 4, 3, 4]


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
def test_events_of_the_native_routes(http, path):
    body = {"inputs": "Once upon", "parameters": {"max_new_tokens": 4, "top_n_tokens": 2}}
    body |= {"stream": True} if path == "/" else {}
    with http.stream("POST", path, json=body) as answer:
        check_stream_headers(answer)
        assert answer.headers["x-compute-type"] == "cpu"
        assert answer.headers["x-compute-characters"] == "9"
        found = events(answer)  # with no [DONE] at the end
    assert [event["index"] for event in found] == [1, 2, 3, 4]
    for event in found:
        assert set(event) == {"index", "token", "top_tokens", "generated_text", "details"}
        assert set(event["token"]) == {"id", "text", "logprob", "special"}
        assert len(event["top_tokens"]) == 2
    assert all(event["details"] is event["generated_text"] is None for event in found[:-1])
    last = found[-1]["details"]
    assert set(last) == {"finish_reason", "generated_tokens", "seed", "input_length"}
    assert (last["finish_reason"], last["generated_tokens"]) == ("length", 4)
    whole = http.post("/generate", json={"inputs": "Once upon", "parameters": PARAMETERS}).json()
    assert found[-1]["generated_text"] == whole["generated_text"]


def test_without_parameters_it_samples_and_with_none_set_it_does_not(http):
    texts = {http.post("/generate", json={"inputs": "A"}).json()["generated_text"] for _ in "abc"}
    assert len(texts) > 1  # a hundred tokens of a random model each
    body = {"inputs": "A", "parameters": {}}
    texts = {http.post("/generate", json=body).json()["generated_text"] for _ in "abc"}
    assert len(texts) == 1


def test_tokens_of_texts_and_conversations(http):
    found = http.post("/tokenize", json={"inputs": "Hello world, größer"}).json()
    assert "".join(token["text"] for token in found) == "Hello world, größer"
    assert all("Hello world, größer"[t["start"] : t["stop"]] == t["text"] for t in found)
    chat = http.post("/chat_tokenize", json={"messages": MESSAGES}).json()
    assert set(chat) == {"tokenize_response", "templated_text"}
    assert "Say something." in chat["templated_text"]
    ids = [token["id"] for token in chat["tokenize_response"]]
    body = {"messages": MESSAGES, "max_tokens": 1}
    asked = http.post("/v1/chat/completions", json=body).json()
    assert asked["usage"]["prompt_tokens"] == len(ids)


def test_sagemakers_and_googles_wrappings(http):
    native = {"inputs": "Once upon", "parameters": {"max_new_tokens": 4}}
    text = http.post("/generate", json=native).json()["generated_text"]
    assert http.post("/invocations", json=native).json() == [{"generated_text": text}]
    chat = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    said = http.post("/invocations", json=chat).json()["choices"][0]["message"]["content"]
    plain = http.post("/v1/chat/completions", json=chat).json()
    assert said == plain["choices"][0]["message"]["content"]
    completion = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
    assert http.post("/invocations", json=completion).json()["choices"][0]["text"] == text
    with http.stream("POST", "/invocations", json={**native, "stream": True}) as answer:
        assert events(answer)[-1]["generated_text"] == text
    both = http.post("/vertex", json={"instances": [native, chat]}).json()["predictions"]
    assert both[0] == [{"generated_text": text}]
    assert both[1]["choices"][0]["message"]["content"] == said
    wrong = http.post("/invocations", json={"input": "A"})
    assert wrong.status_code == 422
    assert "'inputs', 'messages' and 'prompt'" in wrong.json()["error"]
    wrong = http.post("/vertex", json={"instances": [{**native, "stream": True}]})
    assert wrong.status_code == 422
    assert "stream" in wrong.json()["error"]


def test_what_is_said_of_the_server(http):
    info = http.get("/info").json()
    assert set(info) >= set(INFO.split())
    assert info["max_total_tokens"] == 512
    assert info["max_input_tokens"] == 511
    assert info["model_device_type"] == "cpu"
    assert info["router"] == "pagedllm"
    for path in ("/", "/health", "/ping"):
        assert http.get(path).status_code == 200
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")


def test_errors_have_the_form_of_their_route(http):
    native = http.post("/generate", json={"inputs": "", "parameters": {}})
    assert (native.status_code, native.json()["error_type"]) == (422, "validation")
    body = {"prompt": "A", "max_tokens": 450, "timeout": 0.01, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        found = events(answer)
    assert found[-1] == "[DONE]"
    assert set(found[-2]["error"]) == {"message", "type", "param", "code"}
    body = {"inputs": "A", "parameters": {"max_new_tokens": 450, "timeout": 0.01}}
    with http.stream("POST", "/generate_stream", json=body) as answer:
        last = events(answer)[-1]
    assert set(last) == {"error", "error_type"}
    assert last["error_type"] == "generation"
