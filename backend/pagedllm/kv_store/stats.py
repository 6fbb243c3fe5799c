"""What became of the pages that a store might have.

Owner: :mod:`pagedllm.kv_store`. Invariant: plain data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreStats:
    """A KV store at one moment."""

    lookups: int
    """Requests whose pages were asked for."""
    hits: int
    """Pages found, and written to the engine's."""
    stored: int
    """Pages put into the store."""
    down: bool
    """Whether requests go on without the store at this moment."""
