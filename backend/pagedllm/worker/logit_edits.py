"""What requests do to their logits before temperature: penalties, biases, bans, processors.

Owner: the worker. Invariants: a row is changed by its own request alone, and one row's
failure leaves the others as they are. The order is transformers': repetition penalty,
presence and frequency penalty, logit bias, bad words, min_tokens, allowed tokens, then the
request's own logits processors and last its masks (grammars). Everything but the processors
is one gather and one scatter for all rows together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedllm.errors import EngineError
from pagedllm.worker.masks import apply_masks
from pagedllm.worker.sampling_ops import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pagedllm.worker.slot import SlotState


def edit_logits(logits: Tensor, states: Sequence[SlotState]) -> dict[int, EngineError]:
    """Apply every row's edits in place.

    Args:
        logits: float32 [r, V], contiguous.
        states: of the r rows.

    Returns:
        The rows that failed, each with its error.
    """
    plans = [state.plan for state in states]
    if any(plan.penalises for plan in plans):
        _penalise(logits, states)
    if any(len(plan.bias_ids) for plan in plans):
        cells, keep = _cells([plan.bias_ids for plan in plans], logits)
        values = np.concatenate([plan.bias_values for plan in plans])[keep]
        logits.view(-1)[cells] += to_device(values, logits.device)
    _ban(logits, states)
    if any(plan.allowed_ids is not None for plan in plans):
        _allow(logits, [plan.allowed_ids for plan in plans])
    failures: dict[int, EngineError] = {}
    for row, state in enumerate(states):
        try:
            for processor in state.processors:
                logits[row] = run_processor(processor, state.known, logits[row].clone())
        except EngineError as error:
            failures[row] = error
    return apply_masks(logits, states) | failures


def _cells(ids: Sequence[NDArray[np.int64]], logits: Tensor) -> tuple[Tensor, NDArray[np.bool_]]:
    """The places of per-row token ids in the flattened logits.

    Ids outside the vocabulary (an embedding may have more rows than the logits columns) are
    left out.

    Returns:
        int64 [n] on the logits' device, and which of the concatenated ids they are.
    """
    width = logits.shape[1]
    columns = np.concatenate(ids)
    cells = columns + np.repeat(np.arange(len(ids)) * width, [len(row) for row in ids])
    keep = (columns >= 0) & (columns < width)
    return to_device(cells[keep], logits.device), keep


def _penalise(logits: Tensor, states: Sequence[SlotState]) -> None:
    """Lower the logits of tokens that occurred already, in rows that ask for it.

    First the repetition penalty (Keskar et al. 2019, arXiv:1909.05858) for tokens of the
    prompt and the output, then presence and frequency penalties, as OpenAI's API defines
    them, for tokens of the output.
    """
    rows = [row for row, state in enumerate(states) if state.plan.penalises]
    counts = {row: states[row].token_counts() for row in rows}
    empty = np.empty(0, np.int64)
    ids = [counts[row].ids if row in counts else empty for row in range(len(states))]
    cells, keep = _cells(ids, logits)
    lengths = [counts[row].num_ids for row in rows]
    params = [states[row].params for row in rows]

    def spread(values: list[float]) -> NDArray[np.float32]:
        return np.repeat(np.array(values, np.float32), lengths)[keep]

    occurrences = np.concatenate([counts[row].counts for row in rows])[keep]
    loss = spread([p.frequency_penalty for p in params]) * occurrences
    loss += spread([p.presence_penalty for p in params]) * (occurrences > 0)
    repetition = to_device(spread([p.repetition_penalty for p in params]), logits.device)
    flat = logits.view(-1)
    scores = flat[cells]
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    flat[cells] = scores - to_device(loss, logits.device)


def _ban(logits: Tensor, states: Sequence[SlotState]) -> None:
    """-inf for tokens that would complete a bad word, or end too short an output."""
    banned = []
    for state in states:
        ids = [state.plan.banned_ids]
        if state.ends_forbidden:
            ids.append(state.plan.end_ids)
        if state.plan.banned_runs:
            known = state.known
            last = [
                token
                for prefix, token in state.plan.banned_runs
                if len(prefix) <= len(known) and tuple(known[-len(prefix) :].tolist()) == prefix
            ]
            ids.append(np.array(last, dtype=np.int64))
        banned.append(np.concatenate(ids) if len(ids) > 1 else ids[0])
    cells, _ = _cells(banned, logits)
    if len(cells):
        logits.view(-1)[cells] = -torch.inf


def _allow(logits: Tensor, allowed: Sequence[NDArray[np.int64] | None]) -> None:
    """-inf for all but the allowed tokens, in rows that have such a list."""
    empty = np.empty(0, np.int64)
    cells, _ = _cells([empty if ids is None else ids for ids in allowed], logits)
    flat = logits.view(-1)
    kept = flat[cells]
    rows = np.array([row for row, ids in enumerate(allowed) if ids is not None], dtype=np.int64)
    logits[to_device(rows, logits.device)] = -torch.inf
    flat[cells] = kept


def run_processor(
    processor: Callable[..., Any], token_ids: NDArray[np.int64], logits: Tensor
) -> Tensor:
    """Call a logits processor on one row.

    A plain callable is called as ``processor(token_ids: list[int], logits [V])`` and gives
    back [V]; transformers' ``LogitsProcessor`` and ``LogitsProcessorList`` as
    ``processor(input_ids [1, L], scores [1, V])``, and give back [1, V]. +inf forces a token.

    Args:
        processor: the callable.
        token_ids: int64 [L], prompt and output.
        logits: float32 [V], which the processor may change.

    Returns:
        float32 [V].

    Raises:
        EngineError: it raised, or what it gave back is not logits of the right shape.
    """
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    shape = logits.shape
    try:
        if _is_transformers(processor):
            input_ids = to_device(token_ids.copy(), logits.device)[None]
            result = processor(input_ids, logits[None])
            shape = torch.Size((1, *shape))
        else:
            result = processor(token_ids.tolist(), logits)
    except Exception as error:
        raise EngineError(
            f"the request's logits processor {name} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, torch.Tensor) or result.shape != shape:
        found = (
            f"a tensor of shape {tuple(result.shape)}"
            if isinstance(result, torch.Tensor)
            else type(result).__name__
        )
        raise EngineError(
            f"the request's logits processor {name} must return a tensor of shape "
            f"{tuple(shape)}, the changed logits, but returned {found}"
        )
    row = result.detach().reshape(-1).to(device=logits.device, dtype=torch.float32)
    highest = row.max()
    if highest == torch.inf:
        return torch.where(row == torch.inf, 0.0, -torch.inf)
    if not highest.isfinite():
        problem = "NaN" if highest.isnan() else "-inf for every token"
        raise EngineError(f"the request's logits processor {name} returned {problem}")
    return row


def _is_transformers(processor: Callable[..., Any]) -> bool:
    """Whether it is one of transformers' processors, found without importing transformers."""
    return any(
        base.__name__ in ("LogitsProcessor", "LogitsProcessorList")
        and base.__module__.startswith("transformers.")
        for base in type(processor).__mro__
    )
