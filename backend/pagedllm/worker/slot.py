"""What a worker remembers of one sequence between steps.

Owner: the worker. Invariants: ``tokens[:num_tokens]`` are the known tokens, prompt first, and
only ever grow; a slot's state is replaced, never reused, when another sequence (or the same
one after a preemption) moves in, which ``generation`` tells apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedllm._named import NamedProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

    from pagedllm.sampling_params import SamplingParams
    from pagedllm.types import Pooling, SlotInit
    from pagedllm.worker.masks import TokenMask


@dataclass(slots=True)
class TokenCounts:
    """The distinct token ids of a sequence, each with how often it was generated.

    Kept up to date token by token, so that a penalty costs the number of distinct tokens and
    not the vocabulary, and a step of one token costs O(1).
    """

    num_counted: int = 0
    """Tokens of the sequence that are counted already."""
    num_ids: int = 0
    _ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(64, np.int64))
    _counts: NDArray[np.float32] = field(default_factory=lambda: np.zeros(64, np.float32))
    _place: dict[int, int] = field(default_factory=dict)

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 [num_ids], each once, in order of appearance."""
        return self._ids[: self.num_ids]

    @property
    def counts(self) -> NDArray[np.float32]:
        """float32 [num_ids], occurrences in the output; 0 for ids of the prompt alone."""
        return self._counts[: self.num_ids]

    def update(self, tokens: NDArray[np.int64], num_prompt_tokens: int) -> None:
        """Count the tokens of ``tokens`` from ``num_counted`` on."""
        start = self.num_counted
        for position, token in enumerate(tokens[start:].tolist(), start):
            place = self._place.setdefault(token, self.num_ids)
            if place == self.num_ids:
                if place == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * place)
                    self._counts = np.concatenate((self._counts, np.zeros(place, np.float32)))
                self._ids[place] = token
                self.num_ids += 1
            if position >= num_prompt_tokens:
                self._counts[place] += 1
        self.num_counted = len(tokens)


@dataclass(frozen=True, slots=True, eq=False)
class LogitPlan:
    """What a sequence's parameters ask of its logits, worked out once."""

    greedy: bool
    penalises: bool
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    end_ids: NDArray[np.int64]
    """Forbidden until ``min_tokens`` are out; empty without ``min_tokens``."""
    banned_ids: NDArray[np.int64]
    """Bad words of one token."""
    banned_runs: tuple[tuple[tuple[int, ...], int], ...]
    """Bad words of several: what comes before the last token, and that token."""
    allowed_ids: NDArray[np.int64] | None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        bad_words_ids: Sequence[tuple[int, ...]],
    ) -> LogitPlan:
        """Work it out. A bad word that is just an end token is no bad word (transformers)."""
        bias = params.logit_bias or {}
        ends = sorted(eos_token_ids.union(params.stop_token_ids)) if params.min_tokens else []
        single = [word[0] for word in bad_words_ids if len(word) == 1]
        return cls(
            greedy=params.greedy,
            penalises=params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0,
            bias_ids=np.array(list(bias.keys()), dtype=np.int64),
            bias_values=np.array(list(bias.values()), dtype=np.float32),
            end_ids=np.array(ends, dtype=np.int64),
            banned_ids=np.array(sorted(set(single) - eos_token_ids), dtype=np.int64),
            banned_runs=tuple((word[:-1], word[-1]) for word in bad_words_ids if len(word) > 1),
            allowed_ids=None
            if params.allowed_token_ids is None
            else np.unique(np.array(params.allowed_token_ids, dtype=np.int64)),
        )


@dataclass(slots=True)
class SlotState:
    """One sequence as its worker sees it."""

    generation: int
    params: SamplingParams
    seed: int
    """64-bit base of the sequence's random numbers."""
    num_prompt_tokens: int
    num_tokens: int
    """Known tokens: the prompt and what was drawn since."""
    tokens: NDArray[np.int64]
    """int64 [capacity >= num_tokens]; use :meth:`append` to add, :attr:`known` to read."""
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    driven: bool = False
    """Its tokens come from the caller, who is given the logits."""
    pooling: Pooling | None = None
    pooled: torch.Tensor | None = None
    """float64 [E], the sum of the states that were computed so far (``mean``)."""
    plan: LogitPlan = field(init=False)
    edits_always: bool = field(init=False)
    """Whether something changes the logits in every step."""
    processors: tuple[Callable[..., Any], ...] = field(init=False)
    """The logits processors that have no state for a sequence."""
    masks: tuple[TokenMask, ...] = field(init=False)
    """This sequence's own state of those that have one."""
    _counts: TokenCounts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Work out the plan."""
        plan = LogitPlan.of(self.params, self.eos_token_ids, self.bad_words_ids)
        self.plan = plan
        # What a plugin made from a name is called itself, since its type may matter.
        given: list[Any] = [
            each.processor if isinstance(each, NamedProcessor) else each
            for each in self.params.logits_processors
        ]
        self.masks = tuple(p.for_sequence() for p in given if hasattr(p, "for_sequence"))
        self.processors = tuple(p for p in given if not hasattr(p, "for_sequence"))
        self.edits_always = bool(
            plan.penalises
            or len(plan.bias_ids)
            or self.bad_words_ids
            or plan.allowed_ids is not None
            or self.params.logits_processors
        )

    @classmethod
    def from_init(
        cls, init: SlotInit, bad_words_ids: Sequence[Sequence[int]] = (), capacity: int = 0
    ) -> SlotState:
        """The state of a sequence that enters a slot, with room for ``capacity`` tokens."""
        known = np.asarray(init.token_ids, dtype=np.int64)
        tokens = np.empty(max(capacity, len(known) + 64), dtype=np.int64)
        tokens[: len(known)] = known
        return cls(
            generation=init.generation,
            params=init.params,
            seed=init.seed,
            num_prompt_tokens=init.num_prompt_tokens,
            num_tokens=len(known),
            tokens=tokens,
            eos_token_ids=init.eos_token_ids,
            bad_words_ids=tuple(tuple(word) for word in bad_words_ids),
            driven=init.driven,
            pooling=init.pooling,
        )

    @property
    def known(self) -> NDArray[np.int64]:
        """int64 [num_tokens], a view."""
        return self.tokens[: self.num_tokens]

    @property
    def prompt(self) -> NDArray[np.int64]:
        """int64 [num_prompt_tokens], a view."""
        return self.tokens[: self.num_prompt_tokens]

    @property
    def output(self) -> NDArray[np.int64]:
        """int64 [num_output_tokens], a view."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def ends_forbidden(self) -> bool:
        """Whether the next token must not end the sequence (``min_tokens``)."""
        return self.num_output_tokens < self.params.min_tokens

    @property
    def edits_logits(self) -> bool:
        """Whether something changes the logits before the next token is chosen."""
        return self.edits_always or self.ends_forbidden

    def append(self, token_id: int) -> None:
        """Add a drawn token."""
        if self.num_tokens == len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * self.num_tokens)
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def token_counts(self) -> TokenCounts:
        """The sequence's distinct tokens, brought up to date."""
        if self._counts is None:
            self._counts = TokenCounts()
        self._counts.update(self.known, self.num_prompt_tokens)
        return self._counts
