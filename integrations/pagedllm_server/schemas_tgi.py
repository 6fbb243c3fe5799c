"""What TGI's routes take, with TGI's own bounds.

Owner: the server integration. Invariants: unknown fields, wrong types and numbers that are
no numbers are refused; what is accepted has an effect, or is a default that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

T = TypeVar("T")
MOST_FIELDS = 1000
"""Of a body or a part of it; ten times what any has."""


class _FirstError(FailFast):
    """Look no further; hashable, as members of unions must be."""

    __hash__ = object.__hash__


Many = Annotated[list[T], _FirstError()]
"""A list whose first wrong item ends the checks: a report of each of a million takes seconds
and gigabytes."""


class Strict(BaseModel):
    """Takes JSON's own types alone, and no field it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"there are {len(value)} fields; no more than {MOST_FIELDS} may be")
        return value


class GrammarSpec(Strict):
    """A form that the answer must have."""

    type: Literal["json", "json_object", "regex", "json_schema"]
    value: Any = Field(None, description="a JSON schema, or the regular expression")


class GenerateParameters(Strict):
    """How to generate."""

    best_of: int | None = Field(None, ge=1, description="answers to draw; the likeliest is given")
    temperature: float | None = Field(None, gt=0)
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, ge=1, le=2**31 - 1)
    top_p: float | None = Field(None, gt=0, lt=1)
    typical_p: float | None = Field(None, gt=0, lt=1)
    do_sample: bool = False
    max_new_tokens: int | None = Field(
        100, ge=1, le=2**31 - 1, description="null: as many as the model's length allows"
    )
    return_full_text: bool | None = None
    stop: Many[str] = Field(default_factory=list, max_length=256)
    truncate: int | None = Field(None, ge=1, le=2**31 - 1)
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = Field(None, ge=0, le=2**64 - 1)
    top_n_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    grammar: GrammarSpec | None = None
    adapter_id: str | None = None
    timeout: float | None = Field(
        None, gt=0, le=1e7, description="seconds after which to stop (pagedllm's own)"
    )
    ttft_target: float | None = Field(None, gt=0, le=1e7, description="as in /v1/completions")
    e2e_target: float | None = Field(None, gt=0, le=1e7, description="as in /v1/completions")


class GenerateRequest(Strict):
    """A prompt and how to continue it."""

    inputs: str
    # Without parameters TGI samples; with an empty object it takes the likeliest tokens.
    parameters: GenerateParameters | None = Field(
        default_factory=lambda: GenerateParameters.model_validate({"do_sample": True})
    )


class CompatGenerateRequest(GenerateRequest):
    """The same, on the root route."""

    stream: bool = False


class TokenizeRequest(Strict):
    """A text to cut into tokens."""

    inputs: str
    # Clients send a whole generate request here, as TGI allowed.
    parameters: GenerateParameters | None = None
    add_special_tokens: bool = True


class VertexRequest(Strict):
    """Google's wrapping of several requests."""

    instances: Many[dict[str, Any]] = Field(min_length=1)
    parameters: dict[str, Any] | None = None
