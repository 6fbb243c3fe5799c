"""What a request gives back.

Owner: the public API. Invariants: every object is a snapshot, never changed after it was
handed out. A streaming consumer gets a new snapshot each time; ``text`` and ``token_ids``
hold all there is so far, ``text_delta`` and ``new_token_ids`` only what is new to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagedllm.errors import ValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagedllm.errors import PagedLLMError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one position, from the model's raw logits."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of a request's ``n`` answers."""

    index: int
    """Which of the ``n``, from 0."""
    text: str = ""
    """Everything generated so far that is safe to show: whole characters, no stop string
    (unless asked for), and nothing that may yet become part of one."""
    token_ids: Sequence[int] = ()
    """Every token generated so far, a final stop token included."""
    cumulative_logprob: float | None = None
    """Sum of the generated tokens' log probabilities; None unless ``logprobs`` was asked for."""
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    """Per generated token: that token's log probability and those of the likeliest."""
    finish_reason: FinishReason | None = None
    """None while it runs. ``stop``: an end token, stop token or stop string. ``length``:
    ``max_tokens`` or the model's length was reached. ``abort``: the caller gave up.
    ``error``: see :attr:`RequestOutput.error`."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's own end token."""
    text_delta: str = ""
    """What ``text`` gained since this consumer's previous output."""
    new_token_ids: Sequence[int] = ()
    """What ``token_ids`` gained since this consumer's previous output."""
    text_offsets: Sequence[int] = ()
    """Per generated token, ``len(text)`` once it was added: which part of the text it gave.
    A token whose text was held back gives it with a later one."""

    @property
    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of ``time.monotonic()``."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    """How often its pages were taken away and recomputed later."""

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step with this request in it."""
        return _since(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival to it."""
        return _since(self.arrival_time, self.first_token_time)

    @property
    def e2e_time(self) -> float | None:
        """Seconds from arrival to the end."""
        return _since(self.arrival_time, self.finished_time)


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request's answers, so far or finished."""

    request_id: str
    prompt: str | None = None
    """The prompt's text; None when token ids were given."""
    prompt_token_ids: Sequence[int] = ()
    """The prompt as the model saw it, after any truncation."""
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    """Per prompt token, None for the first; None altogether unless asked for."""
    outputs: Sequence[CompletionOutput] = field(default_factory=tuple)
    """``n`` answers by index."""
    finished: bool = False
    """Whether every answer is complete."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    from_response_cache: bool = False
    """Whether all of it was stored by an earlier, equal request, and nothing was computed."""
    metrics: RequestMetrics | None = None
    error: PagedLLMError | None = None
    """What went wrong, when a ``finish_reason`` is ``error``."""
    embedding: Sequence[float] | None = None
    """Of a prompt that was to be embedded, not normalised; see :class:`EmbeddingOutput`."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt as one vector: the model's final states, pooled."""

    embedding: Sequence[float]
    prompt_token_ids: Sequence[int] = ()
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    @classmethod
    def of(
        cls, output: RequestOutput, normalize: bool = True, dimensions: int | None = None
    ) -> EmbeddingOutput:
        """Take it from a finished request.

        Args:
            output: of a request that :meth:`AsyncLLM.prepare_embedding` made.
            normalize: scale the vector to a length of 1.
            dimensions: keep only this many of its first entries, before it is scaled.

        Raises:
            ValidationError: there are not as many dimensions.
        """
        vector = list(output.embedding or ())
        if dimensions is not None and not 1 <= dimensions <= len(vector):
            raise ValidationError(
                f"dimensions={dimensions} must be from 1 to {len(vector)}, the model's hidden size",
                "dimensions",
            )
        vector = vector[:dimensions]
        if normalize:
            length = math.hypot(*vector) or 1.0
            vector = [value / length for value in vector]
        return cls(vector, output.prompt_token_ids, output.num_cached_tokens)
