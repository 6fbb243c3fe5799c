"""The one definition behind a setting: its check, its flag, its help and its other names.

Owner: ``config`` and ``sampling_params``. A dataclass field made by :func:`option` carries
an :class:`Option`; keywords, YAML and command-line flags are all read through it, so no
second list has to be kept in step.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pagedllm._kinds import BadValue, Biases, Boolean, Kind, Many, Named, nearest, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

T = TypeVar("T")
C = TypeVar("C", bound=type)


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
            message = "expected text that is not empty" if self.secret else str(wrong)
            raise error(f"{name}: {message}", name) from None

    def parse(self, text: str) -> Any:
        """Return what a command line's ``text`` means; ``none`` is None where that is a value."""
        return None if self.optional and text.lower() == "none" else self.kind.parse(text)


def option(
    default: T,
    kind: Kind,
    text: str,
    *,
    section: str = "",
    aliases: tuple[str, ...] = (),
    optional: bool | None = None,
    secret: bool = False,
) -> T:
    """A dataclass field with an :class:`Option`; ``text`` is its help.

    None is a value where it is the default, or where ``optional`` says so.
    """
    nullable = default is None if optional is None else optional
    made = Option(kind, text, section, aliases, nullable, secret)
    # Values that are, or may hold, mappings are compared but not hashed.
    innermost = kind.item if isinstance(kind, Many) else kind
    hashable = not isinstance(innermost, Biases | Named)
    return dataclasses.field(
        default=default, metadata={"option": made}, repr=not secret, hash=hashable
    )


def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass by field name, in order."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(cls)}


def aliases_of(cls: type) -> dict[str, str]:
    """Every other name of an option, and the name it stands for."""
    return {alias: name for name, option in options_of(cls).items() for alias in option.aliases}


def canonical(
    cls: type, values: Mapping[str, Any], error: type[Exception], *, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return ``values`` under the options' own names; ``also`` are other names to suggest.

    Raises:
        error: for an unknown name, with the nearest one, or for a setting given twice.
    """
    options, aliases = options_of(cls), aliases_of(cls)
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in values.items():
        name = aliases.get(key, key)
        if name not in options:
            hint = nearest(str(key), [*options, *aliases, *also])
            raise error(f"unknown {cls.__name__} setting '{key}' (value {shown(value)}){hint}", key)
        if name in found:
            raise error(f"'{keys[name]}' and '{key}' are one setting given twice; keep one", name)
        found[name], keys[name] = value, key
    return found


def checked(error: type[Exception]) -> Callable[[C], C]:
    """Class decorator: keywords may be aliases, unknown ones raise ``error``, all are checked.

    Wraps the ``__init__`` that ``dataclass`` made, so type checkers still see its fields;
    adds the options' help to the class's docstring.
    """

    def decorate(cls: C) -> C:
        plain_init = cast("Any", cls).__init__

        @functools.wraps(plain_init)
        def init(self: Any, *args: Any, **values: Any) -> None:
            plain_init(self, *args, **canonical(cls, values, error))

        cast("Any", cls).__init__ = init
        lines = [f"    {name}: {option.help}" for name, option in options_of(cls).items()]
        cls.__doc__ = f"{cls.__doc__}\n\nSettings:\n" + "\n".join(lines)
        return cls

    return decorate


def check_all(instance: Any, error: type[Exception]) -> None:
    """Replace every option of a frozen dataclass by its checked value."""
    for name, made in options_of(type(instance)).items():
        object.__setattr__(instance, name, made.check(name, getattr(instance, name), error))


def add_flags(
    group: argparse._ArgumentGroup,
    cls: type,
    *,
    section: str = "",
    skip: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag per option of ``section`` and alias; a flag not given leaves no trace.

    The values stay text until :func:`given_flags` reads them, so a wrong one is reported
    like a wrong keyword. The help shows the fields' defaults, or the caller's ``defaults``.
    """
    import argparse

    usual = {field.name: field.default for field in dataclasses.fields(cls)} | dict(defaults or {})
    for name, made in options_of(cls).items():
        if made.section != section or name in skip:
            continue
        flags = [f"--{each.replace('_', '-')}" for each in (name, *made.aliases)]
        common: dict[str, Any] = {
            "dest": _dest(cls, name),
            "default": argparse.SUPPRESS,
            "help": made.help.replace("%", "%%") + _default_text(usual[name]),
        }
        if isinstance(made.kind, Boolean):
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        elif made.kind.metavar is not None:
            repeatable = isinstance(made.kind, Many | Biases)
            action = "append" if repeatable else "store"
            group.add_argument(*flags, action=action, metavar=made.kind.metavar, **common)


def given_flags(namespace: argparse.Namespace, cls: type, error: type[Exception]) -> dict[str, Any]:
    """Return the checked values of those flags of :func:`add_flags` that the user gave.

    Raises:
        error: for a wrong value, naming the setting.
    """
    found: dict[str, Any] = {}
    for name, made in options_of(cls).items():
        given = getattr(namespace, _dest(cls, name), None)
        if given is None:
            continue
        try:
            if not isinstance(given, list):
                value = made.parse(given) if isinstance(given, str) else given
            elif isinstance(made.kind, Biases):
                value = {key: bias for text in given for key, bias in made.parse(text).items()}
            else:
                parsed = [made.parse(text) for text in given]
                value = None if parsed == [None] else [each for part in parsed for each in part]
        except BadValue as wrong:
            raise error(f"{name}: {wrong}", name) from None
        found[name] = made.check(name, value, error)
    return found


def _default_text(value: object) -> str:
    if value is None or value == ():
        return ""
    return f" (default: {'on' if value is True else 'off' if value is False else value})"


def _dest(cls: type, name: str) -> str:
    """Flags of two classes can share a parser: ``seed`` is in both."""
    return f"{cls.__name__}.{name}"
