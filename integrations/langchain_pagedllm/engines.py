"""One engine for equal configurations, loaded at first use, closed with its last user.

Owner: the LangChain integration. Invariants: an engine lives exactly as long as a handle that
has used it and is neither closed nor collected; of threads that use one for the first time
together, one loads it and the others wait.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedllm import EngineClosedError

if TYPE_CHECKING:
    from pagedllm import LLM, AsyncLLM, Config


@dataclass(slots=True, eq=False)
class _Shared:
    """An engine and how many handles use it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it loads."""
    users: int = 0
    llm: LLM | None = None


class Engines:
    """The engines of this process, by configuration."""

    def __init__(self) -> None:
        self._shared: dict[Config, _Shared] = {}
        # A collected handle releases its engine in whichever thread the collector runs.
        self._lock = threading.RLock()

    def acquire(self, config: Config) -> LLM:
        """Return the engine of a configuration, loading it if there is none."""
        with self._lock:
            shared = self._shared.setdefault(config, _Shared())
            shared.users += 1
        try:
            with shared.lock:
                if shared.llm is None or shared.llm.closed:
                    from pagedllm import LLM

                    shared.llm = LLM(config)
                return shared.llm
        except BaseException:
            self.release(config)
            raise

    def release(self, config: Config) -> None:
        """Give up an engine; the last to do so closes it."""
        with self._lock:
            shared = self._shared[config]
            shared.users -= 1
            if shared.users:
                return
            del self._shared[config]
        if shared.llm is not None:
            shared.llm.close()


@functools.lru_cache(maxsize=1)
def engines() -> Engines:
    """The process's own."""
    return Engines()


class Handle:
    """What one model object holds of its engine. Copies of the object share it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._llm: LLM | None = None
        self._async: AsyncLLM | None = None
        self._finalizer: Any = None
        self._closed = False

    @property
    def llm(self) -> LLM:
        """The engine, loaded on the first call.

        Raises:
            EngineClosedError: ``close`` was called.
            PagedLLMError: the model cannot be loaded.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("this model object is closed; make a new one")
            if self._llm is None:
                self._llm = engines().acquire(self.config)
                self._finalizer = weakref.finalize(self, engines().release, self.config)
            return self._llm

    @property
    def async_llm(self) -> AsyncLLM:
        """The same engine for asyncio."""
        llm = self.llm
        if self._async is None:
            self._async = llm.as_async()
        return self._async

    def close(self) -> None:
        """Give up the engine. Idempotent."""
        with self._lock:
            self._closed = True
            self._llm = self._async = None
            if self._finalizer is not None:
                self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy elsewhere, or a deep one, finds its engine anew."""
        return Handle, (self.config,)
