"""Paged attention in plain torch: the oracle of the other implementations, on any device.

Owner: pagedllm_kernels. Invariants: scores, softmax and the weighted sum are fp32 whatever
the dtypes of the cache and the queries; a slot of a page that no token was written to is
never read into a result, whatever it holds (NaN included); pages before a window are not
gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagedllm_kernels.int8_pages import allocate_rows, widen_rows, write_rows
from pagedllm_kernels.types import LayerCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedllm_kernels.types import AttentionMetadata

# Scores of a prefill that are held at once, in elements: 64 MiB of fp32.
_MAX_SCORES = 1 << 24
# Tokens whose keys and values are gathered at once for decoding rows.
_MAX_GATHERED = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    """Sequences with one new token each and alike in length, attended in one go."""

    rows: torch.Tensor
    """int64 [N], their rows among the step's T."""
    pages: torch.Tensor
    """int64 [N, P], pages to gather; a short sequence repeats its last one."""
    hidden: torch.Tensor
    """bool [N, 1, P * page_size], slots that the row must not see."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """One sequence with several new tokens."""

    start: int
    """First of its rows among the step's T."""
    count: int
    context: int
    """Tokens in the cache once these are written."""
    first: int
    """Position of the first token in the first of ``pages``."""
    pages: torch.Tensor
    """int64 [P]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Which pages a step reads; the same for all layers with the same window."""

    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]


class ReferenceAttention:
    """Paged attention with matrix products of torch.

    Pages are ``key[num_pages, num_kv_heads, page_size, head_dim]``, ``value`` likewise; in
    int8, rows are those of :mod:`pagedllm_kernels.int8_pages`. Not safe to call from two
    threads at once: it keeps the plan of the step it is in.
    """

    name = "reference"
    int8_pages = True

    def __init__(self) -> None:
        self._step: AttentionMetadata | None = None
        self._plans: dict[int | None, _Plan] = {}

    def allocate(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerCache:
        """Return uninitialised pages, [num_pages, num_kv_heads, page_size, dim] each."""
        shape = (num_pages, num_kv_heads, page_size)
        if dtype == torch.int8:
            return LayerCache(*(allocate_rows(shape, d, device) for d in (head_dim, value_dim)))
        return LayerCache(
            *(torch.empty((*shape, d), dtype=dtype, device=device) for d in (head_dim, value_dim))
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend; see :class:`AttentionBackend`."""
        pages = metadata.slot_mapping // metadata.page_size
        offsets = metadata.slot_mapping % metadata.page_size
        for held, given in ((cache.key, key), (cache.value, value)):
            if held.dtype == torch.int8:
                write_rows(held, (pages, slice(None), offsets), given)
            else:
                held[pages, :, offsets] = given.to(held.dtype)

        plan = self._plan(metadata, window)
        kv_heads = key.shape[1]
        output = query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
        for group in plan.decodes:
            rows = query[group.rows].unsqueeze(1)
            values = _gather(cache.value, group.pages, value.shape[2])
            # A weight of zero does not hide a NaN in a slot that nothing was written to.
            values.masked_fill_(group.hidden[:, 0, None, :, None], 0.0)
            attended = _softmax_values(
                _grouped(rows, kv_heads) * scale,
                _gather(cache.key, group.pages, key.shape[2]),
                values,
                group.hidden,
                softcap,
                sinks,
            )
            output[group.rows] = _ungrouped(attended).squeeze(1).to(output.dtype)
        for part in plan.prefills:
            keys = _gather(cache.key, part.pages[None], key.shape[2])
            values = _gather(cache.value, part.pages[None], value.shape[2])
            for begin, end, low, high, hidden in _blocks(part, query.shape[1], window):
                rows = query[part.start + begin : part.start + end].unsqueeze(0)
                attended = _softmax_values(
                    _grouped(rows, kv_heads) * scale,
                    keys[:, :, low:high],
                    values[:, :, low:high],
                    hidden,
                    softcap,
                    sinks,
                )
                output[part.start + begin : part.start + end] = _ungrouped(attended)[0].to(
                    output.dtype
                )
        return output

    def _plan(self, metadata: AttentionMetadata, window: int | None) -> _Plan:
        """Return the step's plan, made once for all layers with the same window."""
        if self._step is not metadata:
            self._step, self._plans = metadata, {}
        if window not in self._plans:
            self._plans[window] = _make_plan(metadata, window)
        return self._plans[window]


def _make_plan(metadata: AttentionMetadata, window: int | None) -> _Plan:
    starts = metadata.query_starts.tolist()
    contexts = metadata.context_lens.tolist()
    size = metadata.page_size
    buckets: dict[int, list[tuple[int, int]]] = {}
    prefills = []
    for i, context in enumerate(contexts):
        count = starts[i + 1] - starts[i]
        if count == 0:
            continue
        earliest = 0 if window is None else max(0, context - count - window + 1)
        first, last = earliest // size, (context - 1) // size
        if count == 1:
            # Alike within a factor of two, so that padding at most doubles the work.
            buckets.setdefault((last - first + 1).bit_length(), []).append((i, last - first + 1))
        else:
            pages = metadata.page_table[i, first : last + 1].long()
            prefills.append(_Prefill(starts[i], count, context, first * size, pages))
    decodes = []
    for bits, members in buckets.items():
        step = max(1, _MAX_GATHERED // (size << bits))
        for begin in range(0, len(members), step):
            part = members[begin : begin + step]
            width = max(pages for _, pages in part)
            decodes.append(_decode_group(metadata, [i for i, _ in part], width, window))
    return _Plan(tuple(decodes), tuple(prefills))


def _decode_group(
    metadata: AttentionMetadata, sequences: list[int], width: int, window: int | None
) -> _Decode:
    """Gather ``width`` pages of each sequence, from the first one that its row sees."""
    size, device = metadata.page_size, metadata.page_table.device
    index = torch.tensor(sequences, dtype=torch.int64, device=device)
    context = metadata.context_lens[index].long()[:, None]
    earliest = torch.zeros_like(context) if window is None else (context - window).clamp_(min=0)
    first, last = earliest // size, (context - 1) // size
    columns = torch.minimum(first + torch.arange(width, device=device), last)
    pages = metadata.page_table[index].long().gather(1, columns)
    positions = first * size + torch.arange(width * size, device=device)
    hidden = (positions >= context) | (positions < earliest)
    return _Decode(metadata.query_starts[index].long(), pages, hidden[:, None, :])


def _blocks(
    part: _Prefill, heads: int, window: int | None
) -> Iterator[tuple[int, int, int, int, torch.Tensor]]:
    """Cut a prefill into blocks of rows whose scores fit ``_MAX_SCORES``.

    Yields:
        (first row, row after the last, first key, key after the last, bool [1, rows, keys]
        of keys that a row must not see); keys count from ``part.first``.
    """
    device = part.pages.device
    step = max(1, min(part.count, 512, _MAX_SCORES // (heads * part.context)))
    for begin in range(0, part.count, step):
        end = min(begin + step, part.count)
        position = part.context - part.count + begin - part.first
        high = position + end - begin
        low = 0 if window is None else max(0, position - window + 1)
        rows = torch.arange(position, high, device=device)[:, None]
        columns = torch.arange(low, high, device=device)
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        yield begin, end, low, high, hidden.unsqueeze(0)


def _gather(cache: torch.Tensor, pages: torch.Tensor, dim: int) -> torch.Tensor:
    """Return float32 [N, Hkv, P * page_size, dim], a copy, of pages [N, P]."""
    picked = cache[pages]
    picked = widen_rows(picked, dim) if picked.dtype == torch.int8 else picked.float()
    picked = picked.transpose(1, 2)
    return picked.reshape(picked.shape[0], picked.shape[1], -1, picked.shape[4])


def _grouped(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[N, rows, Hq, D] to float32 [N, Hkv, G * rows, D], query heads beside their KV head."""
    n, rows, heads, dim = query.shape
    grouped = query.to(torch.float32).view(n, rows, kv_heads, heads // kv_heads, dim)
    return grouped.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, dim)


def _ungrouped(attended: torch.Tensor) -> torch.Tensor:
    """[N, Hkv, G, rows, Dv] to [N, rows, Hq, Dv]."""
    return attended.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _softmax_values(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in fp32.

    Args:
        query: [N, Hkv, G * rows, D], scaled.
        key: [N, Hkv, L, D].
        value: [N, Hkv, L, Dv], finite throughout.
        hidden: bool [N, rows, L].
        softcap: see :class:`AttentionBackend`.
        sinks: [Hq].

    Returns:
        [N, Hkv, G, rows, Dv].
    """
    n, kv_heads, _, _ = query.shape
    rows, length = hidden.shape[1], hidden.shape[2]
    scores = (query @ key.transpose(2, 3)).view(n, kv_heads, -1, rows, length)
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
    scores.masked_fill_(hidden[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.to(torch.float32).view(1, kv_heads, -1, 1, 1)
        scores = torch.cat([scores, column.expand(n, -1, -1, rows, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    attended = weights.reshape(n, kv_heads, -1, length) @ value
    return attended.view(n, kv_heads, -1, rows, value.shape[3])
