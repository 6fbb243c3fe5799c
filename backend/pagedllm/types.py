"""The plain data that crosses from the engine to an executor's worker and back.

Owner: the engine. Invariants: every class is frozen and serialisable; a
:class:`ScheduleStep` is a delta against the steps before it, so a worker applies them in
order and never sees the scheduler's own state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.sampling_params import SamplingParams


Pooling = Literal["mean", "last"]
"""How a prompt's final states, one a token, become one vector."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with what to do with it, as the engine received it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    """The text that the tokens came from, when there was one."""
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """``params.bad_words`` as token ids."""
    priority: int = 0
    """Lower runs first under the ``priority`` policy."""
    arrival_time: float = 0.0
    """Seconds of ``time.monotonic()``."""
    ttft_target: float | None = None
    """Seconds from arrival by which the first token is wanted (the ``deadline`` policy)."""
    e2e_target: float | None = None
    """Seconds from arrival by which the whole answer is wanted."""
    cache_salt: str = ""
    """Requests share cached prefixes only when their salts are equal."""
    driven: bool = False
    """Its tokens come from the caller, who is given the logits, instead of from a draw."""
    pooling: Pooling | None = None
    """Its prompt's states are pooled to an embedding, and it draws nothing; ``driven``, too."""


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A sequence enters a worker's slot: first admission, or return after a preemption."""

    slot: int
    generation: int
    """Counts the sequences that have had this slot; a row names both, so that a late
    result for a former tenant is recognised."""
    token_ids: Sequence[int]
    """Every token known so far, prompt first."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """64-bit base of the sequence's random numbers; with the position of a token it
    determines that token's draw, whatever else is in the batch."""
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    driven: bool = False
    """Give back the logits and draw nothing: see :attr:`Request.driven`."""
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entries ``index, index + 1, ...`` of a slot's page table take these page ids."""

    slot: int
    index: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Compute ``count`` tokens of a slot from position ``start`` on."""

    slot: int
    generation: int
    start: int
    count: int
    sample: bool
    """Whether the last of them is the sequence's last known token: draw the next one."""


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """What a worker does in one step: release, add, append, write tables, copy, run."""

    step_id: int
    rows: tuple[Row, ...]
    released: tuple[int, ...] = ()
    """Slots whose sequence left (finished, aborted or preempted)."""
    added: tuple[SlotInit, ...] = ()
    appended: tuple[tuple[int, int], ...] = ()
    """(slot, token): the next token of a driven sequence, as its caller chose it."""
    page_writes: tuple[PageWrite, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source page, destination page): copy on write, before any row runs."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, from the model's raw logits."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What became of a row."""

    slot: int
    generation: int
    token_id: int | None = None
    """The drawn token; None when the row did not sample."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens at positions ``start + 1 ... start + count`` (within the prompt)."""
    logits: Any = None
    """Of a driven row: float32 [vocab], the model's own; ``token_id`` is None then."""
    embedding: tuple[float, ...] | None = None
    """Of the last row of a sequence that is pooled."""
    error: BaseException | None = None
    """Set when this row alone failed, such as in its own logits processor."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The rows' outputs in the order of ``ScheduleStep.rows``; or one error for all of them."""

    step_id: int
    rows: tuple[RowOutput, ...] = ()
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine has to know of a loaded model; an executor's ``start`` returns it."""

    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    tier: str
    """``native`` or ``generic``."""
    architecture: str
    bytes_per_page: int
    weight_bytes: int
    attention_backend: str
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    """End tokens of the model's generation config (or config)."""
