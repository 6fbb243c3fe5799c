"""The engine's outputs as LangChain's chat messages and chunks.

Owner: the LangChain integration. Invariants: the chunks of a stream add up to the message that
a call without streaming gives; one chunk, the last, has the usage and the model's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_pagedllm.results import logprobs_content, usage_metadata
from pagedllm import EngineError
from pagedllm.structured import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from langchain_core.messages import ToolCallChunk

    from pagedllm import CompletionOutput, RequestOutput
    from pagedllm.structured import Event, OutputParser, PreparedChat


def chat_result(model_id: str, chat: PreparedChat, output: RequestOutput) -> ChatResult:
    """Turn a finished output into messages, one for each of its ``n`` answers."""
    if output.error is not None:
        raise EngineError(str(output.error)) from output.error
    generations = []
    for answer in output.outputs:
        parsed = chat.parser().parse(answer.text)
        # A whole message is the sum of its stream: one way to read tool calls.
        chunk = AIMessageChunk(
            content=parsed.content,
            tool_call_chunks=[
                _tool_chunk(i, call.id, call.name, call.arguments)
                for i, call in enumerate(parsed.tool_calls)
            ],
        )
        message = AIMessage(
            content=parsed.content,
            tool_calls=chunk.tool_calls,
            invalid_tool_calls=chunk.invalid_tool_calls,
            usage_metadata=usage_metadata(output),
        )
        if parsed.reasoning:
            message.additional_kwargs["reasoning_content"] = parsed.reasoning
        details = _details(model_id, answer, called=bool(parsed.tool_calls))
        if answer.logprobs is not None:
            details["logprobs"] = {"content": logprobs_content(answer)}
        message.response_metadata = details
        generations.append(ChatGeneration(message=message, generation_info=dict(details)))
    return ChatResult(generations=generations, llm_output={"model_name": model_id})


def chat_chunks(
    model_id: str, parser: OutputParser, output: RequestOutput
) -> Iterator[ChatGenerationChunk]:
    """What is new in a stream; the last chunk says how it ended and what it used."""
    answer = output.outputs[0]
    events = parser.feed(answer.text_delta)
    if answer.finished:
        events += parser.finish()
    details: dict[str, Any] = {}
    if answer.logprobs is not None and answer.new_token_ids:
        details["logprobs"] = {"content": logprobs_content(answer, len(answer.new_token_ids))}
    for event in events:
        yield ChatGenerationChunk(message=_chunk_of(event), generation_info=details or None)
        details = {}
    if not answer.finished:
        if details:
            yield ChatGenerationChunk(message=AIMessageChunk(content=""), generation_info=details)
        return
    details |= _details(model_id, answer, called=parser.num_calls > 0)
    last = AIMessageChunk(content="", chunk_position="last", usage_metadata=usage_metadata(output))
    yield ChatGenerationChunk(message=last, generation_info=details)


def _details(model_id: str, answer: CompletionOutput, *, called: bool) -> dict[str, Any]:
    reason = answer.finish_reason
    return {
        "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        "stop_reason": answer.stop_reason,
        "model_name": model_id,
        "model_provider": "pagedllm",
    }


def _chunk_of(event: Event) -> AIMessageChunk:
    match event:
        case ContentDelta(text):
            return AIMessageChunk(content=text)
        case ReasoningDelta(text):
            return AIMessageChunk(content="", additional_kwargs={"reasoning_content": text})
        case ToolCallStart(index, call_id, name):
            return AIMessageChunk(
                content="", tool_call_chunks=[_tool_chunk(index, call_id, name, "")]
            )
        case ToolCallDelta(index, arguments):
            return AIMessageChunk(
                content="", tool_call_chunks=[_tool_chunk(index, None, None, arguments)]
            )


def _tool_chunk(index: int, call_id: str | None, name: str | None, arguments: str) -> ToolCallChunk:
    return {
        "index": index,
        "id": call_id,
        "name": name,
        "args": arguments,
        "type": "tool_call_chunk",
    }
