"""What cannot be served is refused by the name that the route has for it, and so is what would
have no effect."""

from __future__ import annotations

import pytest

SAID = [{"role": "user", "content": "A"}]
LONG = "many words " * 2_000
TOO_LONG = [{"role": "user", "content": LONG}]
COMPLETE, CHAT, RESPOND = "/v1/completions", "/v1/chat/completions", "/v1/responses"
FORM = {"type": "json_object", "value": {"type": 7}}
NAMES = [
    (COMPLETE, {"prompt": "A", "logprobs": 1000}, "logprobs"),
    (COMPLETE, {"prompt": "A", "best_of": 1000}, "best_of"),
    (COMPLETE, {"prompt": "A", "n": 1000}, "n"),
    (COMPLETE, {"prompt": "A", "max_tokens": 9999}, "max_tokens"),
    (COMPLETE, {"prompt": LONG}, "prompt"),
    (COMPLETE, {"prompt": "A", "response_format": FORM}, "response_format"),
    (COMPLETE, {"prompt": "A", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    (COMPLETE, {"prompt": "A", "stop": ["a", ""]}, "stop"),
    (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    (CHAT, {"messages": SAID, "max_tokens": 9999}, "max_tokens"),
    (CHAT, {"messages": SAID, "max_completion_tokens": 9999}, "max_completion_tokens"),
    (CHAT, {"messages": SAID, "response_format": FORM}, "response_format"),
    (CHAT, {"messages": SAID, "stop": ""}, "stop"),
    (CHAT, {"messages": TOO_LONG}, "messages"),
    (RESPOND, {"input": "A", "max_output_tokens": 9999}, "max_output_tokens"),
    (RESPOND, {"input": "A", "text": {"format": {"type": "odd"}}}, "text.format"),
    (
        RESPOND,
        {"input": "A", "text": {"format": {"type": "json_schema", "schema": {"type": 7}}}},
        "text.format",
    ),
    (RESPOND, {"input": LONG}, "input"),
    (RESPOND, {"input": "A", "include": ["message.output_text.logprobs"]}, "include"),
    (RESPOND, {"input": "A", "include": ["reasoning.encrypted_content"]}, "include"),
]


@pytest.mark.parametrize(("path", "body", "name"), NAMES)
def test_openai_routes_name_the_field(http, path, body, name):
    answer = http.post(path, json=body)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["param"] == name
    assert name in error["message"]
    assert "None" not in error["message"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/invocations"])
def test_native_routes_have_names_of_their_own(http, path):
    def refused(inputs, **parameters):
        answer = http.post(path, json={"inputs": inputs, "parameters": parameters})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        return answer.json()["error"]

    long = refused(LONG)
    assert "inputs" in long
    assert "set truncate," in long
    many = refused("A", max_new_tokens=9999)
    assert "max_new_tokens=9999" in many
    assert "null" in many
    for said in (long, many):
        assert "truncate_prompt_tokens" not in said
        assert "None" not in said
    assert "stop" in refused("A", stop=["b", ""])


def test_a_long_input_is_not_told_of_a_field_that_there_is_not(http):
    said = http.post(RESPOND, json={"input": LONG}).json()["error"]["message"]
    assert "max_model_len" in said
    assert "truncate" not in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ 1 }}"),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "a"}),
        ("guideline", "be good"),
    ],
)
def test_chat_tokenize_ignores_nothing(http, field, value):
    answer = http.post("/chat_tokenize", json={"messages": SAID, field: value})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(f"{field}: ")


def test_wrong_tools_have_an_error_type_of_their_own(http):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    wrong = [
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": [tool], "tool_choice": "sing"},
        {"tools": [tool], "tool_choice": {"type": "custom"}},
        {"tool_choice": "required"},
    ]
    for path in ("/chat_tokenize", "/invocations"):
        for more in wrong:
            answer = http.post(path, json={"messages": SAID, **more})
            assert (answer.status_code, answer.json()["error_type"]) == (422, "tool_error"), more
