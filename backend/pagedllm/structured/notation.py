"""The notations that calls come in: JSON that is not all there yet, and Python.

Owner: ``structured.parser``. Invariant: nothing here raises for what a model
wrote, but :class:`Malformed` within the parser.
"""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

ARGUMENT_KEYS = ("arguments", "parameters")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class ValueScanner:
    """Finds where a JSON value ends, in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.wrong = False
        """Whether something came that no JSON has, such as the mark that ends a call."""

    def end_in(self, text: str) -> int | None:
        """How much of this piece belongs to the value; None when it goes on after it."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                    if not self._depth:
                        return place + 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if not self._depth:  # of what the value is in
                    return place
                self._depth -= 1
                if not self._depth:
                    return place + 1
            elif character == "<" or (not self._depth and character in ",; \t\r\n"):
                self.wrong = self._depth > 0
                return place
        return None


class Malformed(Exception):
    """What was read is not what it looked like."""


class TextReader:
    """Reads text that comes in pieces. Each generator yields when it needs more."""

    def __init__(self) -> None:
        self._text = ""
        """What came and is not given out yet."""
        self._over = False
        """Whether no more will come."""
        self._taken: list[str] = []
        """What was read since the last event, in case it is no call after all."""

    def _read(self, count: int) -> str:
        """Take characters that are there."""
        text, self._text = self._text[:count], self._text[count:]
        self._taken.append(text)
        return text

    def _next(self) -> Generator[None, None, str]:
        """The next character that is no blank, still to be read; empty at the end."""
        while not (rest := self._text.lstrip()):
            if self._over:
                self._read(len(self._text))
                return ""
            yield
        self._read(len(self._text) - len(rest))
        return rest[0]

    def _string(self) -> Generator[None, None, str]:
        """A string, decoded."""
        while (found := _STRING.match(self._text)) is None:
            if self._over or not self._text.startswith('"'):
                raise Malformed
            yield
        try:
            return str(json.loads(self._read(found.end()), strict=False))
        except ValueError:
            raise Malformed from None

    def _value(self, give: Callable[[str], None] | None = None) -> Generator[None, None, str]:
        """Any value, as it is written; ``give`` gets it in pieces as they come."""
        parts: list[str] = []
        scan = ValueScanner()
        while True:
            end = scan.end_in(self._text)
            part = self._read(len(self._text) if end is None else end)
            parts.append(part)
            if give is not None:
                give(part)
            if scan.wrong or (self._over and end is None) or not (end is None or any(parts)):
                raise Malformed
            if end is not None:
                return "".join(parts)
            yield


def unpacked(value: str) -> str:
    """Arguments that were written as a string that holds JSON; others as they are."""
    try:
        inner = json.loads(value)
    except ValueError:
        return value
    return inner if isinstance(inner, str) else value


def json_calls(text: str) -> list[tuple[str, str]]:
    """Calls given as one JSON object or a list of them; empty when it is neither."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    calls = []
    for each in found if isinstance(found, list) else [found]:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str):
            return []
        arguments: Any = next((each[key] for key in ARGUMENT_KEYS if key in each), {})
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls


def python_calls(text: str) -> list[tuple[str, str]]:
    """Calls with keywords and literals, one or in a list; empty when it is anything else."""
    try:
        body = ast.parse(text.strip()).body
        nodes: list[Any] = [getattr(each, "value", None) for each in body]
        if len(nodes) == 1 and isinstance(nodes[0], ast.List):
            nodes = nodes[0].elts
        calls = []
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and node.args:
                (node,) = node.args  # Gemma prints what a call returns
            if not isinstance(node, ast.Call) or node.args:
                return []
            values = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            calls.append((ast.unparse(node.func), json.dumps(values, ensure_ascii=False)))
        return calls
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
