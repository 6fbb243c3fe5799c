"""Builds the one :class:`~pagedllm.models.base.DeviceBatch` of a step.

Owner: the worker. Invariant: everything is laid out on the host with numpy first and
moved to the device in one copy per field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedllm.models.base import DeviceBatch
from pagedllm_kernels.types import AttentionMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pagedllm.types import Row
    from pagedllm.worker.slot import SlotState


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """Which of the logits' R rows belong to which of the step's rows."""

    sampling: tuple[int, ...]
    """Indices into the step's rows that draw a token."""
    last: tuple[int, ...]
    """For each of these, its row in the logits."""
    prompt: tuple[tuple[int, int, int], ...]
    """(row of the step, first logits row, count) where prompt logprobs are wanted."""


def build_batch(
    rows: Sequence[Row],
    slots: Sequence[SlotState | None],
    page_tables: NDArray[np.int32],
    page_size: int,
    device: torch.device,
) -> tuple[DeviceBatch, LogitRows]:
    """Pack a step's rows.

    Args:
        rows: what to compute; S rows of T tokens in all.
        slots: the worker's slots.
        page_tables: int32 [slots, pages], page ids in order.
        page_size: tokens in a page.
        device: where the batch goes.
    """
    starts = np.array([row.start for row in rows], dtype=np.int64)
    counts = np.array([row.count for row in rows], dtype=np.int64)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    context = starts + counts
    token_ids = np.concatenate([_tokens(row, slots[row.slot]) for row in rows])
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
    max_context = int(context.max())
    width = -(-max_context // page_size)
    tables = page_tables[[row.slot for row in rows], :width]
    pages = tables[np.repeat(np.arange(len(rows)), counts), positions // page_size]
    slot_mapping = pages.astype(np.int64) * page_size + positions % page_size
    logit_rows, logit_indices = _readout(rows, slots, offsets)
    attention = AttentionMetadata(
        query_starts=_to(offsets.astype(np.int32), device),
        context_lens=_to(context.astype(np.int32), device),
        page_table=_to(np.ascontiguousarray(tables), device),
        slot_mapping=_to(slot_mapping, device),
        max_query_len=int(counts.max()),
        max_context_len=max_context,
        page_size=page_size,
    )
    batch = DeviceBatch(
        token_ids=_to(token_ids, device),
        positions=_to(positions, device),
        logit_indices=_to(np.array(logit_indices, dtype=np.int64), device),
        attention=attention,
    )
    return batch, logit_rows


def _tokens(row: Row, state: SlotState | None) -> NDArray[np.int64]:
    if state is None or state.generation != row.generation:
        raise RuntimeError(f"the step names a slot that holds no such sequence: {row}")
    if row.start + row.count > state.num_tokens:
        raise RuntimeError(f"the step computes tokens that are not known yet: {row}")
    return state.tokens[row.start : row.start + row.count]


def _readout(
    rows: Sequence[Row], slots: Sequence[SlotState | None], offsets: NDArray[np.int64]
) -> tuple[LogitRows, list[int]]:
    indices: list[int] = []
    sampling: list[int] = []
    last: list[int] = []
    prompt: list[tuple[int, int, int]] = []
    for index, row in enumerate(rows):
        state, first, end = slots[row.slot], int(offsets[index]), int(offsets[index + 1])
        # The logits at position p speak of the token at p + 1: the prompt's last is drawn.
        wanted = 0
        if state is not None and state.params.prompt_logprobs is not None:
            wanted = min(row.count, state.num_prompt_tokens - 1 - row.start)
        if wanted > 0:
            prompt.append((index, len(indices), wanted))
            indices.extend(range(first, first + wanted))
        if row.sample:
            sampling.append(index)
            last.append(len(indices))
            indices.append(end - 1)
    return LogitRows(tuple(sampling), tuple(last), tuple(prompt)), indices


def _to(array: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
