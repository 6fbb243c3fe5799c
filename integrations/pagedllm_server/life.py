"""How an engine comes to be, and how long to wait before the next one.

Owner: the server integration. Invariant: an engine that keeps dying is made anew ever less
often, also when each one loads well.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

FIRST_BACK_OFF, LAST_BACK_OFF = 0.5, 30.0
"""Seconds between attempts to restart a failed engine."""
HEALTHY = 60.0
"""Seconds that an engine must have served for its end to count as the first."""


class BackOff:
    """The waits between attempts: twice the last one, until an engine has lived for long."""

    def __init__(self) -> None:
        self._next = FIRST_BACK_OFF

    def next(self, served: float) -> float:
        """Return the seconds to wait now, after an engine that served for ``served`` seconds."""
        delay = FIRST_BACK_OFF if served >= HEALTHY else self._next
        self._next = min(2 * delay, LAST_BACK_OFF)
        return delay


async def in_daemon(work: Callable[[], T]) -> T:
    """Run in a thread that does not keep the process from exiting, unlike ``to_thread``'s."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if result is not None:
            done.set_result(result)
        else:
            done.set_exception(error or RuntimeError("no engine"))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            failure = error
        loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="pagedllm-load", daemon=True).start()
    return await done
