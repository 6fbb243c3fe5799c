"""The pool of pages: references, published contents, eviction.

Owner: :class:`~pagedllm.cache.manager.CacheManager`. Invariants: a page is in exactly one
of three states,

* free: no references, no contents worth keeping,
* cached: no references, but published under a hash, so that it can be found again,
* used: one reference or more,

and :meth:`PagePool.check` verifies it. Every operation on a page is O(1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedllm.cache.eviction import LRUEviction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagedllm.cache.eviction import EvictionPolicy


class CacheIntegrityError(RuntimeError):
    """The pool's books do not add up: a bug in pagedllm, never a user's mistake."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state."""

    used: int
    cached: int
    free: int


class PagePool:
    """Hands out page ids 0 to ``num_pages - 1``."""

    __slots__ = ("_by_hash", "_free", "_hash_of", "_policy", "_references", "listener", "num_pages")

    def __init__(self, num_pages: int, policy: EvictionPolicy | None = None) -> None:
        self.num_pages = num_pages
        self._policy: EvictionPolicy = LRUEviction() if policy is None else policy
        # A stack: a page that was just freed is likely still in the processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._by_hash: dict[bytes, int] = {}
        # Called with each page that becomes findable, and its hash; it may not change the pool.
        self.listener: Callable[[int, bytes], None] | None = None

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._policy)

    @property
    def counts(self) -> PageCounts:
        """Pages by state."""
        free, cached = len(self._free), len(self._policy)
        return PageCounts(used=self.num_pages - free - cached, cached=cached, free=free)

    def states(self) -> bytes:
        """Per page: 0 free, 1 cached, 2 used by one sequence, 3 by several."""
        kept = zip(self._references, self._hash_of, strict=True)
        return bytes(min(3, 1 + count) if count else digest is not None for count, digest in kept)

    def references(self, page: int) -> int:
        """Return how many sequences hold a page."""
        return self._references[page]

    def is_published(self, page: int) -> bool:
        """Whether others may find the page by its contents, which must not change then."""
        return self._hash_of[page] is not None

    def allocate(self) -> int:
        """Return a page with one reference, evicting a cached one when none is free.

        Raises:
            KeyError: every page is used; callers look at ``num_available`` first.
        """
        if self._free:
            page = self._free.pop()
        else:
            page = self._evict()
        self._references[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a reference to a used or cached page."""
        if self._references[page] == 0:
            self._policy.remove(page)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Drop a reference; the last one makes the page cached or free."""
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._hash_of[page] is None:
                self._free.append(page)
            else:
                self._policy.add(page)

    def publish(self, page: int, digest: bytes) -> None:
        """Make a used page findable by its contents; the first of two equal pages stays."""
        if digest not in self._by_hash and self._hash_of[page] is None:
            self._by_hash[digest] = page
            self._hash_of[page] = digest
            if self.listener is not None:
                self.listener(page, digest)

    def lookup(self, digest: bytes) -> int | None:
        """Return the page that holds these contents, or None."""
        return self._by_hash.get(digest)

    def forget_cached(self) -> int:
        """Turn every cached page into a free one; return how many there were."""
        count = len(self._policy)
        for _ in range(count):
            self._free.append(self._evict())
        return count

    def _evict(self) -> int:
        page = self._policy.pop()
        digest = self._hash_of[page]
        if digest is not None:
            del self._by_hash[digest]
        self._hash_of[page] = None
        return page

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Verify the pool against the page tables that hold references.

        Raises:
            CacheIntegrityError: a page is lost, doubly owned or wrongly counted.
        """
        held = Counter(page for table in tables for page in table)
        free = set(self._free)
        if len(free) != len(self._free):
            raise CacheIntegrityError("a page is free twice")
        for page in range(self.num_pages):
            count, cached = self._references[page], page in self._policy
            if count != held.get(page, 0):
                raise CacheIntegrityError(
                    f"page {page} counts {count} references, but {held.get(page, 0)} tables hold it"
                )
            if (page in free) + cached + (count > 0) != 1:
                raise CacheIntegrityError(f"page {page} is not in exactly one state")
            if cached and self._hash_of[page] is None:
                raise CacheIntegrityError(f"page {page} is cached without a hash")
        for digest, page in self._by_hash.items():
            if self._hash_of[page] != digest:
                raise CacheIntegrityError(f"page {page} is published under another hash")
        if len(self._by_hash) != sum(digest is not None for digest in self._hash_of):
            raise CacheIntegrityError("a published page cannot be found")
