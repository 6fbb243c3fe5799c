"""``/v1/chat/completions``: conversations, with tools, forms and reasoning.

Owner: the server integration. Invariants: what a stream's chunks join to is what the same
request without ``stream`` gives; a chunk that says why an answer ended comes once for each
answer, after everything of it.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from pagedllm import PagedLLMError, SamplingParams
from pagedllm_server.errors import ApiError, from_engine, invalid, naming, unsupported
from pagedllm_server.logs import new_id
from pagedllm_server.openai_common import (
    chat_logprobs,
    check_fields,
    limits,
    names,
    sampling_params,
    structure,
    usage,
)
from pagedllm_server.sse import DONE, EventStream, event, while_client_waits
from pagedllm_server.timing import Timing
from pagedllm_server.tokens import new_text, new_tokens
from pagedllm_server.tools import Reader, chat_delta, check_tools, tool_choice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from pagedllm import CompletionOutput, RequestOutput
    from pagedllm.structured import PreparedChat
    from pagedllm_server.app import Server
    from pagedllm_server.schemas_openai import ChatRequest
    from pagedllm_server.service import Run


RESERVED = (
    "chat_template",
    "conversation",
    "messages",
    "parallel_tool_calls",
    "return_dict",
    "return_tensors",
    "sampling_params",
    "tokenize",
    "tool_choice",
    "tools",
)
"""Names that ``chat_template_kwargs`` must not set: they are not the template's."""


async def answer(server: Server, request: Request, body: ChatRequest) -> Response:
    """Answer a chat request."""
    with naming(names(body)):
        return await _answer(server, request, body)


async def _answer(server: Server, request: Request, body: ChatRequest) -> Response:
    timing = Timing(server.device)
    check_fields(server, body)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream", "stream_options")
    chat = await prepare(server, body, _params(server, body))
    server.service.check_prompt(len(chat.prompt_token_ids), "messages")
    head = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": server.service.model_name,
        "system_fingerprint": server.fingerprint,
    }
    async with AsyncExitStack() as stack:
        stack.enter_context(server.service.admit())
        run = await server.service.start(chat.prompt_token_ids, chat.params, limits(body), 0)
        stack.push_async_callback(run.aclose)
        timing.checked()
        if body.stream:
            pieces = _chunks(server, body, chat, run, head)
            return EventStream(pieces, stack.pop_all().aclose, timing.of_stream())
        output = await while_client_waits(request, run.finished())
    choices, reasoning = [], 0
    for each in output.outputs:
        reader = Reader(chat.parser())
        choices.append(_choice(server, body, each, reader))
        reasoning += reader.reasoning_tokens(server, each)
    content = {**head, "choices": choices, "usage": usage([output], reasoning)}
    return JSONResponse(content, headers=timing.of_answer([output]))


def _params(server: Server, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
    limit = body.max_completion_tokens
    if limit is not None and body.max_tokens is not None and limit != body.max_tokens:
        raise invalid("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    form = structure(body.response_format)
    if form is not None and body.tools and body.tool_choice not in (None, "auto", "none"):
        raise invalid("response_format: cannot go with this tool_choice", "response_format")
    return sampling_params(
        server,
        body,
        max_tokens=limit if limit is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_output=form,
    )


async def prepare(server: Server, body: ChatRequest, params: SamplingParams) -> PreparedChat:
    """Format the conversation, and add to its parameters what its tools ask for."""
    check_tools(body.tools)
    if body.tools and server.service.options.disable_grammar_support:
        raise unsupported("tools", "this server was started with --disable-grammar-support")
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in RESERVED:
            field = f"chat_template_kwargs.{name}"
            raise invalid(f"{field}: is not the template's to know", field)
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    return await server.service.prepare_chat(
        [message.plain() for message in body.messages],
        params,
        tools=body.tools,
        tool_choice=tool_choice(body.tool_choice),
        **options,
    )


async def templated_text(server: Server, body: ChatRequest) -> str:
    """The text that a conversation is for the model."""
    check_fields(server, body)
    with naming(names(body)):
        chat = await prepare(server, body, SamplingParams())
    return server.decode(chat.prompt_token_ids)


def _choice(
    server: Server, body: ChatRequest, answer: CompletionOutput, reader: Reader
) -> dict[str, Any]:
    reader.read(answer.text)
    content = reader.content if reader.content or not reader.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reader.reasoning:
        message["reasoning_content"] = reader.reasoning
    if reader.calls:
        message["tool_calls"] = [call.whole() for call in reader.calls]
    logprobs = None
    if body.logprobs:
        tokens = list(new_tokens(answer, 0, server.special_ids))
        logprobs = chat_logprobs(tokens, body.top_logprobs or 0)
    return {
        "index": answer.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": _finish_reason(answer, reader),
        "stop_reason": answer.stop_reason,
    }


def _finish_reason(answer: CompletionOutput, reader: Reader) -> str | None:
    # A call that max_tokens cut off is no call that could be made.
    if reader.calls and answer.finish_reason == "stop":
        return "tool_calls"
    return answer.finish_reason


async def _chunks(
    server: Server, body: ChatRequest, chat: PreparedChat, run: Run, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    options = body.stream_options
    counted = options is not None and options.include_usage
    always = options is not None and options.continuous_usage_stats
    readers: dict[int, Reader] = {}
    seen: dict[int, int] = {}
    last: RequestOutput | None = None

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        payload: dict[str, Any] = {**head, "choices": [choice]}
        if counted or always:
            payload["usage"] = usage([last]) if always and last is not None else None
        return event(payload)

    try:
        for index in range(body.n or 1):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for output in run.outputs():
            last = output
            for each in output.outputs:
                done = seen.get(each.index, 0)
                if done < 0 or (done == len(each.token_ids) and not each.finished):
                    continue
                if each.index not in readers:
                    readers[each.index] = Reader(chat.parser())
                reader = readers[each.index]
                found = reader.feed(new_text(each, done))
                logprobs = None
                if body.logprobs:
                    tokens = list(new_tokens(each, done, server.special_ids))
                    logprobs = chat_logprobs(tokens, body.top_logprobs or 0)
                if each.finished:
                    found += reader.finish()
                deltas = [chat_delta(part) for part in found]
                if logprobs is not None and not deltas:
                    deltas = [{"content": ""}]  # what carries them
                for delta in deltas:
                    yield chunk(each.index, delta, logprobs=logprobs)
                    logprobs = None
                seen[each.index] = -1 if each.finished else len(each.token_ids)
                if each.finished:
                    reason = _finish_reason(each, reader)
                    yield chunk(each.index, {}, finish_reason=reason, stop_reason=each.stop_reason)
        if counted and last is not None:
            reasoning = sum(readers[a.index].reasoning_tokens(server, a) for a in last.outputs)
            yield event({**head, "choices": [], "usage": usage([last], reasoning)})
    except (PagedLLMError, ApiError) as error:
        yield event(from_engine(error, names(body)).openai())
    yield DONE
