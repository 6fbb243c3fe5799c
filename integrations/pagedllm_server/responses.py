"""``/v1/responses``: OpenAI's newer form of a conversation; text, calls of functions, streams.

Owner: the server integration. Invariants: nothing is stored, so a conversation is sent whole
each time; a stream's last event holds the whole response that the same request without
``stream`` gives.
"""

from __future__ import annotations

import json
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from pagedllm import PagedLLMError
from pagedllm.structured import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart
from pagedllm_server.errors import ApiError, from_engine, invalid, naming, unsupported
from pagedllm_server.logs import new_id
from pagedllm_server.openai_common import check_fields, limits, names, sampling_params
from pagedllm_server.sse import EventStream, while_client_waits
from pagedllm_server.tokens import new_text
from pagedllm_server.tools import Reader, check_tools, tool_choice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

    from pagedllm import RequestOutput, SamplingParams
    from pagedllm.structured import Event, PreparedChat
    from pagedllm_server.app import Server
    from pagedllm_server.schemas_openai import ResponsesRequest
    from pagedllm_server.service import Run

TEXT_PARTS = ("input_text", "output_text", "text")


async def respond(server: Server, request: Request, body: ResponsesRequest) -> Response:
    """Answer a request."""
    with naming(names(body)):
        return await _respond(server, request, body)


async def _respond(server: Server, request: Request, body: ResponsesRequest) -> Response:
    check_fields(server, body)
    check_tools(body.tools)
    params = sampling_params(
        server,
        body,
        max_tokens=body.max_output_tokens,
        logprobs=None,
        structured_output=_structure(body),
    )
    options: dict[str, Any] = {}
    if body.reasoning and (effort := body.reasoning.get("effort")) is not None:
        options["reasoning_effort"] = effort
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    chat = await server.service.prepare_chat(
        messages(body),
        params,
        tools=body.tools,
        tool_choice=tool_choice(body.tool_choice),
        **options,
    )
    server.service.check_prompt(len(chat.prompt_token_ids), "input")
    draft = Draft(server, body, chat, chat.params)
    async with AsyncExitStack() as stack:
        stack.enter_context(server.service.admit())
        run = await server.service.start(chat.prompt_token_ids, chat.params, limits(body), 0)
        stack.push_async_callback(run.aclose)
        if body.stream:
            return EventStream(_events(draft, run), stack.pop_all().aclose)
        output = await while_client_waits(request, run.finished())
    draft.reader.read(output.outputs[0].text)
    draft.items = draft.whole_items()
    return JSONResponse(draft.response(output))


def messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as a chat template takes it.

    Raises:
        ApiError: an item of the input is of a kind that is not supported.
    """
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    reasoning = ""
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            message = {"role": role, "content": _content(item.get("content"), where)}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last = found[-1] if found else {}
            if last.get("tool_calls") is not None:
                last["tool_calls"].append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            output = _content(item.get("output"), where)
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        elif kind == "reasoning":
            parts = item.get("content") or []
            reasoning += "".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))
            continue
        else:
            raise unsupported(f"{where}.type", f"items of type {str(kind)[:40]!r} cannot be read")
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"], reasoning = reasoning, ""
        found.append(message)
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}.content: must be text or a list of text parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise unsupported(
                f"{where}.content", f"a part is {str(kind)[:40]!r}, and the model reads text only"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _structure(body: ResponsesRequest) -> dict[str, Any] | None:
    for name, value in (body.reasoning or {}).items():
        if name != "effort" and value is not None:
            raise unsupported(f"reasoning.{name}", "there are no summaries here; leave it out")
    if body.top_logprobs:
        raise unsupported("top_logprobs", "use /v1/chat/completions for log probabilities")
    for name, value in (body.text or {}).items():
        if name != "format" and value is not None:
            raise unsupported(f"text.{name}", "this server does not support it; leave it out")
    form = (body.text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and isinstance(form.get("schema"), dict):
        return {"json_schema": form["schema"]}
    raise invalid(
        "text.format: must be text, json_object, or json_schema with a schema", "text.format"
    )


@dataclass(slots=True)
class Draft:
    """A response in the making."""

    server: Server
    body: ResponsesRequest
    chat: PreparedChat
    params: SamplingParams
    identity: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))
    items: list[dict[str, Any]] = field(default_factory=list)
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        """Begin to read."""
        self.reader = Reader(self.chat.parser())

    def whole_items(self) -> list[dict[str, Any]]:
        """What the reader has found, as items."""
        reader, items = self.reader, []
        if reader.reasoning:
            items.append(_reasoning(new_id("rs"), reader.reasoning))
        if reader.content or not reader.calls:
            items.append(_message(new_id("msg"), reader.content, "completed"))
        items += [_call(new_id("fc"), c.id, c.name, c.arguments, "completed") for c in reader.calls]
        return items

    def response(
        self, output: RequestOutput | None, error: ApiError | None = None
    ) -> dict[str, Any]:
        """The response object; without an output it is in progress."""
        body = self.body
        status, incomplete, usage = "in_progress", None, None
        if output is not None:
            [answer] = output.outputs
            status = "completed"
            if answer.finish_reason == "length":
                status, incomplete = "incomplete", {"reason": "max_output_tokens"}
            reasoning = self.reader.reasoning_tokens(self.server, answer)
            prompt, given = len(output.prompt_token_ids), len(answer.token_ids)
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
                "output_tokens": given,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + given,
            }
        return {
            "id": self.identity,
            "object": "response",
            "created_at": self.created,
            "status": "failed" if error is not None else status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.server.service.model_name,
            "output": list(self.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self.params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or []],
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


def _message(identity: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    content = [part] if status == "completed" else []
    return {
        "id": identity,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def _reasoning(identity: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": identity, "type": "reasoning", "summary": [], "content": content}


def _call(identity: str, call: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "function_call",
        "status": status,
        "call_id": call,
        "name": name,
        "arguments": arguments,
    }


class _Items:
    """Turns the parts of an answer into the events of items that open, grow and close."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._kind: str | None = None
        self._identity = ""
        self._text = ""
        self._call = ("", "")

    def take(self, part: Event) -> Iterator[dict[str, Any]]:
        """Yield the events of one part."""
        match part:
            case ContentDelta(text):
                yield from self._open("message")
                yield self._delta("response.output_text.delta", text, logprobs=[])
            case ReasoningDelta(text):
                yield from self._open("reasoning")
                yield self._delta("response.reasoning_text.delta", text)
            case ToolCallStart(_, identity, name):
                yield from self.close()
                self._call = (identity, name)
                yield from self._open("call")
            case ToolCallDelta(_, text):
                self._text += text
                kind = "response.function_call_arguments.delta"
                yield {"type": kind, **self._place(content=False), "delta": text}

    def _place(self, *, content: bool = True) -> dict[str, Any]:
        place = {"item_id": self._identity, "output_index": len(self._draft.items)}
        return place | ({"content_index": 0} if content else {})

    def _delta(self, kind: str, text: str, **more: Any) -> dict[str, Any]:
        self._text += text
        return {"type": kind, **self._place(), "delta": text, **more}

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        if self._kind == kind != "call":
            return
        yield from self.close()
        self._kind, self._text = kind, ""
        self._identity = new_id({"message": "msg", "reasoning": "rs", "call": "fc"}[kind])
        item = {
            "message": lambda: _message(self._identity, "", "in_progress"),
            "reasoning": lambda: _reasoning(self._identity, None),
            "call": lambda: _call(self._identity, *self._call, "", "in_progress"),
        }[kind]()
        index = len(self._draft.items)
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield {"type": "response.content_part.added", **self._place(), "part": part}

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield what ends the item that is open, if one is."""
        if self._kind is None:
            return
        if self._kind == "message":
            item = _message(self._identity, self._text, "completed")
            done = {**self._place(), "text": self._text, "logprobs": []}
            yield {"type": "response.output_text.done", **done}
            part = item["content"][0]
            yield {"type": "response.content_part.done", **self._place(), "part": part}
        elif self._kind == "reasoning":
            item = _reasoning(self._identity, self._text)
            yield {"type": "response.reasoning_text.done", **self._place(), "text": self._text}
        else:
            item = _call(self._identity, *self._call, self._text, "completed")
            place = self._place(content=False)
            kind = "response.function_call_arguments.done"
            yield {"type": kind, **place, "name": self._call[1], "arguments": self._text}
        index = len(self._draft.items)
        self._draft.items.append(item)
        self._kind = None
        yield {"type": "response.output_item.done", "output_index": index, "item": item}


async def _events(draft: Draft, run: Run) -> AsyncIterator[bytes]:
    number = 0

    def event(payload: dict[str, Any]) -> bytes:
        nonlocal number
        text = json.dumps({**payload, "sequence_number": number}, ensure_ascii=False)
        number += 1
        return f"event: {payload['type']}\ndata: {text}\n\n".encode("utf-8", "replace")

    yield event({"type": "response.created", "response": draft.response(None)})
    yield event({"type": "response.in_progress", "response": draft.response(None)})
    items, seen = _Items(draft), 0
    try:
        last: RequestOutput | None = None
        async for output in run.outputs():
            last = output
            [answer] = output.outputs
            parts = draft.reader.feed(new_text(answer, seen))
            seen = len(answer.token_ids)
            if answer.finished:
                parts += draft.reader.finish()
            for part in parts:
                for payload in items.take(part):
                    yield event(payload)
        if not draft.reader.content and not draft.reader.calls:
            for payload in items.take(ContentDelta("")):
                yield event(payload)
        for payload in items.close():
            yield event(payload)
        whole = draft.response(last)
        kind = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        yield event({"type": kind, "response": whole})
    except (PagedLLMError, ApiError) as error:
        failed = from_engine(error, names(draft.body))
        yield event({"type": "response.failed", "response": draft.response(None, failed)})
