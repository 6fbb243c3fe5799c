"""A plugin's store for pages, with a check of what comes back.

Owner: :mod:`pagedllm.kv_store`. Invariant: what is returned is what was put, whole: anything
else counts as not there, and is warned of once.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING

from pagedllm.response_cache.store import BoundedStore, make_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.config import Config
    from pagedllm.hookspecs import KVStore

logger = logging.getLogger(__name__)

MAX_QUEUED = 128
"""Pages that wait to be stored; more are dropped. Each takes ``ModelInfo.bytes_per_page``."""
_DIGEST_BYTES = 16


def make_kv_store(config: Config) -> BoundedStore | None:
    """Make the store that the configuration names, if any. Raises ConfigError."""
    made = make_store(config, "kv_store", "pagedllm_kv_stores", "KV store")
    if made is None:
        return None
    store, name = made
    return BoundedStore(_Checked(store, name), name, "KV store", MAX_QUEUED)


class _Checked:
    """Puts a digest before each page, and looks for it; runs in the store's own thread."""

    def __init__(self, store: KVStore, name: str) -> None:
        self.timeout = store.timeout
        self._store = store
        self._name = name
        self._warned = False

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the pages that are there and whole."""
        found = self._store.get(keys)
        return [self._page(each) if isinstance(each, bytes) else each for each in found]

    def _page(self, stored: bytes) -> bytes | None:
        page = stored[_DIGEST_BYTES:]
        if blake2b(page, digest_size=_DIGEST_BYTES).digest() == stored[:_DIGEST_BYTES]:
            return page
        if not self._warned:
            self._warned = True
            logger.warning(
                "The KV store %r gave %d bytes that are not the page that was put there; "
                "it is computed, and so will others like it be",
                self._name,
                len(stored),
            )
        return None

    def put(self, key: str, page: bytes) -> None:
        """Keep a page."""
        self._store.put(key, blake2b(page, digest_size=_DIGEST_BYTES).digest() + page)

    def close(self) -> None:
        """Close the plugin's store."""
        self._store.close()
