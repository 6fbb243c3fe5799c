"""How deep a constraint may be.

Owner: the compiler of grammars. Invariant: what passes here does not exhaust the stack of the
thread that compiles it. llguidance bounds what a grammar costs, but it follows definitions by
recursion, and a stack that is exhausted there ends the whole process.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pagedllm.errors import ValidationError

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_LEVELS = 250
"""Of a schema, one inside the other, references followed: a tenth of what eight megabytes of
stack hold."""
MOST_RULES = 1000
"""Of a grammar, brackets inside a rule counted as rules; half of what they hold."""
MOST_CHOICES = 2000
"""What llguidance's parser has room for."""
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def check_schema(schema: Any) -> None:
    """Raise ValidationError for a schema that is too deep."""
    schemas = _Schemas(schema)
    try:
        levels = schemas.levels(schema)
    except RecursionError:
        levels = MOST_LEVELS + 1
    # Where a reference by name leads is the compiler's to know: each may lead to the deepest.
    if levels > MOST_LEVELS or levels * len(schemas.names) > 4 * MOST_LEVELS:
        raise _error(
            f"json_schema: it is nested too deeply, references included; at most {MOST_LEVELS} "
            "levels can be used"
        )


class _Schemas:
    """A schema and what its references name."""

    def __init__(self, root: Any) -> None:
        self.names: set[str] = set()
        """References that are no path from the root."""
        self._root = root
        self._known: dict[str, int] = {}

    def levels(self, node: Any) -> int:
        """How many of them lie inside each other at most; a circle counts once."""
        if isinstance(node, dict):
            reference = node.get("$ref")
            inside = [self.levels(value) for value in node.values()]
            if isinstance(reference, str):
                inside.append(self._target(reference))
            return 1 + max(inside, default=0)
        if isinstance(node, list):
            return 1 + max(map(self.levels, node), default=0)
        return 0

    def _target(self, reference: str) -> int:
        if reference not in self._known:
            self._known[reference] = 0
            self._known[reference] = self.levels(self._find(reference))
        return self._known[reference]

    def _find(self, reference: str) -> Any:
        path, node = reference.removeprefix("#"), self._root
        if not reference.startswith("#") or path[:1] not in ("", "/"):
            self.names.add(reference)
            return None
        for part in unquote(path).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(key)
            elif isinstance(node, list) and key.isdecimal() and len(key) < 9:
                node = node[int(key)] if int(key) < len(node) else None
            else:
                return None
        return node


def check_grammar(text: str) -> None:
    """Raise ValidationError for a grammar whose rules could refer to each other too deeply."""
    text = _without_schemas(text)
    rules = sum(1 + _depth(line) for line in text.splitlines() if line.strip())
    if rules > MOST_RULES:
        raise _error(
            f"grammar: its {rules} lines and brackets inside brackets are too many; at most "
            f"{MOST_RULES} can be used"
        )


def _without_schemas(text: str) -> str:
    """Check each schema of a grammar by itself, and leave it out."""
    parts, decoder = [], json.JSONDecoder()
    while (found := _EMBEDDED.search(text)) is not None:
        parts.append(text[: found.end()])
        text = text[found.end() :]
        try:
            schema, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            continue  # its brackets count, and the compiler says what is wrong
        check_schema(schema)
        text = text[end:]
    return "".join(parts) + text


def _depth(line: str) -> int:
    deepest = now = 0
    for bracket in re.findall(r"[()\[\]{}]", line):
        now += _BRACKETS[bracket]
        deepest = max(deepest, now)
    return deepest


def check_choices(choices: Iterable[str]) -> None:
    """Raise ValidationError for more than a parser has room for."""
    number = sum(1 for _ in choices)
    if number > MOST_CHOICES:
        raise _error(
            f"choice: {number} strings are too many; at most {MOST_CHOICES} can be used, or more "
            "as the enum of a json_schema"
        )


def _error(message: str) -> ValidationError:
    return ValidationError(f"structured_output: {message}", "structured_output")
