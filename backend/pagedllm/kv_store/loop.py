"""An engine's loop that asks a store for a prompt's pages before it queues the request.

Owner: the facade. Invariants: a request is in exactly one place, waiting here or in the
engine, so an abort always finds it; neither the caller's thread nor the engine's waits for
the store; a request overtakes no other one that is looked up.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from pagedllm.cache.prefix import extend_hashes
from pagedllm.engine.engine import Engine
from pagedllm.engine.loop import EngineLoop
from pagedllm.errors import ConfigError, EngineError, PagedLLMError
from pagedllm.kv_store.stats import KVStoreStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedllm.config import Config
    from pagedllm.engine.requests import RequestState
    from pagedllm.executors.base import Executor
    from pagedllm.hookspecs import ResolvedModel
    from pagedllm.kv_store.pages import PageExchange
    from pagedllm.response_cache.store import BoundedStore
    from pagedllm.types import Request

logger = logging.getLogger(__name__)

_Wanted = tuple["RequestState", int]
"""A request whose pages may be known, and what it may generate."""

MAX_PAGES = 256
"""Pages that are asked for at once, for all requests that came together."""


class StoringLoop(EngineLoop):
    """Starts an engine beside a KV store; see :class:`EngineLoop`.

    Args:
        config: a resolved config.
        executor: not yet started; it must give access to its pages.
        store: of :func:`~pagedllm.kv_store.store.make_kv_store`.
        resolved: the model.

    Raises:
        ConfigError: this engine's pages cannot be exchanged.
        whatever starting the executor raises.
    """

    def __init__(
        self, config: Config, executor: Executor, store: BoundedStore, resolved: ResolvedModel
    ) -> None:
        self._store = store
        self._waiting: dict[str, _Wanted] = {}
        # Held while a request goes from here to the engine, so that an abort comes after it.
        # Re-entrant, since a stream that is collected meanwhile aborts its request.
        self._lock = threading.RLock()
        self._work: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._num_lookups = 0
        self._lookup = threading.Thread(target=self._serve, name="pagedllm-kv-lookup", daemon=True)
        self._lookup.start()
        super().__init__(config, executor)
        try:
            self._pages = self._attach(config, executor, resolved)
        except BaseException:
            self.close()
            raise

    def _attach(self, config: Config, executor: Executor, resolved: ResolvedModel) -> PageExchange:
        from pagedllm.kv_store.pages import PageExchange, identity_of

        layers: Any = getattr(executor, "layers", None)
        if layers is None or not config.enable_prefix_caching:
            raise ConfigError(
                f"kv_store: needs enable_prefix_caching and an executor that gives access to its "
                f"pages, unlike '{config.executor}'; leave it out",
                "kv_store",
            )
        identity = identity_of(config, resolved, self.info, layers)
        pool = self.call(lambda engine: engine.scheduler.cache.pool)
        return PageExchange(pool, layers, self._store, identity, self.post)

    def add(self, state: RequestState, max_tokens: int) -> None:
        """Queue a request, once its pages have been looked for. Raises as the engine's ``add``."""
        request, wanted = state.request, (state, max_tokens)
        with self._lock:
            if self.closed or self._store.down or not self._is_looked_up(request):
                super().add(*wanted)
                return
            if request.request_id in self._waiting:
                raise EngineError(f"request id {request.request_id!r} is in use; give each its own")
            self._waiting[request.request_id] = wanted
            self._work.put(wanted)

    def _is_looked_up(self, request: Request) -> bool:
        """Whether the scheduler would look for this prompt's prefix, and it fills a page."""
        whole = request.params.prompt_logprobs is not None or request.pooling == "mean"
        return not whole and len(request.prompt_token_ids) > self.info.page_size

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is."""
        with self._lock:
            wanted = self._waiting.get(request_id)
            if wanted is not None:
                self._pass_on(wanted, [])
            super().abort(request_id)

    def call(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function in the engine's thread; its statistics have the store's, too."""
        found = super().call(function)
        if function is not Engine.stats:
            return found
        mine = KVStoreStats(
            lookups=self._num_lookups,
            hits=self._pages.num_loaded,
            stored=self._store.num_stored,
            down=self._store.down,
        )
        return dataclasses.replace(found, kv_store=mine)

    def close(self) -> None:
        """Close the engine, then store what waits for it. Idempotent."""
        super().close()
        with self._lock:
            self._work.put(None)
        if threading.current_thread() is not self._lookup:
            self._lookup.join()
        self._store.close()
        vars(self).pop("_pages", None)  # the pages' memory is free, too

    # -- in the thread -------------------------------------------------------------

    def _serve(self) -> None:
        over = False
        while not over:
            items = [self._work.get()]
            while not self._work.empty():  # this thread alone takes from it
                items.append(self._work.get())
            wanted = [item for item in items if item is not None]
            try:
                self._look_up(wanted)
            except Exception:
                # Not the store's fault, which it keeps to itself: no request may hang for it.
                logger.exception("The KV store failed; its requests are computed")
                for each in wanted:
                    self._pass_on(each, [])
            over = None in items

    def _look_up(self, wanted: list[_Wanted]) -> None:
        """Ask for the pages of all that came together at once, and pass them on in order."""
        pool, keys = self._pages.pool, self._pages.key
        prefixes = [self._hashes(each[0].request) for each in wanted]
        # Another thread's pool: a page may come or go meanwhile, and the engine looks again.
        missing = {d: None for hashes in prefixes for d in hashes if pool.lookup(d) is None}
        asked = list(missing)[:MAX_PAGES]
        self._num_lookups += len(wanted) if asked else 0
        found = dict(zip(asked, self._store.get([keys(digest) for digest in asked]), strict=True))
        for each, hashes in zip(wanted, prefixes, strict=True):
            there = takewhile(lambda d: d not in missing or found.get(d) is not None, hashes)
            self._pass_on(each, [(digest, found.get(digest)) for digest in there])

    def _hashes(self, request: Request) -> list[bytes]:
        """Hashes of the full pages before the last token, whose logits are always computed."""
        tokens = request.prompt_token_ids[:-1]
        return extend_hashes([], tokens, self.info.page_size, request.cache_salt)

    def _pass_on(self, wanted: _Wanted, pages: list[tuple[bytes, bytes | None]]) -> None:
        """Give the engine a request behind its pages, unless it was aborted and has it."""
        state, max_tokens = wanted
        with self._lock:
            if self._waiting.get(state.request.request_id) is not wanted:
                return
            del self._waiting[state.request.request_id]
            if any(content is not None for _, content in pages):
                self.post(partial(self._pages.load, state=state, wanted=pages))
            try:
                super().add(state, max_tokens)
            except PagedLLMError as error:
                state.error = error
                state.finished_time = time.monotonic()
                state.listener(state)
