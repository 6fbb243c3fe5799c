"""Logits processors that a request names: those that the server lets it, and no others."""

from __future__ import annotations

import httpx
import pytest

from server_process import wait_until

ONLY = {"name": "only", "token_ids": [40]}


@pytest.fixture(scope="module", params=["shared_server", "process_server"])
def base(request):
    server = request.getfixturevalue(request.param)  # the engine in a thread, in a process
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def post(client, path, **body):
    return client.post(path, json={"max_tokens": 4, "temperature": 0, **body})


def test_a_named_processor_acts_on_both_routes(base):
    plain = post(base, "/v1/completions", prompt="x", allowed_token_ids=[40]).json()
    named = post(base, "/v1/completions", prompt="x", logits_processors=[ONLY]).json()
    assert named["choices"][0]["text"] == plain["choices"][0]["text"]
    messages = [{"role": "user", "content": "x"}]
    chat = post(base, "/v1/chat/completions", messages=messages, logits_processors=[ONLY]).json()
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["secret"], ["name only, not 'secret'", "--logits-processors"]),
        (["only"], ["'only' of the plugin house", "token_ids"]),
        ([{"name": "only", "ids": [1]}], ["'ids'"]),
        ([{"token_ids": [1]}], ["logits_processors"]),
        ("only", ["logits_processors"]),
    ],
)
def test_what_is_wrong_is_422_with_the_field(base, given, words):
    answer = post(base, "/v1/completions", prompt="x", logits_processors=given)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"].startswith("logits_processors")
    for word in words:
        assert word in error["message"]


def test_hanging_up_frees_the_pages_within_a_step(base):
    """The step that runs meanwhile is ended, and no other begins once the hang-up is seen."""
    slow = {**ONLY, "seconds": 1.0}
    body = {"prompt": "x", "max_tokens": 500, "temperature": 0, "stream": True}
    with base.stream("POST", "/v1/completions", json={**body, "logits_processors": [slow]}) as got:
        lines = got.iter_lines()  # to be kept: without it, httpx hangs up
        next(lines)
        before = base.get("/stats").json()
    assert before["pages"]["used"] > 0

    def idle():
        after.update(base.get("/stats").json())
        return not after["running"] and not after["pages"]["used"]

    after = {}
    wait_until(idle)
    # One that had begun when the statistics were made, and one until the hang-up is seen; two
    # more where a busy machine takes seconds to see it.
    assert after["steps"] - before["steps"] <= 4
