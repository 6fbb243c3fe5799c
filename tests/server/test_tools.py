"""Tools, forms and reasoning, through the clients; a random model, so grammars do the work."""

from __future__ import annotations

import json
from typing import Literal

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient, constants
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from server_process import events

MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
]
ONE = {"type": "function", "function": {"name": "weather"}}


class Weather(BaseModel):
    """What pydantic users ask for."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_named_tool_is_called_with_arguments_of_its_schema(client):
    options = {"model": "any", "messages": MESSAGES, "tools": TOOLS, "tool_choice": ONE}
    whole = client.chat.completions.create(**options, temperature=0, max_tokens=200)
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    call = choice.message.tool_calls[0]
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)
    # And as a stream: the same call, its arguments in pieces.
    calls, reason = {}, None
    for chunk in client.chat.completions.create(
        **options, temperature=0, max_tokens=200, stream=True
    ):
        [piece] = chunk.choices
        reason = piece.finish_reason or reason
        for part in piece.delta.tool_calls or ():
            known = calls.setdefault(part.index, {"name": "", "arguments": "", "pieces": 0})
            known["name"] += part.function.name or ""
            known["arguments"] += part.function.arguments or ""
            known["pieces"] += 1
    assert reason == "tool_calls"
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [
        (c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ]
    assert calls[0]["pieces"] > 1  # a busy server sends several tokens together


def test_a_conversation_with_calls_and_results_goes_on(client):
    first = client.chat.completions.create(
        model="any", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=300
    )
    message = first.choices[0].message
    if not message.tool_calls:  # cut off in the middle of a call to the tool without a schema
        assert first.choices[0].finish_reason == "length"
        return
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    calls = message.model_dump()
    calls["tool_calls"] = calls["tool_calls"][:1]
    again = client.chat.completions.create(
        model="any", messages=[*MESSAGES, calls, result], tools=TOOLS, max_tokens=5, temperature=0
    )
    assert again.usage.completion_tokens == 5


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_response_formats_of_both_families(server, form, stream):
    body = {"messages": MESSAGES, "response_format": form, "max_tokens": 100, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if stream:
        chunks = [json.loads(x[6:]) for x in answer.text.split("\n\n") if x.startswith("data: {")]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    else:
        text = answer.json()["choices"][0]["message"]["content"]
    Weather.model_validate_json(text)


def test_native_grammars(server):
    def ask(grammar):
        body = {"inputs": "A", "parameters": {"grammar": grammar, "max_new_tokens": 100}}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["generated_text"]

    Weather.model_validate_json(ask({"type": "json", "value": SCHEMA}))
    Weather.model_validate_json(ask({"type": "json_schema", "value": {"schema": SCHEMA}}))
    assert ask({"type": "regex", "value": "(yes|no)"}) in ("yes", "no")


def test_openai_parses_into_a_class(client):
    parsed = client.chat.completions.parse(
        model="any", messages=MESSAGES, response_format=Weather, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(
        model="any", messages=MESSAGES, response_format=Weather, max_tokens=100
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def test_hub_asks_for_a_form_and_a_tool(server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub = InferenceClient(server.url)
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
        whole = hub.chat_completion(MESSAGES, response_format=form, max_tokens=100)
        Weather.model_validate_json(whole.choices[0].message.content)
        called = hub.chat_completion(MESSAGES, tools=TOOLS, tool_choice=ONE, max_tokens=200)
        [call, *_] = called.choices[0].message.tool_calls
        assert call.function.name == "weather"


def test_langchain_binds_tools_and_structures(server):
    @langchain_tool
    def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
        """Say the weather."""
        return "rain"

    chat = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="x", model="any", max_tokens=200, temperature=0
    )
    answer = chat.bind_tools([weather], tool_choice="weather").invoke("Rome?")
    assert answer.tool_calls[0]["name"] == "weather"
    assert set(answer.tool_calls[0]["args"]) == {"city", "days"}
    for method in ("json_schema", "function_calling"):
        structured = chat.with_structured_output(Weather, method=method)
        assert isinstance(structured.invoke("Rome?"), Weather)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sing"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "value": {"type": 7}}}, "response_format"),
        ({"response_format": {"type": "regex", "value": "(unclosed"}}, "response_format"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, more, param):
    body = {"messages": MESSAGES, "max_tokens": 5, **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["param"] == param


# -- /v1/responses --------------------------------------------------------------------


def test_responses_give_text_as_a_whole_and_as_a_stream(client):
    options = {"model": "any", "input": "Say something.", "temperature": 0}
    whole = client.responses.create(**options, max_output_tokens=8)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text
    assert whole.usage.output_tokens == 8
    events = list(client.responses.create(**options, max_output_tokens=8, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    form = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}
    with client.responses.stream(**options, text=form) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    Weather.model_validate_json(final.output_text)
    assert {"response.output_item.added", "response.output_item.done"} <= kinds


def test_responses_call_functions_and_take_results(client):
    flat = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    options = {"model": "any", "tools": flat, "temperature": 0}
    choice = {"type": "function", "name": "weather"}
    whole = client.responses.create(**options, input="Rome?", tool_choice=choice)
    call = whole.output[0]
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    pieces = ""
    for event in client.responses.create(**options, input="Rome?", tool_choice=choice, stream=True):
        if event.type == "response.function_call_arguments.delta" and event.output_index == 0:
            pieces += event.delta
    assert pieces == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    conversation = [{"role": "user", "content": "Rome?"}, call.model_dump(), result]
    again = client.responses.create(**options, input=conversation, max_output_tokens=5)
    assert again.usage.output_tokens == 5


def test_responses_parse_into_a_class(client):
    parsed = client.responses.parse(model="any", input="Rome?", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    with pytest.raises(openai.UnprocessableEntityError) as wrong:
        client.responses.create(model="any", input="A", previous_response_id="resp_1")
    assert wrong.value.param == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart_from_content(server, stream):
    body = {
        "messages": [{"role": "user", "content": "Well?"}],
        "structured_outputs": {"regex": "<think>hm, hm</think>yes"},
        "max_tokens": 100,
        "stream": stream,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    if stream:
        chunks = [found for found in events(answer) if found != "[DONE]"]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        message = {
            name: "".join(delta.get(name) or "" for delta in deltas)
            for name in ("reasoning_content", "content")
        }
    else:
        message = answer.json()["choices"][0]["message"]
        assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 1
    assert message["reasoning_content"] == "hm, hm"
    assert message["content"] == "yes"
