"""Iterators over a request's growing output, for plain code and for asyncio.

Owner: the consumer that iterates. Invariants: an iterator waits for changes and then takes
a snapshot, so changes that came faster than it reads arrive together and nothing queues
up; whoever stops reading before the end aborts the request.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from pagedllm.engine.requests import Cursor
from pagedllm.errors import RequestAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Protocol, Self

    from pagedllm.engine.requests import RequestState
    from pagedllm.outputs import RequestOutput

    Listener = Callable[[RequestState], None]
    Submit = Callable[[Listener], RequestState]

    class Entry(Protocol):
        """Where the request was submitted."""

        def abort(self, request_id: str) -> None:  # noqa: D102 - as EngineLoop's
            ...


class _Stream:
    """What both iterators share."""

    def __init__(self, entry: Entry, submit: Submit, listener: Listener) -> None:
        self._entry = entry
        # Bound to the facade: an engine lives as long as somebody reads from it.
        self._submit = submit
        self._state = submit(listener)
        self._cursor = Cursor()
        self._over = False

    @property
    def request_id(self) -> str:
        """The id to abort it by."""
        return self._state.request.request_id

    def _take(self) -> RequestOutput:
        """Return what is new; the last output ends the iteration, an error is raised."""
        output = self._state.snapshot(self._cursor)
        self._over = output.finished
        if output.error is not None and not isinstance(output.error, RequestAbortedError):
            raise output.error
        return output

    def _stop(self) -> None:
        if not self._over:
            self._over = True
            self._entry.abort(self.request_id)

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._stop()


class OutputStream(_Stream):
    """Iterates over snapshots of one request's output."""

    def __init__(self, entry: Entry, submit: Submit) -> None:
        changed = threading.Event()
        super().__init__(entry, submit, lambda _: changed.set())
        self._changed = changed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        """Wait for a change. Raises EngineError when the request failed."""
        if self._over:
            raise StopIteration
        self._changed.wait()
        self._changed.clear()
        return self._take()

    def close(self) -> None:
        """Abort the request, unless it has ended."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Waker:
    """Wakes the streams of one event loop, those of a step together.

    Calling into another thread's event loop costs more than all else that a token's way to
    its reader does in the engine's thread, so it is done once for all who are due.
    """

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        # Weakly: whoever keeps this by event loop must not keep the loop alive through it.
        self._events = weakref.ref(events)
        self._due: deque[_Signal] = deque()
        self._called = False

    def wake(self, signal: _Signal) -> None:
        """Set a signal soon; any thread may call it."""
        if signal.pending:
            return  # one at a time: a loop that is slow to run is not flooded with them
        signal.pending = True
        self._due.append(signal)
        if not self._called:
            self._called = True
            events = self._events()
            try:
                if events is not None:
                    events.call_soon_threadsafe(self._run)
            except RuntimeError:  # the event loop is closed, and nobody reads any more
                self._called = False

    def _run(self) -> None:
        # First this, then the queue: what is put in after it is empty calls again.
        self._called = False
        while self._due:
            signal = self._due.popleft()
            signal.pending = False
            signal.changed.set()


class _Signal:
    """Whether there is something new for one stream."""

    __slots__ = ("changed", "pending")

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.pending = False


class AsyncOutputStream(_Stream):
    """Iterates over snapshots of one request's output, in the running event loop."""

    def __init__(self, entry: Entry, submit: Submit, waker: Waker) -> None:
        signal = _Signal()
        super().__init__(entry, submit, lambda _: waker.wake(signal))
        self._changed = signal.changed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for a change. Raises EngineError when the request failed."""
        if self._over:
            raise StopAsyncIteration
        try:
            await self._changed.wait()
        except BaseException:  # cancelled: nobody waits for the rest
            self._stop()
            raise
        self._changed.clear()
        return self._take()

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        self._stop()
