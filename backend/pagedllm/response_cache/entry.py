"""Between a client and its engine: answers what is known, and remembers what is new.

Owner: :mod:`pagedllm.response_cache`. Invariants: a request is in exactly one place, waiting
here or in the engine, so an abort always finds it; the thread that looks up holds no reference
to the client.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pagedllm.engine.engine import Engine
from pagedllm.errors import EngineError, PagedLLMError
from pagedllm.metrics import ResponseCacheStats
from pagedllm.response_cache.keys import is_cacheable, request_key
from pagedllm.response_cache.replay import Replay, pack, unpack
from pagedllm.response_cache.store import BoundedStore, make_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedllm.config import Config
    from pagedllm.engine.loop import EngineLoop
    from pagedllm.engine.remote import RemoteLoop
    from pagedllm.engine.requests import RequestState

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A request that may be known."""

    state: RequestState
    max_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Finished:
    """A request whose answer is worth keeping."""

    state: RequestState
    key: str


def make_response_cache(config: Config) -> BoundedStore | None:
    """Make the store that the configuration names, if any. Raises ConfigError."""
    made = make_store(config, "response_cache", "pagedllm_response_caches", "response cache")
    return None if made is None else BoundedStore(*made)


class ResponseCaching:
    """Takes requests in an engine's place and passes on those that it cannot answer.

    Args:
        loop: the engine.
        store: of :func:`make_response_cache`.
        identity: of :func:`~pagedllm.response_cache.keys.engine_identity`.
    """

    def __init__(self, loop: EngineLoop | RemoteLoop, store: BoundedStore, identity: bytes) -> None:
        self._loop = loop
        self._store = store
        self._identity = identity
        self._waiting: dict[str, _Wanted] = {}
        # Held while a request goes from here to the engine, so that an abort comes after it.
        # Re-entrant, since a stream that is collected meanwhile aborts its request.
        self._lock = threading.RLock()
        self._over = False
        self._work: queue.SimpleQueue[_Wanted | _Finished | None] = queue.SimpleQueue()
        self._num_lookups = 0
        self._num_hits = 0
        self._thread = threading.Thread(
            target=self._serve, name="pagedllm-response-lookup", daemon=True
        )
        self._thread.start()

    def add(self, state: RequestState, max_tokens: int) -> None:
        """Answer a request soon, or have the engine do it. Raises as the engine's ``add``."""
        request_id = state.request.request_id
        if not is_cacheable(state.request) or self._store.down:
            self._loop.add(state, max_tokens)
            return
        wanted = _Wanted(state, max_tokens)
        with self._lock:
            if self._over or self._loop.closed:
                self._loop.add(state, max_tokens)
                return
            if request_id in self._waiting:
                raise EngineError(f"request id {request_id!r} is in use; give each its own")
            self._waiting[request_id] = wanted
            self._work.put(wanted)

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is."""
        with self._lock:
            wanted = self._waiting.pop(request_id, None)
            if wanted is not None:
                self._run(wanted, None)
            self._loop.abort(request_id)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function in the engine's thread; its statistics have the cache's, too."""
        found: Any = self._loop.call(function)
        if function is Engine.stats:
            mine = ResponseCacheStats(
                lookups=self._num_lookups,
                hits=self._num_hits,
                stored=self._store.num_stored,
                down=self._store.down,
            )
            found = dataclasses.replace(found, response_cache=mine)
        return cast("T", found)

    def close(self) -> None:
        """Close the engine, then store what it has finished. Idempotent."""
        self._loop.close()
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self._work.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._store.close()

    # -- in the thread -------------------------------------------------------------

    def _serve(self) -> None:
        over = False
        while not over:
            items = [self._work.get()]
            while not self._work.empty():  # this thread alone takes from it
                items.append(self._work.get())
            for item in items:
                if isinstance(item, _Finished) and not self._store.down:
                    self._keep(item)
            wanted = [item for item in items if isinstance(item, _Wanted)]
            try:
                self._look_up(wanted)
            except Exception:
                # Not the store's fault, which it keeps to itself: no request may hang for it.
                logger.exception("The response cache failed; its requests are computed")
                self._pass_on(wanted)
            over = None in items

    def _keep(self, item: _Finished) -> None:
        try:
            self._store.put(item.key, pack(item.state.snapshot()))
        except Exception:
            logger.exception("An answer cannot be written down for the response cache")

    def _pass_on(self, wanted: list[_Wanted]) -> None:
        for each in wanted:
            with self._lock:
                if self._is_waiting(each):
                    self._run(each, None)

    def _is_waiting(self, wanted: _Wanted) -> bool:
        """Take a request from those that wait, if it is still there; its id may have another."""
        request_id = wanted.state.request.request_id
        if self._waiting.get(request_id) is not wanted:
            return False
        del self._waiting[request_id]
        return True

    def _look_up(self, wanted: list[_Wanted]) -> None:
        """Ask for all that came together at once, and pass on what is not there."""
        if not wanted:
            return
        keys = [request_key(self._identity, w.state.request, w.max_tokens) for w in wanted]
        found = self._store.get(keys)
        self._num_lookups += len(keys)
        for each, key, stored in zip(wanted, keys, found, strict=True):
            replay = None if stored is None else _replay(stored, each.state)
            with self._lock:
                if not self._is_waiting(each):
                    continue  # aborted, and in the engine by now
                if replay is None:
                    self._run(each, key)
                    continue
            self._num_hits += 1
            each.state.replay = replay.snapshot
            each.state.finished_time = time.monotonic()
            each.state.listener(each.state)

    def _run(self, wanted: _Wanted, key: str | None) -> None:
        """Pass a request on; with a key, remember its answer."""
        state = wanted.state
        listener = state.listener
        if key is not None:
            state.listener = _remembering(listener, key, self._work)
        try:
            self._loop.add(state, wanted.max_tokens)
        except PagedLLMError as error:
            state.error = error
            state.finished_time = time.monotonic()
            listener(state)


def _remembering(
    listener: Callable[[RequestState], None],
    key: str,
    work: queue.SimpleQueue[_Wanted | _Finished | None],
) -> Callable[[RequestState], None]:
    def changed(state: RequestState) -> None:
        if state.finished and state.error is None:
            work.put(_Finished(state, key))
        listener(state)

    return changed


def _replay(stored: bytes, state: RequestState) -> Replay | None:
    try:
        return Replay(unpack(stored, state))
    except Exception as error:  # noqa: BLE001 - whatever was stored under the key
        logger.debug("An entry of the response cache cannot be read: %s", error)
        return None
