"""The kinds of values that settings take: how they are checked and read from text.

Owner: ``config`` and ``sampling_params``. Invariants: a ``check`` returns the normalised
value or raises :class:`BadValue` with what was expected; checking a checked value changes
nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt")
}


class BadValue(ValueError):
    """A value is not what its option takes; the message completes 'NAME: ...'."""


class Kind(Protocol):
    """What values an option takes."""

    @property
    def metavar(self) -> str | None:
        """How a command's help shows the value; None for no flag of its own."""
        ...

    def check(self, value: Any) -> Any:
        """Return the normalised value; raise :class:`BadValue`."""
        ...

    def parse(self, text: str) -> Any:
        """Return what a command line's ``text`` means, for ``check`` to look at."""
        ...


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean 'X'?"`` for the closest of ``names``, or an empty string."""
    lowered = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), lowered, n=1, cutoff=0.5)
    return f"; did you mean '{lowered[found[0]]}'?" if found else ""


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reject(expected: str, value: object) -> BadValue:
    return BadValue(f"expected {expected}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or False; on a command line ``--x`` and ``--no-x``."""

    metavar: str | None = None

    def check(self, value: Any) -> bool:
        numpy_bool = type(value).__module__ == "numpy" and str(value) in ("True", "False")
        if isinstance(value, bool) or numpy_bool:
            return bool(value)
        raise _reject("true or false", value)

    def parse(self, text: str) -> Any:
        return {"true": True, "false": False}.get(text.lower(), text)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number of ``low`` to ``high``; numpy's are welcome, booleans are not."""

    low: int | None = None
    high: int | None = None
    metavar: str | None = "N"

    def check(self, value: Any) -> int:
        expected = f"a whole number{_range(self.low, self.high)}"
        if isinstance(value, bool):
            raise _reject(expected, value)
        try:
            number = operator.index(value)
        except TypeError:
            raise _reject(expected, value) from None
        if (self.low is not None and number < self.low) or (
            self.high is not None and number > self.high
        ):
            raise _reject(expected, value)
        return number

    def parse(self, text: str) -> Any:
        try:
            return int(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number of ``low`` to ``high``, or above ``low`` when that is excluded."""

    low: float | None = None
    high: float | None = None
    exclude_low: bool = False
    metavar: str | None = "X"

    def check(self, value: Any) -> float:
        expected = f"a number{_range(self.low, self.high, self.exclude_low)}"
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _reject(expected, value)
        number = float(value)
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        inside = low < number <= high if self.exclude_low else low <= number <= high
        if not math.isfinite(number) or not inside:
            raise _reject(expected, value)
        return number

    def parse(self, text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text


def _range(low: float | None, high: float | None, exclude_low: bool = False) -> str:
    if low is not None and high is not None:
        return f" above {low} and up to {high}" if exclude_low else f" from {low} to {high}"
    if low is not None:
        return f" above {low}" if exclude_low else f" of at least {low}"
    return "" if high is None else f" of at most {high}"


@dataclass(frozen=True, slots=True)
class Text:
    """A non-empty string, one of ``choices`` where there are any."""

    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other spellings, in lower case, of the choices."""
    pattern: str | None = None
    """What is allowed beside ``choices``, as a regular expression."""
    also: str = ""
    """How to say ``pattern``."""
    metavar: str | None = "TEXT"

    def check(self, value: Any) -> str:
        if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
            value = str(value)
        if hasattr(value, "__fspath__"):
            value = value.__fspath__()
        if not isinstance(value, str):
            raise _reject("text", value)
        if not self.choices:
            if not value:
                raise _reject("text that is not empty", value)
            return value
        name = value.strip().lower().removeprefix("torch.")
        name = self.synonyms.get(name, name)
        if name in self.choices or (self.pattern and re.fullmatch(self.pattern, name)):
            return name
        names = ", ".join([*self.choices, self.also] if self.also else self.choices)
        raise BadValue(f"{shown(value)} is not one of {names}{nearest(name, self.choices)}")

    def parse(self, text: str) -> Any:
        return text


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a whole number, or text with a unit: ``'2GiB'`` (2**30), ``'2GB'`` (10**9)."""

    metavar: str | None = "BYTES"

    def check(self, value: Any) -> int:
        expected = "a size such as '2GiB', '512MiB', '2GB' or a whole number of bytes above 0"
        if isinstance(value, str):
            match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value.lower())
            if match is None or match[2] not in _UNITS:
                raise _reject(expected, value)
            value = int(float(match[1]) * _UNITS[match[2]])
        try:
            return Integer(low=1).check(value)
        except BadValue:
            raise _reject(expected, value) from None

    def parse(self, text: str) -> Any:
        return text


@dataclass(frozen=True, slots=True)
class Many:
    """Several values of one kind, kept as a tuple; None is none, one string is one value."""

    item: Kind
    at_least: int = 0
    separator: str | None = ","
    """What splits a command-line value; None for one value a flag."""

    @property
    def metavar(self) -> str | None:
        """The items' own, with the separator shown."""
        one = self.item.metavar
        return one and (f"{one}{self.separator}..." if self.separator else one)

    def check(self, value: Any) -> tuple[Any, ...]:
        if value is None:
            return ()
        if isinstance(value, str):
            value = (value,)
        if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
            raise _reject("a list", value)
        found = tuple(self.item.check(each) for each in value)
        if len(found) < self.at_least:
            raise _reject(f"at least {self.at_least}", found)
        return found

    def parse(self, text: str) -> Any:
        parts = [text] if self.separator is None else text.split(self.separator)
        return [self.item.parse(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Biases:
    """Token id to number; ids may be text, as JSON has them."""

    metavar: str | None = "ID=X,..."

    def check(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise _reject("a mapping of token ids to numbers", value)
        found: dict[int, float] = {}
        for key, bias in value.items():
            token = Integer(low=0).check(Integer().parse(key) if isinstance(key, str) else key)
            if token in found:
                raise BadValue(f"token {token} is given twice")
            found[token] = Number().check(bias)
        return found

    def parse(self, text: str) -> Any:
        pairs = [part.partition("=") for part in text.split(",")]
        return {Integer().parse(key): Number().parse(bias) for key, _, bias in pairs}


@dataclass(frozen=True, slots=True)
class Named:
    """What a plugin registers: its name, or ``{"name": NAME, OPTION: VALUE, ...}``."""

    callables: bool = False
    """Whether the thing itself may be given: something to call."""
    metavar: str | None = "NAME"

    def check(self, value: Any) -> Any:
        if self.callables and callable(value):
            return value
        if isinstance(value, str) and value:
            return value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            name = value.get("name")
            if isinstance(name, str) and name:
                return dict(value) if len(value) > 1 else name
        either = "a callable, " if self.callables else ""
        raise _reject(f"{either}a name or {{'name': ..., option: value}}", value)

    def parse(self, text: str) -> Any:
        """A name; or the mapping, as JSON."""
        if not text.lstrip().startswith("{"):
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise BadValue(f"{shown(text)} is not valid JSON: {error}") from None
