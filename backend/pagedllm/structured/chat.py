"""One model's way to chat: its template's tools, its calls, its reasoning.

Owner: the facade makes one per tokenizer; adapters ask it. Invariants: immutable; nothing in
it depends on llguidance until a grammar is asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedllm.structured import formats
from pagedllm.structured.formats import END_THINK, THINK, ToolFormat
from pagedllm.structured.parser import OutputParser
from pagedllm.structured.toolgrammar import (
    GrammarWriter,
    Tool,
    ToolChoice,
    read_choice,
    read_tools,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pagedllm.sampling_params import SamplingParams


_RESPONSE_END = "</tool_response>"


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of one request, checked."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    parallel: bool = True

    @classmethod
    def of(cls, tools: Any, tool_choice: Any = None, *, parallel: bool = True) -> ToolRequest:
        """Check what a caller gave.

        Args:
            tools: function descriptions, as OpenAI's API has them; None for none.
            tool_choice: ``'none'``, ``'auto'``, ``'required'`` or a tool's name; None is
                ``'auto'`` when there are tools.
            parallel: whether one answer may hold several calls.

        Raises:
            ValidationError: something in them is malformed.
        """
        found = read_tools(tools)
        return cls(found, read_choice(tool_choice, found), parallel)

    @property
    def active(self) -> bool:
        """Whether the model may call anything."""
        return bool(self.tools) and self.choice.mode != "none"

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(t.name for t in self.tools if self.choice.name in (None, t.name))


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model writes what is not plain text."""

    tool_format: ToolFormat = formats.HERMES
    shows_tools: bool = False
    """Whether the template puts descriptions of tools into the prompt."""
    shows_calls: bool = False
    """Whether the template shows earlier calls and their results."""
    reasoning: bool = False
    """Whether the model may think before it answers."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Markers that are single special tokens, and their ids."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> ChatFormat:
        """Tell it from a tokenizer and its chat template, or one in that one's place."""
        template = chat_template or _template(tokenizer)
        tool_format = formats.detect(template)
        reasoning = formats.thinks(template)
        markers = [*tool_format.markers, *((THINK, END_THINK) if reasoning else ())]
        added = tokenizer.added_tokens_decoder
        known = {token.content: number for number, token in added.items() if token.special}
        special = {marker: known[marker] for marker in markers if marker in known}
        return cls(
            tool_format=tool_format,
            shows_tools=formats.knows_tools(template),
            shows_calls=formats.knows_tool_calls(template),
            reasoning=reasoning,
            special=special,
        )

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], request: ToolRequest
    ) -> Sequence[Mapping[str, Any]]:
        """Rewrite messages so that the template can show them, tools and calls included.

        A template that knows tools gets them as its own; for one that does not, they are
        described in the system message, and earlier calls and results become text.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            return messages  # the intake says what is wrong with them
        found = [_with_parsed_arguments(message) for message in messages]
        if not self.shows_calls:
            found = _joined([self._as_text(message) for message in found])
        if not request.active or self.shows_tools:
            return found
        description = self._description(request)
        first = found[0] if found else {}
        if first.get("role") == "system" and isinstance(first.get("content"), str):
            merged = {**first, "content": f"{first['content']}\n\n{description}"}
            return [merged, *found[1:]]
        return [{"role": "system", "content": description}, *found]

    def template_tools(self, request: ToolRequest) -> list[Mapping[str, Any]] | None:
        """Return what the template's ``tools`` is, None for nothing."""
        if not request.active or not self.shows_tools:
            return None
        return [tool.description for tool in request.tools]

    def constrain(
        self, params: SamplingParams, request: ToolRequest, prompt_tail: str = ""
    ) -> SamplingParams:
        """Add the grammar of the request's tools, or let the model think before its own.

        With ``auto`` and without llguidance nothing holds the calls to their schemas; the
        other choices need it.

        Args:
            params: of the request.
            request: its tools.
            prompt_tail: the end of the prompt's text.
        """
        thinking = self._is_thinking(prompt_tail)
        thought = prompt_tail.rstrip().endswith(END_THINK)  # it is told not to think
        reasoning = (self.reasoning or thinking) and not thought
        writer = GrammarWriter(self.tool_format, self.special, reasoning)
        changes: dict[str, Any] = {}
        if self.special and (request.active or self.reasoning):
            changes["skip_special_tokens"] = False  # the parser looks for them
        if params.structured_output is not None:
            changes["structured_output"] = writer.after_thought(
                params.structured_output, thinking=thinking
            )
        elif request.active and (request.choice.mode == "required" or _has_llguidance()):
            changes["structured_output"] = writer.calls(
                request.tools, request.choice, parallel=request.parallel, thinking=thinking
            )
        return params.replace(**changes) if changes else params

    def parser(self, request: ToolRequest | None = None, prompt_tail: str = "") -> OutputParser:
        """Return a parser for one answer.

        Args:
            request: its tools; None or inactive: what looks like a call is content.
            prompt_tail: the end of the prompt's text, which may have opened a ``<think>``.
        """
        active = request is not None and request.active
        return OutputParser(
            self.tool_format if active else None,
            request.names if request is not None else None,
            reasoning=True,
            thinking=self._is_thinking(prompt_tail),
        )

    @staticmethod
    def _is_thinking(prompt_tail: str) -> bool:
        return prompt_tail.rstrip().endswith(THINK)

    def _description(self, request: ToolRequest) -> str:
        functions = "\n".join(
            json.dumps(tool.description["function"], ensure_ascii=False) for tool in request.tools
        )
        how = self.tool_format.instructions or formats.HERMES.instructions
        return f"You may call these functions:\n<tools>\n{functions}\n</tools>\n\n{how}"

    def _as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        """An earlier call, or its result, as text in the format that the model writes."""
        if message.get("role") == "tool":
            name = message.get("name")
            label = f' name="{name}"' if name else ""
            content = f"<tool_response{label}>\n{message.get('content')}\n{_RESPONSE_END}"
            return {"role": "user", "content": content}
        calls = message.get("tool_calls")
        if not calls:
            return message
        form = self.tool_format
        written = []
        for call in calls:
            function = call.get("function", call)
            body = {"name": function.get("name"), form.arguments_key: function.get("arguments")}
            written.append(json.dumps(body, ensure_ascii=False))
        if form.as_list:
            text = f"{form.begin}[{form.separator.join(written)}]{form.end}"
        else:
            wrap = form.begin + form.padding, form.padding + form.end
            text = form.separator.join(f"{wrap[0]}{each}{wrap[1]}" for each in written)
        said = message.get("content")
        return {"role": message.get("role"), "content": f"{said}\n{text}" if said else text}


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation ready to be answered, and the way to read the answers."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """Those that were given, with the grammar of the tools."""
    request: ToolRequest
    chat_format: ChatFormat
    prompt_tail: str
    """The end of the prompt's text."""

    def parser(self) -> OutputParser:
        """Return a parser for one answer; each of ``n`` needs its own."""
        return self.chat_format.parser(self.request, self.prompt_tail)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template used for chats with tools; empty when there is none."""
    template: Any = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default") or ""
    return template or ""


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join results of tools with what the user says next: strict templates take one of each."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        content = str(last.get("content"))
        if content.endswith(_RESPONSE_END) and message.get("role") == last.get("role") == "user":
            found[-1] = {**last, "content": f"{content}\n{message.get('content')}"}
        else:
            found.append(message)
    return found


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of earlier calls as objects, which is what templates write out."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    found = []
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
            return dict(message)  # as the template will make of it what it can
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        found.append({"type": "function", **call, "function": function})
    return {**message, "tool_calls": found}


def _has_llguidance() -> bool:
    from importlib.util import find_spec

    return find_spec("llguidance") is not None
