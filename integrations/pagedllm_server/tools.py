"""Tools, forms and reasoning: what a chat asks of an answer's structure, and reading it back.

Owner: the server integration; the grammars and parsers are the engine's
(``pagedllm.structured``). Invariant: a :class:`Reader` gives the same whole however its
text is cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedllm_server.errors import unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagedllm import CompletionOutput
    from pagedllm_server.app import Server
    from pagedllm_server.schemas_openai import ChatRequest


@dataclass(slots=True)
class Call:
    """A call of a tool, growing."""

    id: str
    name: str
    arguments: str = ""

    def whole(self) -> dict[str, Any]:
        """In OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Reader:
    """Takes an answer's text apart as it comes."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Add text; return deltas in OpenAI's form."""
        if not text:
            return []
        self.content += text
        return [{"content": text}]

    def finish(self) -> list[dict[str, Any]]:
        """The text has ended; return the deltas that were held back."""
        return []

    def reasoning_tokens(self, server: Server, answer: CompletionOutput) -> int:
        """How many of an answer's tokens went into reasoning."""
        del answer
        if not self.reasoning:
            return 0
        return len(server.service.loaded.tokenize(self.reasoning))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a chat's tools and forms mean for generating and for reading the answer."""

    tools: Sequence[Mapping[str, Any]] = ()
    """For the chat template."""
    structured_output: Any = None
    skip_special_tokens: bool | None = None
    """False where marks of calls or of reasoning are special tokens."""

    def reader(self, index: int) -> Reader:
        """A reader for one answer."""
        del index
        return Reader()


def make_plan(server: Server, body: ChatRequest) -> Plan:
    """Decide how to ask for what a chat wants.

    Raises:
        ApiError: it wants something that cannot be had.
    """
    del server
    if body.tools:
        raise unsupported("tools", "this server cannot call tools yet")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "there are no tools to choose from")
    return Plan()
