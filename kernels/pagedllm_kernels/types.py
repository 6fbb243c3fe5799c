"""Plain descriptions of a step's attention work, shared by every implementation.

Owner: pagedllm_kernels. Invariant: everything here is a view of device memory or a
Python scalar; nothing knows about requests, schedulers or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where each of a step's S sequences finds its queries and its pages.

    A step packs the new tokens of all sequences one after the other into T rows. A
    decoding sequence has one row, a prefilling one has many: the kernels see no other
    difference between them.
    """

    query_starts: torch.Tensor
    """int32 [S + 1]: rows ``query_starts[i] : query_starts[i + 1]`` belong to sequence i."""
    context_lens: torch.Tensor
    """int32 [S]: tokens of sequence i in the cache once this step's have been written."""
    page_table: torch.Tensor
    """int32 [S, P]: page ids in order; those past ``ceil(context_len / page_size)`` are unread."""
    slot_mapping: torch.Tensor
    """int64 [T]: ``page_id * page_size + offset`` at which each row's key and value are written."""
    max_query_len: int
    """Rows of the longest sequence in this step."""
    max_context_len: int
    """The largest of ``context_lens``."""
    page_size: int
    """Tokens in a page."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's pages. The page index is the first dimension whatever the layout of the rest.

    So pages are copied as ``key[dst] = key[src]``; only the implementation that allocated
    a cache reads what is inside a page.
    """

    key: torch.Tensor
    value: torch.Tensor


class AttentionBackend(Protocol):
    """An implementation of paged attention, chosen once per model by :func:`registry.select`."""

    name: str
    int8_pages: bool
    """Whether :meth:`allocate` takes int8: rows of keys and values are then rounded as
    :mod:`pagedllm_kernels.int8_pages` does. An implementation that does not say so does not."""

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
        """Return uninitialised pages for one layer, in this implementation's own layout.

        ``dtype`` is that of keys and values in pages: the model's, or int8.
        """
        ...

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
        """Write the new keys and values to their pages, then attend causally over all of them.

        Args:
            query: [T, Hq, D].
            key: [T, Hkv, D], already rotated. Hq is a multiple of Hkv.
            value: [T, Hkv, Dv].
            cache: this layer's pages; written in place.
            metadata: the step's boundaries and page table.
            scale: factor on the scores.
            window: a query at position p sees positions p - window + 1 to p; None sees all.
            softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
            sinks: [Hq], one extra logit per head that takes part in the softmax and is
                then dropped (gpt-oss).

        Returns:
            [T, Hq, Dv] in the query's dtype.
        """
        ...
