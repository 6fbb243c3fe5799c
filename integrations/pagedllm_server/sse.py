"""Answers that stream, and answers that stop when nobody waits for them any more.

Owner: the server integration. Invariants: a client that hangs up cancels what works for it
at once; a client that reads slowly suspends its own producer and nobody else's, and what
waits for it is bounded by the transport's buffer.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client hung up before its answer was there."""


def event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_client_waits(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it when the client hangs up.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def all_or_none(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await several at once; when one fails, or nobody waits, the others are of no use."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends what an async iterator yields, each piece at once."""

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.pieces = pieces
        self.close = close
        """Called at the end, whether or not the pieces were ever asked for."""
        self.status_code = 200
        self.background = None
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers(own | dict(headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        del scope
        task = asyncio.ensure_future(self._produce(send))
        gone = asyncio.ensure_future(_hang_up(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
            await self.close()

    async def _produce(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
