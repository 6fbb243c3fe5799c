"""An answer's text, as it comes, told apart into content, reasoning and tool calls.

Owner: whoever reads an answer; one :class:`OutputParser` each. Invariants: how the text is
cut into pieces makes no difference; every event comes as soon as it is certain; what looks
like a call and is none comes out as content, so no text is lost. Nothing raises for what a
model wrote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pagedllm.structured.formats import END_THINK, HERMES, THINK, ToolFormat
from pagedllm.structured.messages import (
    ContentDelta,
    Event,
    ParsedMessage,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
    new_call_id,
)
from pagedllm.structured.notation import (
    ARGUMENT_KEYS,
    Malformed,
    TextReader,
    json_calls,
    python_calls,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

_PYTHON_TAG = "<|python_tag|>"
_BLANKS = 2
"""Before a ``<think>``; more are content, so that an answer of blanks is not held back."""
_NAME_KEYS = ("name", "function")
_NAMED_CALL = re.compile(r"\s*([\w.\-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_LIST = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|$)|$)")
_FENCED = re.compile(r"\s*```([a-z_]*)[ \t]*\n(.*?)```[ \t]*\n?", re.DOTALL)
_FENCE_OPENING = re.compile(r"\s*(?:`{1,3}|```[a-z_]*[ \t]*)$")
_FENCE_OPEN = re.compile(r"\s*```(?:tool_code|tool_call|json|python)?[ \t]*\n")


class OutputParser(TextReader):
    """Feed it text; it gives events.

    Args:
        tool_format: how calls are written; None: there are none, and all is content.
        tools: names that may be called; None: any. An answer that *is* a JSON object counts
            as a call only if its name is one of them.
        reasoning: whether a ``<think>`` block at the start is reasoning.
        thinking: whether the prompt has opened that block already.
        new_id: makes the calls' ids.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = HERMES,
        tools: Collection[str] | None = None,
        *,
        reasoning: bool = True,
        thinking: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = tool_format
        self._tools = tools
        self._reasoning = reasoning
        self._thinking = thinking
        self._new_id = new_id
        super().__init__()
        self._num_calls = 0
        self._calling = False
        """Whether a call has begun and is not complete."""
        self._events: list[Event] = []
        self._work = self._run()

    def feed(self, text: str) -> list[Event]:
        """Add text; return what is now certain."""
        self._text += text
        next(self._work, None)
        return self._take()

    def finish(self) -> list[Event]:
        """Say that no more text comes; return the rest."""
        self._over = True
        for _ in self._work:
            pass
        return self._take()

    def parse(self, text: str) -> ParsedMessage:
        """Parse a whole answer at once."""
        return ParsedMessage.of([*self.feed(text), *self.finish()])

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._num_calls

    def _take(self) -> list[Event]:
        """The events so far, neighbours of one kind joined."""
        found: list[Event] = []
        for event in self._events:
            last = found[-1] if found else None
            match last, event:
                case ContentDelta(before), ContentDelta(text):
                    found[-1] = ContentDelta(before + text)
                case ReasoningDelta(before), ReasoningDelta(text):
                    found[-1] = ReasoningDelta(before + text)
                case ToolCallDelta(index, before), ToolCallDelta(same, text) if index == same:
                    found[-1] = ToolCallDelta(index, before + text)
                case _:
                    found.append(event)
        self._events.clear()
        return found

    # -- the parts of an answer; each generator yields when it needs more text ------------

    def _run(self) -> Generator[None]:
        if self._reasoning:
            yield from self._reason()
        if self._format is None:
            yield from self._rest_is_content()
        elif self._format.begin:
            while not (self._over and not self._text):
                yield from self._content_until(self._format.begin)
                if self._text:
                    yield from self._block(self._format)
        else:
            yield from self._bare()

    def _reason(self) -> Generator[None]:
        """A ``<think>`` block at the start, with the blank lines around it left out."""
        thinking = self._thinking
        if not thinking:
            while self._may_think() and not self._text.lstrip().startswith(THINK):
                if self._over:
                    return
                yield
            if not self._may_think():
                return
        start = self._text.lstrip()
        self._text = start.removeprefix(THINK)
        started = False
        while True:
            if not started:
                self._text = self._text.lstrip()
                started = bool(self._text)
            end = self._text.find(END_THINK)
            known = end if end >= 0 else len(self._text) - _overlap(self._text, END_THINK)
            thought = self._text[:known]
            kept = thought if self._over and end < 0 else thought.rstrip()
            if kept:
                self._events.append(ReasoningDelta(kept))
            self._text = self._text[len(kept) :]
            if end >= 0:
                self._text = self._text.lstrip().removeprefix(END_THINK)
                break
            if self._over:
                if self._text:  # the beginning of the end mark, and no more came
                    self._events.append(ReasoningDelta(self._text))
                self._text = ""
                return
            yield
        while not self._text.lstrip() and not self._over:
            yield
        self._text = self._text.lstrip()

    def _may_think(self) -> bool:
        """Whether the text begins as a ``<think>`` block does, after two blanks at most."""
        start = self._text.lstrip()
        few = len(self._text) - len(start) <= _BLANKS
        return few and THINK.startswith(start[: len(THINK)])

    def _rest_is_content(self) -> Generator[None]:
        while True:
            self._say(self._text)
            self._text = ""
            if self._over:
                return
            yield

    def _content_until(self, marker: str) -> Generator[None]:
        """Content up to a marker, which is taken out; blanks before it are left out."""
        while True:
            place = self._text.find(marker)
            if place >= 0:
                self._say(self._text[:place].rstrip())
                self._text = self._text[place:]
                return
            if self._over:
                if self._text.strip() or not self._num_calls:
                    self._say(self._text)
                self._text = ""
                return
            known = self._text[: len(self._text) - _overlap(self._text, marker)].rstrip()
            self._say(known)
            self._text = self._text[len(known) :]
            yield

    def _block(self, form: ToolFormat) -> Generator[None]:
        """One ``begin``, the calls after it, and the ``end``."""
        try:
            self._read(len(form.begin))
            mark = yield from self._next()
            if mark == "[":
                yield from self._list()
            elif mark == "{":
                yield from self._object()
            else:
                yield from self._named_call()
            yield from self._next()
        except Malformed:
            if not self._calling:
                self._say("".join(self._taken))
                self._taken.clear()
                return
            yield from self._skip_to(form.end)
        self._calling = False
        self._taken.clear()
        while form.end.startswith(self._text[: len(form.end)]) and not self._over:
            if self._text.startswith(form.end):
                break
            yield
        self._text = self._text.removeprefix(form.end)

    def _skip_to(self, marker: str) -> Generator[None]:
        """Leave out what is left of a broken call: up to its end mark, or all there is."""
        while not (marker and marker in self._text) and not self._over:
            yield
        place = self._text.find(marker) if marker else -1
        self._text = self._text[place:] if place >= 0 else ""

    def _bare(self) -> Generator[None]:
        """An answer that may itself be a call."""
        while not (start := self._text.lstrip()) or _PYTHON_TAG.startswith(start):
            if self._over:
                break
            yield
        if start.startswith("`"):
            yield from self._fenced()
        else:
            try:
                self._read(len(self._text) - len(start))
                if start.startswith(_PYTHON_TAG):
                    self._read(len(_PYTHON_TAG))
                yield from self._bare_calls()
            except Malformed:
                if not self._calling:
                    self._text = "".join(self._taken) + self._text
                else:
                    yield from self._skip_to("")
        if self._num_calls:
            yield from self._next()
        yield from self._rest_is_content()

    def _bare_calls(self) -> Generator[None]:
        mark = yield from self._next()
        if mark == "[":
            if not (yield from self._python_list()):
                yield from self._list(known_only=True)
            return
        while mark == "{":
            yield from self._object(known_only=True)
            while (mark := (yield from self._next())) in (";", ","):
                self._read(1)
        if not self._num_calls:
            raise Malformed

    def _list(self, known_only: bool = False) -> Generator[None]:
        """``[call, call]``."""
        self._read(1)
        while True:
            yield from self._next()
            yield from self._object(known_only)
            mark = yield from self._next()
            if mark not in (",", "]"):
                raise Malformed
            self._read(1)
            if mark == "]":
                return

    def _named_call(self) -> Generator[None]:
        """``name[ARGS]{...}``, or ``name{...}``."""
        while (found := _NAMED_CALL.match(self._text)) is None:
            if self._over or not re.fullmatch(r"\s*[\w.\-]{0,256}\s*(\[A?R?G?S?\]?)?", self._text):
                raise Malformed
            yield
        self._read(found.end())
        yield from self._arguments(self._begin_call(found[1]))
        self._calling = False

    def _object(self, known_only: bool = False) -> Generator[None]:
        """``{"name": ..., "arguments": {...}}``, its keys in any order."""
        if (yield from self._next()) != "{":
            raise Malformed
        self._read(1)
        index: int | None = None
        early = ""  # arguments that came before the name
        argued = False
        while (mark := (yield from self._next())) != "}":
            if mark == ",":
                self._read(1)
                continue
            key = yield from self._string()
            if (yield from self._next()) != ":":
                raise Malformed
            self._read(1)
            mark = yield from self._next()
            if key in _NAME_KEYS and index is None and mark == '"':
                name = yield from self._string()
                if not name or (known_only and self._tools is not None and name not in self._tools):
                    raise Malformed
                index = self._begin_call(name)
            elif key in ARGUMENT_KEYS and index is not None:
                argued = True
                yield from self._arguments(index)
            elif key in ARGUMENT_KEYS:
                early = unpacked((yield from self._value()))
            else:
                yield from self._value()
        if index is None:
            raise Malformed
        if not argued:
            self._argue(index, early or "{}")
        self._read(1)
        self._taken.clear()
        self._calling = False

    def _arguments(self, index: int) -> Generator[None]:
        """A value, given out as it comes; one within a string is unpacked first."""
        if (yield from self._next()) == '"':
            self._argue(index, unpacked((yield from self._value())))
        else:
            yield from self._value(lambda text: self._argue(index, text))

    # -- calls in Python's notation, and fenced ones ----------------------------------------

    def _python_list(self) -> Generator[None, None, bool]:
        """``[name(key=value)]``, as small Llamas write; False when it is something else."""
        while not self._over:
            if not _PYTHON_LIST.match(self._text):
                return False
            yield
        calls = python_calls(self._text)
        self._call_all(calls)
        if self._num_calls:
            self._text = ""
        return bool(calls)

    def _fenced(self) -> Generator[None]:
        """A block between ``` fences that is nothing but calls."""
        while (found := _FENCED.match(self._text)) is None:
            if self._over or not (
                _FENCE_OPENING.match(self._text) or _FENCE_OPEN.match(self._text)
            ):
                return
            yield
        if self._call_all(python_calls(found[2]) or json_calls(found[2])):
            self._text = self._text[found.end() :]

    def _call_all(self, calls: list[tuple[str, str]]) -> bool:
        """Give out whole calls, if all are of tools that there are."""
        if self._tools is not None and any(name not in self._tools for name, _ in calls):
            return False
        for name, arguments in calls:
            self._argue(self._begin_call(name), arguments)
        self._calling = False
        return bool(calls)

    # -- events -----------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _begin_call(self, name: str) -> int:
        index = self._num_calls
        self._num_calls += 1
        self._calling = True
        self._taken.clear()
        self._events.append(ToolCallStart(index, self._new_id(), name))
        return index

    def _argue(self, index: int, text: str) -> None:
        if text:
            self._events.append(ToolCallDelta(index, text))


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
