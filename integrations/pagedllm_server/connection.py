"""Clients that take their time: bounds on what one connection holds, and for how long.

Owner: the server integration; a subclass of uvicorn's protocol, whichever of its two parsers is
installed. Invariants: a request that is not wholly there in time ends, and so does an answer of
which a client takes nothing for as long; one that takes little, but steadily, is never cut, and
neither is one that waits for its answer, or idles between two requests (uvicorn's own time-out
is for that). Only ticks of this process count: when it is busy, its clients are not late.
"""

from __future__ import annotations

import http
import json
import logging
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pagedllm_server.errors import ApiError, headers_too_large, overloaded

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:
    _Protocol = object  # a mixin: the two classes below have one of uvicorn's beside it

logger = logging.getLogger(__name__)

MOST_HEAD = 64 * 1024
"""Bytes of a request's line and headers, or of what else is not its body."""
MOST_IGNORED = 16 * 1024 * 1024
"""Bytes read and dropped of a client that is still sending what was refused."""
MOST_DESCRIPTORS = 65_536
SPARE_DESCRIPTORS = 64
"""Left for files, the engine's process and connections whose TLS has just begun."""
PARTS = 4
"""Looks at a connection in the time that its client is given."""
_DROP = struct.pack("ii", 1, 0)
"""Of ``SO_LINGER``: what is unsent is forgotten."""
_BYTES_ACKED = 120
"""Where Linux's ``struct tcp_info`` has the bytes that the other side has taken."""


def room_for_connections() -> int:
    """Raise the limit on open files as far as is sensible; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:  # a sandbox's rule; what there is must do
            logger.warning("the limit on open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        soft = MOST_DESCRIPTORS
    folder = Path("/proc/self/fd")
    used = len(list(folder.iterdir())) if folder.exists() else 32
    return max(1, soft - used - SPARE_DESCRIPTORS)


def protocol_class(
    seconds: float, most: int, parser: Literal["auto", "h11", "httptools"] = "auto"
) -> type[asyncio.Protocol]:
    """Return what :class:`uvicorn.Config` takes as ``http``.

    Args:
        seconds: what a client is given for a request, and to take any of its answer.
        most: connections at a time; more are told to come back later.
        parser: httptools, or h11 where that is not installed.
    """
    if parser == "auto":
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        parser = "h11" if AutoHTTPProtocol.__name__ == "H11Protocol" else "httptools"
    made: type[Watched]
    if parser == "h11":
        from pagedllm_server.connection_h11 import WithH11

        made = WithH11
    else:
        from pagedllm_server.connection_httptools import WithHttptools

        made = WithHttptools
    return type("Connection", (made,), {"seconds": seconds, "most": most})


class Watched(_Protocol):
    """What both have in common."""

    seconds: float
    most: int

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waited: int | None = 0
        """Ticks for which a request has not been whole; None while none is awaited."""
        self._stuck = 0
        self._taken: int | None = None
        self._ignored: int | None = None
        """Bytes dropped since the client was refused; None before."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._answer(overloaded("there are too many connections; try again later", 5))
            transport.close()
        self._timer = self.loop.call_later(self.seconds / PARTS, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests whose client is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._disconnect()  # uvicorn tells the last one alone, which may wait behind others
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, unless the client was refused."""
        if self._ignored is not None:
            self._ignored += len(data)
            if self._ignored > MOST_IGNORED:
                self.transport.abort()
            return
        if self._waited is None:
            self._waited = 0
        self._read(data)

    def _read(self, data: bytes) -> None:
        """Parse, and set ``_waited`` to None when a request is whole."""
        raise NotImplementedError

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: HTTP lets a server go on as if it had not been asked."""

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is uvicorn's; headers without an end are not."""
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._refuse(headers_too_large(MOST_HEAD))
        elif self._answering():
            self.transport.close()  # in the middle of an answer another would be part of it
        else:
            super().send_400_response(msg)

    def _unfinished(self) -> Sequence[Any]:
        """Requests whose answer is not complete, and may not have begun."""
        return [self.cycle] if self.cycle is not None and not self.cycle.response_complete else []

    def _answering(self) -> bool:
        return any(cycle.response_started for cycle in self._unfinished())

    def _disconnect(self) -> None:
        """Tell every request that its client is gone."""
        for cycle in self._unfinished():
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse(self, error: ApiError) -> None:
        """Answer, and read on a while: closing with bytes unread would destroy the answer."""
        if not self._answering():
            self._answer(error)
        self._disconnect()
        self._unset_keepalive_if_required()
        self._ignored, self._waited = 0, 0
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _answer(self, error: ApiError) -> None:
        body = json.dumps(error.body(self._path())).encode()
        headers = error.headers | {"Connection": "close"}
        lines = [
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)

    def _path(self) -> str:
        """The path of the request whose headers are being read, as far as it is known."""
        return ""

    # -- time ----------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self.loop.call_later(self.seconds / PARTS, self._tick)
        if self._waited is not None and self._its_turn():
            self._waited += 1
            if self._waited > PARTS:
                self._late()
        if not self.transport.get_write_buffer_size():
            self._stuck, self._taken = 0, None
            return
        taken = _taken(self.transport)
        self._stuck = self._stuck + 1 if taken == self._taken else 0
        self._taken = taken
        if self._stuck >= PARTS:
            logger.info("a client that took nothing for %g s was hung up on", self.seconds)
            connection = self.transport.get_extra_info("socket")
            if connection is not None:  # or else the kernel would keep trying, with all it holds
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
            self.transport.abort()

    def _its_turn(self) -> bool:
        """Whether it is the client that something is awaited of."""
        if self._ignored is not None:
            return True
        cycle = self.cycle
        answered = cycle is None or cycle.response_complete or cycle.more_body
        return answered and not self.flow.read_paused

    def _late(self) -> None:
        cycle = self.cycle
        if self._ignored is not None:
            self.transport.abort()
        elif cycle is None or cycle.response_started or cycle.disconnected or is_late(cycle.scope):
            self.transport.close()
        else:
            cycle.scope["state"][_LATE] = True
            cycle.message_event.set()  # whoever reads the body sees it; see is_late
            self._waited = 0


_LATE = "pagedllm_late"


def is_late(scope: Any) -> bool:
    """Whether a request's body is not there in the time that its client is given."""
    return bool(scope.get("state", {}).get(_LATE))


def _taken(transport: asyncio.BaseTransport) -> int:
    """Something that changes when the client takes a part of its answer.

    The transport's buffer alone would not do: the kernel takes from it in lumps, which may be
    hundreds of kilobytes apart.
    """
    connection = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None:
        try:
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
            return int(struct.unpack_from("=Q", found, _BYTES_ACKED)[0])
        except (OSError, struct.error):
            pass
    buffered: int = transport.get_write_buffer_size()  # type: ignore[attr-defined]
    return buffered
