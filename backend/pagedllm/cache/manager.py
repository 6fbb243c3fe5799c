"""Gives sequences their pages: growth, prefix hits, sharing, copy on write.

Owner: the scheduler. Invariants: a page that is published or held by more than one
sequence is never written; pages are published only once their contents have been
computed; a call either does all it says or changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedllm.cache.page_table import PageTable, TableChange
from pagedllm.cache.pages import PagePool
from pagedllm.cache.prefix import extend_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagedllm.cache.eviction import EvictionPolicy


_NO_CHANGE = TableChange(0, (), ())


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The cache at one moment."""

    pages_used: int
    pages_cached: int
    pages_free: int
    page_size: int
    internal_fragmentation: float
    """Per cent of the used pages' room that holds no token."""
    prefix_queries: int
    """Tokens looked up in the prefix cache since the start."""
    prefix_hits: int
    """Tokens found there since the start."""


class CacheManager:
    """The page pool with the rules by which sequences share it."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool = True,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.pool = PagePool(num_pages, policy)
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._prefix_queries = 0
        self._prefix_hits = 0

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def hash_tokens(self, table: PageTable, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Bring a table's hashes up to its known tokens and return them."""
        return extend_hashes(table.hashes, token_ids, self.page_size, salt)

    def find_prefix(self, table: PageTable, token_ids: Sequence[int], salt: str) -> list[int]:
        """Return the published pages that a sequence starts with.

        At least one token is left out: its logits are needed to draw the next one.
        """
        if not self.enable_prefix_caching:
            return []
        pages: list[int] = []
        hashes = self.hash_tokens(table, token_ids, salt)
        for digest in hashes[: (len(token_ids) - 1) // self.page_size]:
            page = self.pool.lookup(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_prefix(self, queried: int, hit: int) -> None:
        """Add to the hit statistics, in tokens."""
        self._prefix_queries += queried
        self._prefix_hits += hit

    def num_available_with(self, pages: Iterable[int]) -> int:
        """Return the pages left to allocate once ``pages`` have been retained."""
        cached = sum(self.pool.references(page) == 0 for page in pages)
        return self.pool.num_available - cached

    def adopt(self, table: PageTable, pages: Sequence[int], *, published: bool) -> None:
        """Start an empty table with pages that exist already: a prefix hit or a fork."""
        for page in pages:
            self.pool.retain(page)
        table.pages.extend(pages)
        table.num_published = len(pages) if published else 0

    def extend(self, table: PageTable, start: int, end: int) -> TableChange | None:
        """Make room to write tokens ``start`` to ``end - 1``.

        Pages after the one of ``start`` must be the table's own: a table adopts no page
        beyond its computed tokens.

        Returns:
            what changed in the table, possibly nothing (no page ids); None when the pool
            has too few pages, and then nothing has changed.
        """
        first = start // self.page_size
        held = len(table.pages)
        copy = first < held and self._must_copy(table.pages[first])
        missing = max(0, self.pages_for(end) - held)
        if not (missing or copy):
            return _NO_CHANGE
        if missing + copy > self.pool.num_available:
            return None
        copies: tuple[tuple[int, int], ...] = ()
        if copy:
            source = table.pages[first]
            target = self.pool.allocate()
            self.pool.release(source)
            table.pages[first] = target
            table.num_published = min(table.num_published, first)
            copies = ((source, target),)
        table.pages.extend(self.pool.allocate() for _ in range(missing))
        index = first if copy else held
        return TableChange(index, tuple(table.pages[index:]), copies)

    def _must_copy(self, page: int) -> bool:
        return self.pool.references(page) > 1 or self.pool.is_published(page)

    def publish(
        self, table: PageTable, token_ids: Sequence[int], num_computed: int, salt: str
    ) -> None:
        """Let others find the pages that ``num_computed`` tokens fill."""
        full = num_computed // self.page_size
        if not self.enable_prefix_caching or full <= table.num_published:
            return
        hashes = self.hash_tokens(table, token_ids, salt)
        for index in range(table.num_published, full):
            self.pool.publish(table.pages[index], hashes[index])
        table.num_published = full

    def release(self, table: PageTable) -> None:
        """Drop all of a table's pages; the hashes stay, since the tokens do."""
        # The last page first: under LRU the start of a prefix then outlives its end.
        for page in reversed(table.pages):
            self.pool.release(page)
        table.pages.clear()
        table.num_published = 0

    def check(self, tables: Iterable[PageTable]) -> None:
        """Verify the books against every live table; see :meth:`PagePool.check`."""
        self.pool.check(table.pages for table in tables)

    def stats(self, tables: Iterable[tuple[PageTable, int]]) -> CacheStats:
        """Describe the cache; ``tables`` gives each live table with its computed tokens."""
        filled: dict[int, int] = {}
        for table, num_tokens in tables:
            for index, page in enumerate(table.pages):
                tokens = min(self.page_size, max(0, num_tokens - index * self.page_size))
                filled[page] = max(filled.get(page, 0), tokens)
        counts = self.pool.counts
        room = counts.used * self.page_size
        return CacheStats(
            pages_used=counts.used,
            pages_cached=counts.cached,
            pages_free=counts.free,
            page_size=self.page_size,
            internal_fragmentation=100.0 * (room - sum(filled.values())) / room if room else 0.0,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )
