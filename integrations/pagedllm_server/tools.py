"""An answer's text as OpenAI's messages have it: content, reasoning and calls of tools.

Owner: the server integration; the grammars and parsers are ``pagedllm.structured``'s.
Invariant: a :class:`Reader` gives the same whole however its text is cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedllm.structured import (
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from pagedllm_server.errors import invalid, unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm import CompletionOutput
    from pagedllm.structured import Event, OutputParser
    from pagedllm_server.app import Server


@dataclass(slots=True)
class Call:
    """A call of a tool, growing."""

    id: str
    name: str
    arguments: str = ""

    def whole(self) -> dict[str, Any]:
        """In the form of a chat's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Reader:
    """Takes an answer's text apart as it comes."""

    parser: OutputParser
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def feed(self, text: str) -> list[Event]:
        """Add text; return what is certain of it."""
        return self._take(self.parser.feed(text)) if text else []

    def finish(self) -> list[Event]:
        """Say that the text has ended; return the rest."""
        return self._take(self.parser.finish())

    def read(self, text: str) -> None:
        """Take a whole answer."""
        self.feed(text)
        self.finish()

    def _take(self, events: list[Event]) -> list[Event]:
        for each in events:
            match each:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallStart(_, identity, name):
                    self.calls.append(Call(identity, name))
                case ToolCallDelta(index, arguments):
                    self.calls[index].arguments += arguments
        return events

    def reasoning_tokens(self, server: Server, answer: CompletionOutput) -> int:
        """How many of an answer's tokens went into reasoning, as its text tells."""
        if not self.reasoning:
            return 0
        return min(len(answer.token_ids), len(server.service.loaded.tokenize(self.reasoning)))


def chat_delta(event: Event) -> dict[str, Any]:
    """A piece of an answer as a chunk's ``delta``."""
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, identity, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": identity, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolCallDelta(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def check_tools(tools: Sequence[Any] | None) -> None:
    """Refuse tools that the server would have to run itself."""
    for index, tool in enumerate(tools or ()):
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind != "function":
            raise unsupported(
                f"tools[{index}].type", "only tools of type 'function' can be called here"
            )


def tool_choice(choice: Any) -> Any:
    """A chat's ``tool_choice`` for the engine.

    Raises:
        ApiError: it has a form that is not supported.
    """
    if isinstance(choice, dict):
        kind = choice.get("type", "function")
        if kind != "function":
            raise unsupported("tool_choice.type", "only 'function' is possible")
        name = choice.get("function", choice)
        if not isinstance(name, dict) or not isinstance(name.get("name"), str):
            raise invalid("tool_choice: needs the function's name", "tool_choice")
    return choice
