"""Grammars under which a model calls tools, and calls them right.

Owner: ``structured.chat``. Invariants: what a grammar lets through the parser reads back as
these calls; the arguments satisfy the tool's own JSON schema. Special tokens stand as such,
since that is how models write and read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pagedllm._kinds import nearest, shown
from pagedllm.errors import ValidationError
from pagedllm.structured.formats import END_THINK, THINK, ToolFormat
from pagedllm.structured.grammar import json_rule
from pagedllm.structured.spec import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    strict: bool
    """Whether keywords of the schema that no grammar can hold are an error."""
    description: Mapping[str, Any]
    """As chat templates want it: ``{"type": "function", "function": {...}}``."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and what to call."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    """The one tool to call, when there is no choice."""


def read_tools(tools: Iterable[Any] | None) -> tuple[Tool, ...]:
    """Check tools, given as OpenAI's API has them or as bare function descriptions.

    Raises:
        ValidationError: one is malformed, or two have one name.
    """
    found: dict[str, Tool] = {}
    for index, each in enumerate(tools or ()):
        function = each.get("function", each) if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping):
            raise _wrong(
                f"tools[{index}] must be a dict such as {{'type': 'function', 'function': "
                f"{{'name': ..., 'parameters': ...}}}}, not {shown(each)}"
            )
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            raise _wrong(f"tools[{index}] needs a 'name', a text")
        if name in found:
            raise _wrong(f"two tools are called {name!r}; give each its own name")
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping):
            raise _wrong(f"the 'parameters' of tool {name!r} must be a JSON schema object")
        shape = {"type": "object", "properties": {}, **schema}
        described = {"description": "", **function, "parameters": shape}
        described.pop("strict", None)
        strict = function.get("strict") is True
        found[name] = Tool(name, shape, strict, {"type": "function", "function": described})
    return tuple(found.values())


def read_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Check a ``tool_choice``: ``none``, ``auto``, ``required`` or the name of a tool.

    A name may stand alone or as ``{"type": "function", "function": {"name": ...}}``. Without
    tools there is nothing to choose.

    Raises:
        ValidationError: it is none of these, or no tool has that name.
    """
    names = [tool.name for tool in tools]
    name = choice
    if isinstance(choice, Mapping):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, Mapping) else None
    elif choice is None or choice is True or choice in ("any", "required"):
        name = None
        if choice is not None and not tools:
            raise ValidationError(
                f"tool_choice is {choice!r}, but there are no tools; give some", "tool_choice"
            )
        mode: Literal["auto", "required"] = "auto" if choice is None else "required"
        return ToolChoice(mode if tools else "none")
    elif choice is False or choice in ("none", "auto"):
        return ToolChoice("auto" if choice == "auto" and tools else "none")
    if not isinstance(name, str) or name not in names:
        known = ", ".join(names) or "none"
        raise ValidationError(
            f"tool_choice: {shown(choice)} is neither 'none', 'auto' or 'required' nor one of the "
            f"tools ({known}){nearest(str(name), names)}",
            "tool_choice",
        )
    return ToolChoice("required", name)


@dataclass(frozen=True, slots=True)
class GrammarWriter:
    """Writes Lark for one chat format.

    Args:
        tool_format: how calls are written.
        special: markers that are single special tokens, and their ids.
        reasoning: whether the model may think first.
    """

    tool_format: ToolFormat
    special: Mapping[str, int]
    reasoning: bool

    def calls(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, thinking: bool
    ) -> StructuredOutput:
        """Return the constraint that a choice of tools stands for.

        Args:
            tools: that may be called.
            choice: ``auto`` or ``required``.
            parallel: whether several calls may stand in one answer.
            thinking: whether the prompt has opened a ``<think>`` block.
        """
        form = self.tool_format
        chosen = [tool for tool in tools if choice.name in (None, tool.name)]
        several = parallel and choice.name is None
        rules = ["TEXT: /(.|\\n)*/"]
        rules += [rule for i, tool in enumerate(chosen) for rule in self._call(i, tool)]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(chosen))))
        group = f"call ({_quoted(form.separator)} call)*" if several else "call"
        if choice.mode == "required":
            rules += self._thought(thinking)
            rules.append(f"start: thought {self._required(group, several=several)}")
        elif form.begin:
            rules += self._optional(group)
            rules.append("start: block* TEXT" if several else "start: block | TEXT")
        else:
            rules.append(f'FREE: TEXT & ~/\\s*\\{{\\s*"name"(.|\\n)*/\nstart: FREE | {group}')
        return StructuredOutput(grammar="\n".join(rules) + "\n")

    def after_thought(self, spec: StructuredOutput, *, thinking: bool) -> StructuredOutput:
        """Let the model think before it keeps to a constraint.

        A grammar is its author's own affair and stays as it is.
        """
        if not self.reasoning or spec.grammar is not None:
            return spec
        if spec.regex is not None:
            answer = f"answer: /{_slashed(spec.regex)}/"
        elif spec.choice:
            answer = "answer: " + " | ".join(map(_quoted, spec.choice))
        else:
            schema = json.loads(spec.json_schema or '{"type": "object"}')
            answer = f"answer: {json_rule(schema)}"
        rules = ["TEXT: /(.|\\n)*/", *self._thought(thinking), "start: thought answer", answer]
        return StructuredOutput(grammar="\n".join(rules) + "\n")

    def _call(self, index: int, tool: Tool) -> list[str]:
        form = self.tool_format
        schema = {**tool.schema, "type": "object"}
        arguments = f"args_{index}: {json_rule(schema, lenient=not tool.strict)}"
        if form.name_end:
            head, tail = f"{_quoted(tool.name)} {self._marker(form.name_end)}", ""
        else:
            opening = f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
            head, tail = _quoted(opening), _quoted("}")
        return [f"call_{index}: {head} args_{index} {tail}", arguments]

    def _required(self, group: str, *, several: bool) -> str:
        form = self.tool_format
        if not form.begin:
            return group
        begin, close = self._marker(form.begin), self._close()
        if form.as_list:
            return f'{begin} "[" {group} "]" {close}'
        block = f"{begin} {_quoted(form.padding)} call {close}"
        return f"{block} ({_quoted(form.separator)} {block})*" if several else block

    def _optional(self, group: str) -> list[str]:
        """A block of calls somewhere in free text: once it is opened, it is held to the grammar."""
        form = self.tool_format
        inner = f'"[" {group} "]"' if form.as_list else f"{_quoted(form.padding)} call"
        if form.begin in self.special:
            return [f"block: TEXT {self._marker(form.begin)} {inner} {self._close()}"]
        return [
            f"opening[lazy]: TEXT {_quoted(form.begin)}",
            f"block: opening {inner} {self._close()}",
        ]

    def _close(self) -> str:
        form = self.tool_format
        if not form.end:
            return ""
        padding = "" if form.as_list else _quoted(form.padding)
        return f"{padding} {self._marker(form.end)}"

    def _thought(self, thinking: bool) -> list[str]:
        """Rules of ``thought``, what may come before the calls."""
        if not self.reasoning:
            return ['thought: ""']
        if END_THINK in self.special:
            rest = [f"thinking: TEXT {self._marker(END_THINK)} /\\s*/"]
        else:
            rest = [f"ended[lazy]: TEXT {_quoted(END_THINK)}", "thinking: ended /\\s{0,4}/"]
        if thinking:
            return [*rest, "thought: thinking"]
        return [*rest, f"thought: ({self._marker(THINK)} thinking)?"]

    def _marker(self, text: str) -> str:
        return f"<[{self.special[text]}]>" if text in self.special else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _slashed(regex: str) -> str:
    """Escape a regular expression's slashes, as Lark's ``/.../`` needs."""
    parts = regex.split("\\\\")
    return "\\\\".join(part.replace("\\/", "/").replace("/", "\\/") for part in parts)


def _wrong(message: str) -> ValidationError:
    return ValidationError(message, "tools")
