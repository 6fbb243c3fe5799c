"""Logits to token ids and log probabilities.

Owner: the worker. Invariants: the logits given are never changed; a row is computed from its
own logits and its own sequence alone, so its token is the same in every batch and after a
preemption; a row that fails fails alone; rows pay only for what their requests ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedllm.errors import EngineError
from pagedllm.types import TokenLogprobs
from pagedllm.worker.logit_edits import edit_logits
from pagedllm.worker.rng import uniforms
from pagedllm.worker.sampling_ops import DrawParams, argmax, draw, take_rows, to_device, top_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pagedllm.worker.slot import SlotState

_TIES = 8
"""Values looked at beyond the k asked for, so that the lowest ids among equals are listed."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Present when the request asked for log probabilities."""


class Sampler:
    """Chooses the next token of each row of a step."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    def sample(self, logits: Tensor, states: Sequence[SlotState]) -> list[Sampled | EngineError]:
        """Choose one token per row.

        Args:
            logits: float32 [R, vocab_size], the model's own.
            states: the R sequences; each draw is that of position ``num_tokens``.

        Returns:
            Per row its token, or what went wrong with that row alone.
        """
        if logits.shape != (len(states), self.vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not fit {len(states)} sequences and "
                f"a vocabulary of {self.vocab_size}"
            )
        tokens, failures = self._choose(logits, states)
        wanted = [
            row
            for row, state in enumerate(states)
            if state.params.logprobs is not None and tokens[row] >= 0
        ]
        logprobs = self._logprobs_of(logits, tokens, wanted, states) if wanted else {}
        results: list[Sampled | EngineError] = []
        for row, token in enumerate(tokens.tolist()):
            if row in failures:
                results.append(failures[row])
            elif token < 0:
                results.append(_explain(logits[row], states[row]))
            else:
                results.append(Sampled(token, logprobs.get(row)))
        return results

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
        """Log probabilities of given tokens, such as a prompt's.

        Args:
            logits: float32 [n, vocab_size], the model's own.
            targets: int64 [n], the token at each position.
            k: how many of the likeliest tokens to list beside it.
        """
        k = min(k, logits.shape[1])
        normaliser = logits.logsumexp(dim=1, keepdim=True)
        own = logits.gather(1, targets[:, None])
        ranks = ((logits > own).sum(dim=1) + 1).cpu().tolist()
        own_logprobs = (own - normaliser)[:, 0].cpu().tolist()
        ids: list[list[int]] = [[]] * len(own)
        logprobs: list[list[float]] = [[]] * len(own)
        if k > 0:
            best, columns = top_values(logits, min(k + _TIES, logits.shape[1]))
            top_ids = columns.cpu().numpy()
            order = np.lexsort((top_ids, -best.cpu().numpy()), axis=1)[:, :k]
            ids = np.take_along_axis(top_ids, order, axis=1).tolist()
            top = (best - normaliser).cpu().numpy()
            logprobs = np.take_along_axis(top, order, axis=1).tolist()
        return [
            TokenLogprobs(token, logprob, rank, tuple(others), tuple(values))
            for token, logprob, rank, others, values in zip(
                targets.tolist(), own_logprobs, ranks, ids, logprobs, strict=True
            )
        ]

    def _choose(
        self, logits: Tensor, states: Sequence[SlotState]
    ) -> tuple[NDArray[np.int64], dict[int, EngineError]]:
        """int64 [R], -1 for rows without a token, and the errors of some of those."""
        failures: dict[int, EngineError] = {}
        edited = np.array([state.edits_logits for state in states], dtype=np.bool_)
        if not edited.any():
            return self._pick(logits, states), failures
        tokens = np.full(len(states), -1, dtype=np.int64)
        for mask in (edited, ~edited):
            rows = np.flatnonzero(mask)
            if not len(rows):
                continue
            some, some_states = take_rows(logits, rows), [states[row] for row in rows.tolist()]
            if mask is not edited:
                tokens[rows] = self._pick(some, some_states)
                continue
            broken = some.amax(dim=1).isnan().cpu().numpy()  # an edit might hide it
            some = some.clone()
            errors = edit_logits(some, some_states)
            failures.update((int(rows[row]), error) for row, error in errors.items())
            tokens[rows] = np.where(broken, -1, self._pick(some, some_states))
        return tokens, failures

    def _pick(self, logits: Tensor, states: Sequence[SlotState]) -> NDArray[np.int64]:
        """int64 [r]: arg max or a draw for each row; -1 where neither is possible."""
        greedy = np.array([state.plan.greedy for state in states], dtype=np.bool_)
        if greedy.all():
            return argmax(logits)
        tokens = np.empty(len(states), dtype=np.int64)
        rows = np.flatnonzero(greedy)
        if len(rows):
            tokens[rows] = argmax(take_rows(logits, rows))
        rows = np.flatnonzero(~greedy)
        drawn = [states[row] for row in rows.tolist()]
        tokens[rows] = draw(take_rows(logits, rows), _draw_params(drawn))
        return tokens

    def _logprobs_of(
        self,
        logits: Tensor,
        tokens: NDArray[np.int64],
        rows: Sequence[int],
        states: Sequence[SlotState],
    ) -> dict[int, TokenLogprobs]:
        """For the chosen token of each of ``rows``, with as many others as its request asks."""
        index = np.array(rows, dtype=np.int64)
        wanted = [states[row].params.logprobs or 0 for row in rows]
        targets = to_device(tokens[index], logits.device)
        entries = self.prompt_logprobs(take_rows(logits, index), targets, max(wanted))
        return {
            row: TokenLogprobs(
                entry.token_id,
                entry.logprob,
                entry.rank,
                entry.top_ids[:k],
                entry.top_logprobs[:k],
            )
            for row, k, entry in zip(rows, wanted, entries, strict=True)
        }


def _draw_params(states: Sequence[SlotState]) -> DrawParams:
    """The drawing parameters of sequences, as arrays."""
    params = [state.params for state in states]
    return DrawParams(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        typical_p=np.array([p.typical_p for p in params], dtype=np.float64),
        uniform=uniforms([s.seed for s in states], [s.num_tokens for s in states]),
    )


def _explain(logits: Tensor, state: SlotState) -> EngineError:
    """Why a row has no token."""
    top = logits.amax()
    if top.isfinite():
        return EngineError(
            "no token is left to choose from: the request's logit_bias, bad_words, min_tokens, "
            "allowed_token_ids, structured_output and logits_processors together exclude all; "
            "relax one of them"
        )
    kind = "NaN" if top.isnan() else "no finite value"
    return EngineError(
        f"the model's logits after {state.num_tokens} tokens hold {kind}; try "
        "dtype='float32', and check the model's weights"
    )
