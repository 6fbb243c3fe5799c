"""One sequence's pages, in the order of its tokens.

Owner: the sequence that holds it; changed only by
:class:`~pagedllm.cache.manager.CacheManager`. Invariant: token ``i`` lives in page
``pages[i // page_size]`` at offset ``i % page_size``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PageTable:
    """Page ids, with the contents' hashes as far as they are known and published."""

    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the pages that the known tokens fill; computed once."""
    num_published: int = 0
    """Leading pages whose hash the pool knows."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """What a worker has to know of one change to a table."""

    index: int
    """First entry that changed."""
    page_ids: tuple[int, ...]
    """The new entries from there on."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) pages to copy before anything is written."""
