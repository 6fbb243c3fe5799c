"""LangChain's messages as a chat template takes them.

Owner: the LangChain integration. Invariants: text, tool calls and their results all get there;
what a text model cannot read is refused by name. Neighbours of one role are joined, since
strict templates refuse two in a row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from pagedllm import ValidationError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ELSEWHERE = {
    "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call",
    "reasoning", "thinking", "redacted_thinking", "non_standard",
}  # fmt: skip
"""Blocks of an assistant's content that it has as fields of its own, or said to itself."""


def to_template(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages as dicts with ``role``, ``content`` and what else a template may use.

    Raises:
        ValidationError: one has a content that is not text, or no role is known for its class.
    """
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        made = _one(message, f"messages[{index}]")
        last = found[-1] if found else None
        if last is not None and last["role"] == made["role"] != "tool":
            found[-1] = _joined(last, made)
        else:
            found.append(made)
    return found


def _one(message: BaseMessage, where: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": _role(message, where), "content": _text(message, where)}
    if message.name:
        made["name"] = message.name
    if isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls):
        made["tool_calls"] = [
            _call(call["id"], call["name"], call["args"]) for call in message.tool_calls
        ] + [_call(bad["id"], bad["name"], bad["args"]) for bad in message.invalid_tool_calls]
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    return made


def _role(message: BaseMessage, where: str) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    roles = {
        HumanMessage: "user",
        AIMessage: "assistant",
        SystemMessage: "system",
        ToolMessage: "tool",
        FunctionMessage: "tool",
    }
    role = next((role for kind, role in roles.items() if isinstance(message, kind)), None)
    if role is None:
        raise ValidationError(
            f"{where} is a {type(message).__name__}, for which there is no role; use a "
            "HumanMessage, AIMessage, SystemMessage, ToolMessage or ChatMessage",
            "messages",
        )
    return role


def _text(message: BaseMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif isinstance(message, ToolMessage) and block.get("type") == "json":
            texts.append(json.dumps(block.get("json"), ensure_ascii=False))
        elif not (isinstance(message, AIMessage) and block.get("type") in _ELSEWHERE):
            raise ValidationError(
                f"{where} holds a {block.get('type')!r} block, and the model reads text only; "
                "leave it out",
                "messages",
            )
    return "\n".join(texts)


def _call(call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    return {
        "id": call_id or "",
        "type": "function",
        "function": {"name": name or "", "arguments": arguments},
    }


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {**first, **second}
    both["content"] = "\n\n".join(text for text in (first["content"], second["content"]) if text)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return both | ({"tool_calls": calls} if calls else {})


def spec_of(response_format: Any) -> dict[str, Any] | None:
    """OpenAI's ``response_format`` as a structured output."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = response_format.get("json_schema", {})
        return {"json_schema": inner.get("schema", inner)}
    if kind == "text":
        return None
    raise ValidationError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        f"{{'type': 'json_object'}} or {{'type': 'text'}}, not {response_format!r}",
        "response_format",
    )
