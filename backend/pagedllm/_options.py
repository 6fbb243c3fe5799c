"""The one definition behind a setting: its check, its flag, its help and its other names.

Owner: ``config`` and ``sampling_params``. A dataclass field made by :func:`option` carries
an :class:`Option`; keywords, YAML and command-line flags are all read through it, so no
second list has to be kept in step. Invariants: a ``check`` returns the normalised value or
raises :class:`BadValue` with what was expected; checking a checked value changes nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")
C = TypeVar("C", bound=type)

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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reject(expected: str, value: object) -> BadValue:
    return BadValue(f"expected {expected}, got {_shown(value)}")


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or False; on a command line ``--x`` and ``--no-x``."""

    metavar: str | None = None

    def check(self, value: Any) -> bool:
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy's
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
    """What is allowed beside ``choices``."""
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
        raise BadValue(
            f"{_shown(value)} is not one of {', '.join(self.choices)}{nearest(name, self.choices)}"
        )

    def parse(self, text: str) -> Any:
        return text


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a whole number, or text with a unit such as ``'2GiB'`` (2**30) or ``'2GB'`` (10**9)."""

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
class Callback:
    """Something to call; there is no text for it."""

    metavar: str | None = None

    def check(self, value: Any) -> Any:
        if not callable(value):
            raise _reject("a callable", value)
        return value

    def parse(self, text: str) -> Any:
        return text


@dataclass(frozen=True, slots=True)
class Option:
    """All there is to know of a setting but its name and default."""

    kind: Kind
    help: str
    section: str = ""
    aliases: tuple[str, ...] = ()
    optional: bool = False
    """Whether None is a value."""
    secret: bool = False

    def check(self, name: str, value: Any, error: type[Exception]) -> Any:
        """Return the normalised value, or raise ``error(message, name)``."""
        if value is None and self.optional:
            return None
        try:
            return self.kind.check(value)
        except BadValue as wrong:
            shown = "the value is not valid text" if self.secret else str(wrong)
            raise error(f"{name}: {shown}", name) from None

    def parse(self, text: str) -> Any:
        """Return what a command line's ``text`` means; ``none`` is None where that is a value."""
        return None if self.optional and text.lower() == "none" else self.kind.parse(text)


def option(
    default: T,
    kind: Kind,
    help: str,
    *,
    section: str = "",
    aliases: tuple[str, ...] = (),
    secret: bool = False,
) -> T:
    """A dataclass field with an :class:`Option`. A default of None makes None a value."""
    made = Option(kind, help, section, aliases, default is None, secret)
    metadata, hashable = {"option": made}, not isinstance(kind, Biases)
    made_field = dataclasses.field(
        default=default, metadata=metadata, repr=not secret, hash=hashable
    )
    return cast("T", made_field)


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass by field name, in order."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(cls)}


@functools.cache
def aliases_of(cls: type) -> dict[str, str]:
    """Every other name of an option, and the name it stands for."""
    return {alias: name for name, option in options_of(cls).items() for alias in option.aliases}


def canonical(cls: type, values: Mapping[str, Any], error: type[Exception]) -> dict[str, Any]:
    """Return ``values`` under the options' own names.

    Raises:
        error: for an unknown name, with the nearest one, or for a setting given twice.
    """
    options, aliases = options_of(cls), aliases_of(cls)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name not in options:
            hint = nearest(str(key), [*options, *aliases])
            raise error(f"unknown {cls.__name__} setting '{key}' (value {_shown(value)}){hint}", key)
        if name in found:
            raise error(f"'{key}' and '{name}' are one setting, given twice; keep one", name)
        found[name] = value
    return found


def checked(error: type[Exception]) -> Callable[[C], C]:
    """Class decorator: keywords may be aliases, unknown ones raise ``error``, all are checked.

    Wraps the ``__init__`` that ``dataclass`` made, so type checkers still see its fields;
    adds the options' help to the class's docstring.
    """

    def decorate(cls: C) -> C:
        plain_init = cls.__init__

        @functools.wraps(plain_init)
        def __init__(self: Any, *args: Any, **values: Any) -> None:
            plain_init(self, *args, **canonical(cls, values, error))

        cls.__init__ = __init__  # type: ignore[misc]
        lines = [f"    {name}: {option.help}" for name, option in options_of(cls).items()]
        cls.__doc__ = f"{cls.__doc__}\n\nSettings:\n" + "\n".join(lines)
        return cls

    return decorate


def check_all(instance: Any, error: type[Exception]) -> None:
    """Replace every option of a frozen dataclass by its checked value."""
    for name, made in options_of(type(instance)).items():
        object.__setattr__(instance, name, made.check(name, getattr(instance, name), error))
