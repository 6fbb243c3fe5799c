"""What an answer turns out to be: content, reasoning, tool calls, whole or in pieces.

Owner: the public API. Invariants: plain frozen data. The pieces of an answer, joined in order,
are the whole answer; a tool call's arguments are JSON text exactly as the model wrote it,
complete or not.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; calls are numbered from 0 in their order."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments."""

    index: int
    arguments: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON text; not valid when the answer was cut off in it, or no grammar held it."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, events: Iterable[Event]) -> ParsedMessage:
        """Join the pieces."""
        content, reasoning = [], []
        starts: list[ToolCallStart] = []
        arguments: list[list[str]] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ToolCallStart():
                    starts.append(event)
                    arguments.append([])
                case ToolCallDelta(index, text):
                    arguments[index].append(text)
        calls = tuple(
            ToolCall(start.id, start.name, "".join(parts))
            for start, parts in zip(starts, arguments, strict=True)
        )
        return cls("".join(content), "".join(reasoning), calls)


def new_call_id() -> str:
    """Nine letters and digits: the strictest of the templates (Mistral's) take no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
