"""Which cached page goes first when a new one is needed.

Owner: :class:`~pagedllm.cache.pages.PagePool`. Invariant: a policy holds exactly the pages
that are published and referenced by nobody; every operation is O(1).
"""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """An ordered set of evictable page ids."""

    def add(self, page: int) -> None:
        """A page lost its last reference and may be evicted from now on."""
        ...

    def remove(self, page: int) -> None:
        """A page is wanted again. Raises KeyError when it is not held."""
        ...

    def pop(self) -> int:
        """Choose a page, stop holding it and return it. Raises KeyError when empty."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, page: int) -> bool: ...


class LRUEviction:
    """The page that has been unreferenced for longest goes first."""

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: dict[int, None] = {}  # dicts keep insertion order

    def add(self, page: int) -> None:
        """Hold a page as the most recently used."""
        self._pages[page] = None

    def remove(self, page: int) -> None:
        """Stop holding a page."""
        del self._pages[page]

    def pop(self) -> int:
        """Return the least recently used page and stop holding it."""
        try:
            page = next(iter(self._pages))
        except StopIteration:
            raise KeyError("no page can be evicted") from None
        del self._pages[page]
        return page

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages
