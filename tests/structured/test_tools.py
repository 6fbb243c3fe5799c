"""Tools: what a model of random weights calls when it must, and how templates see them."""

from __future__ import annotations

import json
import random

import pytest

from pagedllm import LLM, SamplingParams, ValidationError
from pagedllm.structured import ChatFormat, ToolRequest
from pagedllm.structured.formats import FORMATS

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "unit": {"enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "unit"],
        },
    },
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/Digit"}, "b": {"$ref": "#/$defs/Digit"}},
        "required": ["a", "b"],
        "$defs": {"Digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
}
ASK = [{"role": "user", "content": "How warm is it?"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TEMPLATES = {
    "hermes": CHATML + "{# <tool_call> #}",
    "smollm": CHATML + "{# SmolLM #}",
    "llama3": CHATML + "{# <|python_tag|> #}",
    "mistral": CHATML + "{# [TOOL_CALLS] #}",
    "mistral-args": CHATML + "{# [TOOL_CALLS] [ARGS] #}",
    "gemma": CHATML + "{# <start_of_turn> #}",
}


@pytest.fixture(scope="module")
def llm(tiny_text_model):
    with LLM(str(tiny_text_model), dtype="float32", num_pages=512) as llm:
        yield llm


def params(**fields):
    seed = random.randrange(2**31)
    print("seed:", seed)
    return SamplingParams(**{"seed": seed, "max_tokens": 300, **fields})


def answer(llm, **options):
    chat = llm.prepare_chat(ASK, options.pop("params", None) or params(), **options)
    (output,) = llm.generate([chat.prompt_token_ids], chat.params)
    (first,) = output.outputs
    print(repr(first.text))
    return chat.parser().parse(first.text), first.finish_reason


def check(call):
    arguments = json.loads(call.arguments)
    if call.name == "add":
        assert set(arguments) == {"a", "b"}
        assert all(value in range(10) for value in arguments.values())
    else:
        assert call.name == "get_weather"
        assert set(arguments) == {"city", "unit"}
        assert len(arguments["city"]) <= 5
        assert arguments["unit"] in ("celsius", "kelvin")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_comes_in_every_format_and_is_valid(llm, name):
    assert ChatFormat.of(llm.tokenizer, TEMPLATES[name]).tool_format is FORMATS[name]
    message, finish = answer(
        llm,
        tools=[WEATHER, ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        chat_template=TEMPLATES[name],
    )
    assert finish == "stop"
    assert message.content == ""
    (call,) = message.tool_calls
    check(call)


@pytest.mark.parametrize("name", TEMPLATES)
def test_parallel_calls_come_in_every_format_and_are_valid(llm, name):
    chat = llm.prepare_chat(
        ASK, params(), tools=[ADD], tool_choice="required", chat_template=TEMPLATES[name]
    )
    # After a call there are about three tokens that may follow, and one ends the answer.
    many = [chat.params.replace(seed=chat.params.seed + i) for i in range(24)]
    counts = []
    for output in llm.generate([chat.prompt_token_ids] * len(many), many):
        (first,) = output.outputs
        calls = chat.parser().parse(first.text).tool_calls
        whole = calls if first.finish_reason == "stop" else calls[:-1]
        for call in whole:
            check(call)
        counts.append(len(whole))
    assert max(counts) > 1


def test_a_named_tool_is_the_one_that_is_called(llm):
    for choice in ("add", {"type": "function", "function": {"name": "add"}}):
        message, _ = answer(llm, tools=[WEATHER, ADD], tool_choice=choice)
        (call,) = message.tool_calls
        assert call.name == "add"
        check(call)


def test_none_hides_the_tools(llm):
    shown = llm.prepare_chat(ASK, tools=[ADD])
    hidden = llm.prepare_chat(ASK, tools=[ADD], tool_choice="none")
    assert hidden.prompt_token_ids == llm.prepare_chat(ASK).prompt_token_ids
    assert "add" in llm.tokenizer.decode(shown.prompt_token_ids)
    assert hidden.params.structured_output is None
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert hidden.parser().parse(text).content == text
    assert shown.parser().parse(text).tool_calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_leaves_text_free_and_holds_a_call_once_it_begins(llm, name):
    """The model is made to begin a call by biasing nothing: the prompt's answer is forced."""
    chat = llm.prepare_chat(ASK, params(max_tokens=30), tools=[ADD], chat_template=TEMPLATES[name])
    (output,) = llm.generate([chat.prompt_token_ids], chat.params)
    free = chat.parser().parse(output.outputs[0].text)
    assert not free.tool_calls
    assert free.content
    assert "{" not in chat.chat_format.tool_format.begin

    form = chat.chat_format.tool_format
    opening = f"Well. {form.begin}" if form.begin else '{"name"'
    forced = llm.tokenizer(opening, add_special_tokens=False)["input_ids"]
    start = len(chat.prompt_token_ids)

    def begin(token_ids, logits):
        place = len(token_ids) - start
        if place < len(forced):
            logits[forced[place]] = float("inf")
        return logits

    held = chat.params.replace(logits_processors=[begin], max_tokens=300)
    (output,) = llm.generate([chat.prompt_token_ids], held)
    message = chat.parser().parse(output.outputs[0].text)
    print(repr(output.outputs[0].text))
    assert message.content.startswith("Well." if form.begin else "")
    check(message.tool_calls[0])


def test_reasoning_comes_first_and_is_told_apart(llm):
    template = CHATML + "<think>\n"
    regex = {"regex": "[0-9]{3}"}
    thinking = llm.prepare_chat(
        ASK, params(max_tokens=40, structured_output=regex), chat_template=template
    )
    closing = llm.tokenizer("ok</think>", add_special_tokens=False)["input_ids"]
    start = len(thinking.prompt_token_ids)

    def close(token_ids, logits):
        place = len(token_ids) - start
        if place < len(closing):
            logits[closing[place]] = float("inf")
        return logits

    held = thinking.params.replace(logits_processors=[close])
    (output,) = llm.generate([thinking.prompt_token_ids], held)
    message = thinking.parser().parse(output.outputs[0].text)
    assert message.reasoning == "ok"
    assert len(message.content) == 3
    assert message.content.isdigit()


def test_chat_shows_tools_to_a_template_that_knows_them(llm):
    template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + CHATML
    chat = llm.prepare_chat(ASK, tools=[WEATHER, ADD], chat_template=template)
    text = llm.tokenizer.decode(chat.prompt_token_ids)
    assert text.startswith("[get_weather][add]")
    assert text.count("get_weather") == 1


def test_a_template_that_knows_none_gets_them_in_the_system_message(llm):
    messages = [{"role": "system", "content": "Be brief."}, *ASK]
    text = llm.tokenizer.decode(llm.prepare_chat(messages, tools=[WEATHER]).prompt_token_ids)
    system, user = text.split("<|im_start|>user")
    assert system.count("<|im_start|>") == 1
    assert "Be brief." in system
    assert "Look up the weather." in system
    assert "get_weather" not in user


def test_earlier_calls_and_results_reach_a_template_that_knows_neither(llm):
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3 degrees"},
    ]
    text = llm.tokenizer.decode(llm.prepare_chat(messages, tools=[ADD]).prompt_token_ids)
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in text
    assert "3 degrees" in text


def test_llm_chat_and_its_relatives_take_tools(llm):
    options = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    request = llm.prepare_chat(ASK, params(), **options)
    whole = llm.chat([ASK, ASK], params(), **options)
    assert len(whole) == 2
    streamed = list(llm.chat_stream(ASK, params(), **options))
    for output in (*whole, streamed[-1]):
        (call,) = request.parser().parse(output.outputs[0].text).tool_calls
        check(call)


def test_sync_and_async_share_one_engine(llm):
    import asyncio

    async def ask():
        stream = llm.as_async().chat(ASK, params(), tools=[ADD], tool_choice="add")
        return [output async for output in stream][-1]

    before = llm.stats().requests
    output = asyncio.run(ask())
    assert '"add"' in output.outputs[0].text
    assert llm.stats().requests == before + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ["add"]}, r"tools\[0\]"),
        ({"tools": [{"name": 3}]}, "'name'"),
        ({"tools": [ADD, ADD]}, "two tools"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "JSON schema"),
        ({"tools": [ADD], "tool_choice": "ad"}, "did you mean 'add'"),
        ({"tools": [ADD], "tool_choice": {"function": {}}}, "tool_choice"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": "add"}, "neither"),
    ],
    ids=str,
)
def test_malformed_tools_are_refused(llm, options, message):
    with pytest.raises(ValidationError, match=message):
        llm.chat(ASK, **options)


def test_a_tool_whose_schema_no_grammar_can_hold_is_an_error_when_strict(llm):
    schema = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
    loose = {"name": "f", "parameters": schema}
    message, _ = answer(llm, tools=[loose], tool_choice="f", params=params(max_tokens=40))
    assert message.tool_calls[0].name == "f"
    with pytest.raises(ValidationError, match="not"):
        llm.chat(ASK, tools=[{**loose, "strict": True}], tool_choice="f")


def test_request_tells_what_may_be_called():
    request = ToolRequest.of([WEATHER, ADD], "add")
    assert request.active
    assert request.names == {"add"}
    assert not ToolRequest.of(None).active
