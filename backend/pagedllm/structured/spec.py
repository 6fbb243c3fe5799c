"""What an answer must look like, as plain data.

Owner: the public API. Invariants: frozen, hashable, and one constraint exactly; nothing here
needs a tokenizer or llguidance, so a spec can be made, compared, sent and stored anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedllm._kinds import BadValue, nearest, shown
from pagedllm.errors import ValidationError


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint that the whole answer satisfies, for any model whatever.

    Give exactly one. Tokens that would break the constraint are never drawn, and the end
    token is possible only where the answer is complete. An answer that ``max_tokens`` cuts
    off (``finish_reason='length'``) is the beginning of a valid one.

    Raises:
        ValidationError: none or several are given, or one has the wrong type. What only the
            compiler of grammars can tell, the engine reports when it takes the request.
    """

    json_schema: str | None = None
    """A JSON schema: a dict, JSON text, or a class with ``model_json_schema`` (Pydantic's). Kept
    as JSON text. Objects come with their properties in the schema's order, and without any that
    it does not name, unless it says ``additionalProperties``."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that matches the whole answer; no look-around or back references."""
    choice: Sequence[str] = ()
    """One of these strings."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation as llguidance extends it; its start rule is
    ``start``."""

    def __post_init__(self) -> None:
        """Check and normalise; see the class."""
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _wrong(f"{name} must be text that is not empty, not {shown(value)}")
        if not isinstance(self.json_object, bool):
            raise _wrong(f"json_object must be true or false, not {shown(self.json_object)}")
        choice = self.choice
        if isinstance(choice, str | bytes | Mapping) or not isinstance(choice, Sequence):
            raise _wrong(f"choice must be a list of strings, not {shown(choice)}")
        if not all(isinstance(each, str) and each for each in choice):
            raise _wrong(f"choice must hold strings that are not empty, not {shown(choice)}")
        object.__setattr__(self, "choice", tuple(choice))
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise _wrong(f"give exactly one of {', '.join(_NAMES)}; given: {found}")

    @property
    def kind(self) -> str:
        """The name of the constraint that is set, such as ``json_schema``."""
        return next(name for name in _NAMES if getattr(self, name))

    @classmethod
    def of(cls, value: Any) -> StructuredOutput:
        """Accept a StructuredOutput, or a mapping such as ``{"regex": "[0-9]+"}``.

        Raises:
            ValidationError: it is neither, or says nothing that this class knows.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _wrong(
                f"expected a StructuredOutput, or a mapping with one of {', '.join(_NAMES)}, "
                f"got {shown(value)}"
            )
        unknown = next((key for key in value if key not in _NAMES), None)
        if unknown is not None:
            raise _wrong(f"there is no constraint {unknown!r}{nearest(str(unknown), _NAMES)}")
        return cls(**value)


_NAMES = tuple(field.name for field in dataclasses.fields(StructuredOutput))


@dataclass(frozen=True, slots=True)
class Structure:
    """The kind of a setting that holds a :class:`StructuredOutput`; on a command line, JSON."""

    metavar: str | None = "JSON"

    def check(self, value: Any) -> StructuredOutput:
        """Return it; raise :class:`BadValue`."""
        try:
            return StructuredOutput.of(value)
        except ValidationError as error:
            raise BadValue(str(error).removeprefix(_PREFIX)) from None

    def parse(self, text: str) -> Any:
        """Read JSON such as ``{"choice": ["yes", "no"]}``."""
        try:
            return json.loads(text)
        except ValueError:
            return text


_PREFIX = "structured_output: "


def _wrong(message: str) -> ValidationError:
    return ValidationError(f"{_PREFIX}{message}", "structured_output")


def _schema_text(schema: Any) -> str:
    """JSON text of a schema in any of the accepted forms."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise _wrong(f"json_schema is not valid JSON: {error}") from None
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise _wrong(f"json_schema cannot be written as JSON: {error}") from None
    raise _wrong(
        f"json_schema must be a JSON schema object, as a dict or as JSON text, not {shown(schema)}"
    )
