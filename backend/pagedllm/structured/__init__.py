"""Answers of a given form: constraints, tool calls and reasoning.

Owner: the public API, for callers and for adapters such as an HTTP server. Two things live
here, and neither needs the other.

**Constraints.** :class:`StructuredOutput` in ``SamplingParams(structured_output=...)`` holds
the whole answer to a JSON schema, a regular expression, a choice or a grammar::

    params = SamplingParams(structured_output={"json_schema": schema}, max_tokens=200)
    json.loads(llm.generate(prompt, params)[0].outputs[0].text)

**Chats with tools.** ``llm.chat(messages, params, tools=..., tool_choice=...)`` and its
streaming and asynchronous relatives show the tools to the model and hold its calls to their
schemas; the output's text is what the model wrote. To read it, prepare the chat first::

    chat = llm.prepare_chat(messages, params, tools=tools, tool_choice="auto")
    output = llm.generate([chat.prompt_token_ids], chat.params)[0]
    message = chat.parser().parse(output.outputs[0].text)   # content, reasoning, tool_calls

and for a stream, with a parser of its own for each of ``n`` answers::

    parser = chat.parser()
    for output in llm.stream(chat.prompt_token_ids, chat.params):
        answer = output.outputs[0]
        events = parser.feed(answer.text_delta)
        if answer.finished:
            events += parser.finish()
        for event in events:
            match event:
                case ContentDelta(text): ...
                case ReasoningDelta(text): ...
                case ToolCallStart(index, id, name): ...
                case ToolCallDelta(index, arguments): ...   # a piece of JSON text

Arguments stay the text the model wrote: valid JSON for the tool's schema when a grammar held
it and the answer is complete (``finish_reason`` is not ``length``), anything otherwise. An
answer with calls and ``finish_reason='stop'`` is what OpenAI's API calls ``tool_calls``.

``tool_choice``: ``'none'`` hides the tools; ``'auto'`` leaves it to the model, and once it
begins a call the call is held to a schema (without llguidance it is only parsed);
``'required'`` and a tool's name leave it no other way. :class:`ChatFormat` tells from the
chat template how the model writes calls; a template that knows no tools gets them described
in its system message.
"""

from __future__ import annotations

from pagedllm.structured.chat import ChatFormat, PreparedChat, ToolRequest
from pagedllm.structured.formats import ToolFormat
from pagedllm.structured.messages import (
    ContentDelta,
    Event,
    ParsedMessage,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    new_call_id,
)
from pagedllm.structured.parser import OutputParser
from pagedllm.structured.spec import StructuredOutput

__all__ = [
    "ChatFormat",
    "ContentDelta",
    "Event",
    "OutputParser",
    "ParsedMessage",
    "PreparedChat",
    "ReasoningDelta",
    "StructuredOutput",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallStart",
    "ToolFormat",
    "ToolRequest",
    "new_call_id",
]
