"""What the engine counts, and the line it logs now and then.

Owner: the engine's thread. Invariant: counters only grow; :class:`EngineStats` is a frozen
picture of one moment.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagedllm.cache.manager import CacheStats
    from pagedllm.kv_store.stats import KVStoreStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Histogram:
    """How often a value fell into each of some ranges."""

    bounds: tuple[float, ...]
    """Upper ends of the ranges, ascending; values above the last are counted too."""
    counts: list[int] = field(default_factory=list)
    """One longer than ``bounds``."""
    total: float = 0.0
    """Sum of the values."""

    def __post_init__(self) -> None:
        """Start at zero."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """Return one that no longer changes."""
        return Histogram(self.bounds, list(self.counts), self.total)


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_POWERS = tuple(float(2**power) for power in range(14))


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    requests: int = 0
    prompt_tokens: int = 0
    """Of the requests that arrived."""
    computed_tokens: int = 0
    """Tokens that went through the model, recomputed ones included."""
    generated_tokens: int = 0
    steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    step_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    step_rows: Histogram = field(default_factory=lambda: Histogram(_POWERS))
    """Sequences in a step."""
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_POWERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCacheStats:
    """What became of the requests that a response cache might know."""

    lookups: int
    hits: int
    stored: int
    """Answers put into the store."""
    down: bool
    """Whether requests go on without the store at this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one moment."""

    running: int
    """Sequences in the batch."""
    waiting: int
    """Sequences that wait for a place in it."""
    preemptions: int
    requests: int
    finished: Mapping[str, int]
    """Requests that ended, by finish reason."""
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    steps: int
    step_seconds: Histogram
    """From one step's submission to its results' being handed out."""
    step_rows: Histogram
    step_tokens: Histogram
    cache: CacheStats
    response_cache: ResponseCacheStats | None = None
    """None without ``Config.response_cache``. Its hits are in none of the other counters."""
    kv_store: KVStoreStats | None = None
    """None without ``Config.kv_store``. Its pages count as hits of the prefix cache, too."""

    @classmethod
    def of(
        cls, counters: Counters, cache: CacheStats, *, running: int, waiting: int, preemptions: int
    ) -> EngineStats:
        """Freeze the counters."""
        return cls(
            running=running,
            waiting=waiting,
            preemptions=preemptions,
            requests=counters.requests,
            finished=dict(counters.finished),
            prompt_tokens=counters.prompt_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            steps=counters.steps,
            step_seconds=counters.step_seconds.copy(),
            step_rows=counters.step_rows.copy(),
            step_tokens=counters.step_tokens.copy(),
            cache=cache,
        )


class StatsLogger:
    """Logs one line every ``interval`` seconds of work."""

    def __init__(self, interval: float = 10.0) -> None:
        self._interval = interval
        self._time = time.monotonic()
        self._last: EngineStats | None = None

    @property
    def is_due(self) -> bool:
        """Whether the interval has passed."""
        return time.monotonic() - self._time >= self._interval

    def log(self, stats: EngineStats) -> None:
        """Log the rates since the last line."""
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        computed, generated = stats.computed_tokens, stats.generated_tokens
        if self._last is not None:
            computed -= self._last.computed_tokens
            generated -= self._last.generated_tokens
        self._last = stats
        cache = stats.cache
        pages = cache.pages_used + cache.pages_cached + cache.pages_free
        logger.info(
            "%.1f tok/s computed, %.1f tok/s generated; %d running, %d waiting; "
            "pages %.1f%% used, %.1f%% cached, fragmentation %.1f%%; prefix hits %.1f%%",
            computed / seconds,
            generated / seconds,
            stats.running,
            stats.waiting,
            100 * cache.pages_used / pages,
            100 * cache.pages_cached / pages,
            cache.internal_fragmentation,
            100 * cache.prefix_hits / cache.prefix_queries if cache.prefix_queries else 0.0,
        )
