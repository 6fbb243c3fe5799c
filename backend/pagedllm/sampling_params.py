"""How a request's tokens are chosen and when it ends.

Owner: the public API. Invariants: frozen, complete and valid from construction on; whoever
holds one need not check it again, except for what only the model knows (token ids within
the vocabulary, lengths).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedllm._kinds import Biases, Boolean, Integer, Many, Named, Number, Text
from pagedllm._options import canonical, check_all, checked, option
from pagedllm.errors import ValidationError
from pagedllm.structured.spec import Structure, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_IDS = Many(Integer(low=0))
_STRINGS = Many(Text(), separator=None)


@checked(ValidationError)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, penalties, stopping and what to report, for one request.

    The filters work on the probabilities after penalties and temperature, in this order:
    top_k, top_p, min_p, typical_p. With p the distribution at that point:

    - top_k keeps the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833).
    - top_p keeps the smallest set of likeliest tokens whose probabilities sum to at least
      top_p (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
    - min_p keeps tokens with p >= min_p * max(p) (Nguyen et al. 2024, arXiv:2407.01082).
    - typical_p keeps the smallest set of tokens, by ascending ``|-log p - H(p)|`` with H the
      entropy, whose probabilities sum to at least typical_p (Meister et al. 2023,
      arXiv:2202.00666).
    - repetition_penalty r, for every token in the prompt or the answer so far: a positive
      logit is divided by r, a negative one multiplied by it (Keskar et al. 2019,
      arXiv:1909.05858).
    - presence_penalty and frequency_penalty, for tokens of the answer so far only: a token
      that occurred c > 0 times loses ``presence_penalty + c * frequency_penalty`` from its
      logit (OpenAI's API reference).

    Raises:
        ValidationError: for an unknown name or a wrong value, with ``parameter`` set.
    """

    n: int = option(1, Integer(low=1), "answers to generate for the prompt")
    temperature: float = option(
        1.0, Number(low=0), "divides the logits; 0 takes the likeliest token every time (greedy)"
    )
    top_p: float = option(
        1.0,
        Number(low=0, high=1, exclude_low=True),
        "keep the likeliest tokens that together have this probability; 1 keeps all",
    )
    top_k: int = option(0, Integer(low=-1), "keep this many of the likeliest tokens; 0 or -1: all")
    min_p: float = option(
        0.0,
        Number(low=0, high=1),
        "keep tokens with at least this fraction of the likeliest one's probability; 0 keeps all",
    )
    typical_p: float = option(
        1.0,
        Number(low=0, high=1, exclude_low=True),
        "keep the most typical tokens that together have this probability; 1 keeps all",
    )
    repetition_penalty: float = option(
        1.0,
        Number(low=0, exclude_low=True),
        "above 1 makes tokens of the prompt and the answer less likely to come again",
    )
    presence_penalty: float = option(
        0.0, Number(low=-2, high=2), "taken once from the logits of tokens already in the answer"
    )
    frequency_penalty: float = option(
        0.0, Number(low=-2, high=2), "taken from a token's logit for each time the answer has it"
    )
    seed: int | None = option(
        None,
        Integer(low=-(2**63), high=2**64 - 1),
        "makes the answer repeatable, whatever else runs beside it; none: a new one every time",
    )
    stop: Sequence[str] = option(
        (), _STRINGS, "end the answer before this text; a string or several"
    )
    stop_token_ids: Sequence[int] = option((), _IDS, "end the answer at any of these tokens")
    ignore_eos: bool = option(False, Boolean(), "generate on past the model's own end token")
    max_tokens: int | None = option(
        16,
        Integer(low=1),
        "most tokens to generate; none: as many as the model's length allows",
        optional=True,
    )
    min_tokens: int = option(0, Integer(low=0), "no end token or stop before this many tokens")
    logprobs: int | None = option(
        None,
        Integer(low=0),
        "report each token's log probability and those of this many likeliest ones",
    )
    prompt_logprobs: int | None = option(
        None, Integer(low=0), "the same for the tokens of the prompt"
    )
    logit_bias: Mapping[int, float] | None = option(
        None, Biases(), "added to the logits of the tokens named by id"
    )
    allowed_token_ids: Sequence[int] | None = option(
        None, Many(Integer(low=0), at_least=1), "generate none but these tokens"
    )
    bad_words: Sequence[str] = option((), _STRINGS, "texts that must not be generated")
    skip_special_tokens: bool = option(
        True, Boolean(), "leave special tokens, such as the end token, out of the text"
    )
    include_stop_str_in_output: bool = option(
        False, Boolean(), "keep the stop string at the end of the text"
    )
    truncate_prompt_tokens: int | None = option(
        None, Integer(low=1), "use only this many tokens from the end of the prompt"
    )
    structured_output: StructuredOutput | None = option(
        None,
        Structure(),
        "make the answer keep to a JSON schema, regular expression, choice or grammar",
    )
    logits_processors: Sequence[Callable[..., Any] | str | Mapping[str, Any]] = option(
        (),
        Many(Named(callables=True), separator=None),
        "what changes the logits before a token is drawn: names that plugins register, each "
        'alone or with options ({"name": ..., ...}); in Python also callables, transformers\' too',
    )

    def __post_init__(self) -> None:
        """Check and normalise every value.

        Raises:
            ValidationError: see the class.
        """
        check_all(self, ValidationError)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}; "
                f"raise max_tokens or lower min_tokens",
                "min_tokens",
            )
        if self.structured_output is not None and self.ignore_eos:
            raise ValidationError(
                "structured_output: a constrained answer ends with the end token, and ignore_eos "
                "is set; drop one of the two",
                "structured_output",
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature == 0

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with some values changed; checks them as construction does."""
        return dataclasses.replace(self, **canonical(type(self), changes, ValidationError))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping such as parsed JSON; unknown keys are refused."""
        return cls(**values)
