"""A plugin's store behind a thread: calls take bounded time, and outages are noticed.

Owner: :mod:`pagedllm.response_cache`. Invariants: the store is called in one thread, which
is a daemon, so that one that hangs keeps nothing from ending; after the first call that fails
or is late no request waits for the store until a call in the background has succeeded.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedllm._named import make
from pagedllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedllm.config import Config
    from pagedllm.hookspecs import ResponseCache

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""From a failure to the next attempt."""
MAX_QUEUED = 256
"""Answers that wait to be stored; more are dropped."""
CLOSE_SECONDS = 2.0
"""For what still waits to be stored when the engine closes."""
_GET, _PUT, _CLOSE = 0, 1, 2


def make_store(
    config: Config, setting: str, hook: str, kind: str
) -> tuple[ResponseCache, str] | None:
    """Make the store that a setting names, if any, and return it with its name.

    Raises:
        ConfigError: it cannot be made, or is no such store.
    """
    named = getattr(config, setting)
    if named is None:
        return None
    store: Any = make(hook, setting, named, config, config)
    name = named if isinstance(named, str) else named["name"]
    timeout = getattr(store, "timeout", None)
    calls = [getattr(store, call, None) for call in ("get", "put", "close")]
    if not (isinstance(timeout, int | float) and timeout > 0 and all(map(callable, calls))):
        raise ConfigError(
            f"{setting}: '{name}' made {type(store).__name__}, which is no {kind}: it needs get, "
            "put and close, and a timeout in seconds",
            setting,
        )
    return store, name


class BoundedStore:
    """Calls a store and gives up on it in time.

    Args:
        store: what the plugin made.
        name: for messages.
        kind: of store, for messages.
        most: things that may wait to be stored; more are dropped.
    """

    def __init__(
        self,
        store: ResponseCache,
        name: str,
        kind: str = "response cache",
        most: int = MAX_QUEUED,
    ) -> None:
        self._store = store
        self._name = name
        self._kind = kind
        self._most = most
        self._timeout = store.timeout  # read once: a property may be slow
        # What a request waits for comes before what only has to be stored.
        self._work: queue.PriorityQueue[tuple[int, int, Callable[[], Any], Future[Any]]] = (
            queue.PriorityQueue()
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._down = False
        self._retry_at = 0.0
        self._unstored: dict[str, bytes] = {}
        """Answers on their way, so that who asks for one at once finds it."""
        self.num_stored = 0
        self._thread: threading.Thread | None = None

    @property
    def down(self) -> bool:
        """Whether requests go on without the store. Asking has it tried again when it is time."""
        with self._lock:
            due = self._down and time.monotonic() >= self._retry_at
            if due:
                self._retry_at = float("inf")  # until this attempt has ended
        if due:
            self._post(_GET, partial(self._fetch, ("probe",))).add_done_callback(self._probed)
        return self._down

    @property
    def room(self) -> int:
        """How many more things may be put now."""
        with self._lock:
            return 0 if self._down else self._most - len(self._unstored)

    def get(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return what is stored, and nothing when the store fails or takes too long."""
        with self._lock:
            found = {key: self._unstored.get(key) for key in keys}
        asked = [key for key, answer in found.items() if answer is None]
        if asked and not self._down:
            future = self._post(_GET, partial(self._fetch, asked))
            try:
                found |= zip(asked, future.result(self._timeout), strict=True)
            except Exception as error:  # noqa: BLE001 - any plugin's
                late = isinstance(error, TimeoutError) and not future.done()
                self._failed(f"no answer in {1000 * self._timeout:g} ms" if late else _line(error))
        return [found[key] for key in keys]

    def put(self, key: str, answer: bytes) -> None:
        """Store an answer some time soon, if possible."""
        with self._lock:
            if self._down or len(self._unstored) >= self._most:
                return
            self._unstored[key] = answer
        self._post(_PUT, partial(self._keep, key)).add_done_callback(self._kept)

    def close(self) -> None:
        """Store what waits for it, as far as there is time, and end the thread."""
        self._post(_CLOSE, self._store.close)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    # -- in the thread -------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            kind, _, call, future = self._work.get()
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - any plugin's
                future.set_exception(error)
            if kind == _CLOSE:
                return

    def _fetch(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = self._store.get(keys)
        if len(found) != len(keys) or not all(isinstance(each, bytes | None) for each in found):
            raise TypeError(f"get() returned {found!r:.80}, not bytes or None for each key")
        return found

    def _keep(self, key: str) -> None:
        answer = self._unstored.get(key)
        try:
            # It may have gone down while this waited, or been stored with another's of the key.
            if answer is None or self._down:
                return
            self._store.put(key, answer)
        finally:
            with self._lock:
                self._unstored.pop(key, None)
        self.num_stored += 1

    def _kept(self, future: Future[Any]) -> None:
        if error := future.exception():
            self._failed(_line(error))

    def _probed(self, future: Future[Any]) -> None:
        error = future.exception()
        with self._lock:
            self._down = error is not None
            self._retry_at = time.monotonic() + RETRY_SECONDS
        if error is None:
            logger.info("The %s %r answers again", self._kind, self._name)

    # ------------------------------------------------------------------------------

    def _post(self, kind: int, call: Callable[[], Any]) -> Future[Any]:
        with self._lock:
            if self._thread is None:  # not before it is needed: an engine may fail to start
                name = f"pagedllm-{self._kind.lower().replace(' ', '-')}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
        future: Future[Any] = Future()
        self._work.put((kind, next(self._numbers), call, future))
        return future

    def _failed(self, reason: str) -> None:
        with self._lock:
            if self._down:
                return
            self._down = True
            self._retry_at = time.monotonic() + RETRY_SECONDS
        logger.warning(
            "The %s %r is not used for now (%s); requests are computed, and it is "
            "tried again every %g s",
            self._kind,
            self._name,
            reason,
            RETRY_SECONDS,
        )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
