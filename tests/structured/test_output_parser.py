"""The parser of answers: the same message however the text is cut, and no text lost."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.structured import (
    ContentDelta,
    OutputParser,
    ParsedMessage,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from pagedllm.structured.formats import FORMATS, GEMMA, HERMES, LLAMA3, MISTRAL, SMOLLM

TOOLS = frozenset({"w", "v"})


def parse(tool_format, text, pieces=None, **options):
    """The message, and the events that made it."""
    parser = OutputParser(tool_format, options.pop("tools", TOOLS), **options)
    events = []
    for piece in [text] if pieces is None else pieces:
        events += parser.feed(piece)
    events += parser.finish()
    return ParsedMessage.of(events), events


def cut(text, seed):
    chance, pieces = random.Random(seed), []
    while text:
        size = chance.choice((1, 1, 1, 2, 3, 8))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def calls(message):
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


CASES = [
    # format, text, content, reasoning, calls
    (HERMES, "hello", "hello", "", []),
    (HERMES, "", "", "", []),
    (HERMES, " \n", " \n", "", []),
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "w", "arguments": {"a": "x}\\"<y"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"b": [1]}, "name": "v"}\n</tool_call>',
        "Let me see.",
        "",
        [("w", {"a": 'x}"<y'}), ("v", {"b": [1]})],
    ),
    (HERMES, '<tool_call>{"name": "w"}</tool_call>\nDone.', "\nDone.", "", [("w", {})]),
    (
        HERMES,
        '<tool_call>{"name": "w", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("w", {"a": 1})],
    ),
    (HERMES, "<think>\nhm\n\nso\n</think>\n\nYes < no. ", "Yes < no. ", "hm\n\nso", []),
    (
        HERMES,
        '<think>call w</think><tool_call>{"name": "w", "arguments": {}}</tool_call>',
        "",
        "call w",
        [("w", {})],
    ),
    (HERMES, "<think>never ended <", "", "never ended <", []),
    (HERMES, "<thi", "<thi", "", []),
    (HERMES, "no <think>block</think> here", "no <think>block</think> here", "", []),
    (HERMES, "<tool_call>oops</tool_call> x", "<tool_call>oops</tool_call> x", "", []),
    (HERMES, '<tool_call>\n{"nam', '<tool_call>\n{"nam', "", []),
    (HERMES, "an <tool tag", "an <tool tag", "", []),
    (
        SMOLLM,
        'Sure. <tool_call>[{"name": "w", "arguments": {"a": 1}}, {"name": "v"}]</tool_call>',
        "Sure.",
        "",
        [("w", {"a": 1}), ("v", {})],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "w", "arguments": {"a": 1}, "id": "x"}, {"name": "v"}]',
        "",
        "",
        [("w", {"a": 1}), ("v", {})],
    ),
    (
        FORMATS["mistral-args"],
        'Well[TOOL_CALLS]w[ARGS]{"a": 1}[TOOL_CALLS]v{"b": {}}',
        "Well",
        "",
        [("w", {"a": 1}), ("v", {"b": {}})],
    ),
    (FORMATS["mistral-args"], "[TOOL_CALLS]not a call", "[TOOL_CALLS]not a call", "", []),
    (
        LLAMA3,
        '<|python_tag|>{"name": "w", "parameters": {"a": 1}}; {"name": "v", "parameters": {}}',
        "",
        "",
        [("w", {"a": 1}), ("v", {})],
    ),
    (LLAMA3, ' {"name": "Bob", "age": 3}', ' {"name": "Bob", "age": 3}', "", []),
    (LLAMA3, '{"x": 1} rest', '{"x": 1} rest', "", []),
    (LLAMA3, '[w(a="x", b=[1, 2]), v()]', "", "", [("w", {"a": "x", "b": [1, 2]}), ("v", {})]),
    (LLAMA3, "[see](https://example.org)", "[see](https://example.org)", "", []),
    (LLAMA3, "[1, 2]", "[1, 2]", "", []),
    (GEMMA, "```tool_code\nprint(w(a=1))\n```", "", "", [("w", {"a": 1})]),
    (GEMMA, '```json\n{"name": "w", "parameters": {"a": 1}}\n```\n', "", "", [("w", {"a": 1})]),
    (GEMMA, "```python\nx = 1\n```\nhi", "```python\nx = 1\n```\nhi", "", []),
    (GEMMA, "```tool_code\nw(a=v())\n```", "```tool_code\nw(a=v())\n```", "", []),
    (GEMMA, '{"name": "w", "parameters": {"a": 1}}\n', "", "", [("w", {"a": 1})]),
    (None, '{"name": "w", "parameters": {}}', '{"name": "w", "parameters": {}}', "", []),
    (None, "<think>a</think>b", "b", "a", []),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0] and case[0].name}:{case[1][:30]}"
)
def test_every_format_whole_and_in_pieces(case):
    tool_format, text, content, reasoning, expected = case
    message, _ = parse(tool_format, text)
    assert message.content == content
    assert message.reasoning == reasoning
    assert calls(message) == expected
    for seed in range(40):
        again, _ = parse(tool_format, text, cut(text, seed))
        assert (again.content, again.reasoning, calls(again)) == (content, reasoning, expected)


PARTS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "{", "}"),
    *('"name"', '"arguments"', ":", ",", '"w"', "[", "]", "(", ")", "```", "json", "\n", " "),
    *("w", "1", "é", '"', "\\", "<|python_tag|>", '{"name": "w", "arguments": {"a": 1}}'),
)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([None, *FORMATS.values()]),
    st.lists(
        st.sampled_from(PARTS),
        max_size=14,
    ),
    st.integers(0, 2**32),
)  # fmt: skip
def test_pieces_never_matter_and_nothing_raises(tool_format, parts, seed):
    text = "".join(parts)
    whole, _ = parse(tool_format, text, new_id=lambda: "id")
    pieces, _ = parse(tool_format, text, cut(text, seed), new_id=lambda: "id")
    assert pieces == whole
    if not whole.tool_calls:
        kept = whole.reasoning + whole.content
        lost = text.replace("<think>", "").replace("</think>", "")
        for known in ("<think>", "</think>"):
            kept = kept.replace(known, "")
        assert "".join(kept.split()) == "".join(lost.split())


def test_arguments_come_while_they_are_written():
    text = '<tool_call>\n{"name": "w", "arguments": {"city": "Zürich", "n": 3}}\n</tool_call>'
    parser = OutputParser(HERMES)
    seen = [event for character in text for event in parser.feed(character)]
    assert isinstance(seen[0], ToolCallStart)
    assert seen[0].name == "w"
    deltas = [event for event in seen[1:] if isinstance(event, ToolCallDelta)]
    assert len(deltas) == len('{"city": "Zürich", "n": 3}')
    assert parser.finish() == []


def test_content_and_reasoning_come_while_they_are_written():
    parser = OutputParser(HERMES)
    assert parser.feed("<think>a b") == [ReasoningDelta("a b")]
    assert parser.feed(" c</thi") == [ReasoningDelta(" c")]
    assert parser.feed("nk>\n\n") == []
    assert parser.feed("Hi, I <") == [ContentDelta("Hi, I")]
    assert parser.feed("3 you ") == [ContentDelta(" <3 you")]
    assert parser.finish() == [ContentDelta(" ")]


def test_a_prompt_may_have_opened_the_thoughts():
    message, _ = parse(HERMES, "so\n</think>\nyes", thinking=True)
    assert (message.reasoning, message.content) == ("so", "yes")


def test_a_call_that_is_cut_off_keeps_what_there_is_of_it():
    message, _ = parse(HERMES, '<tool_call>\n{"name": "w", "arguments": {"a": "lo')
    (call,) = message.tool_calls
    assert (call.name, call.arguments, message.content) == ("w", '{"a": "lo', "")


def test_ids_differ_and_suit_the_strictest_template():
    text = '<tool_call>{"name": "w"}</tool_call>' * 20
    message, _ = parse(HERMES, text)
    ids = {call.id for call in message.tool_calls}
    assert len(ids) == 20
    assert all(len(each) == 9 and each.isalnum() for each in ids)
