"""A connection whose requests httptools parses.

Owner: the server integration; see connection.py. Invariants: between two things that the parser
has to tell it keeps no more than a bound; what is there of a request is served in HTTP/1.1,
whatever other protocol its client would rather speak.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagedllm_server.connection import MOST_HEAD, Watched
from pagedllm_server.errors import ApiError, headers_too_large

MOST_IN_A_ROW = 64
"""Requests of one connection that wait for the answers to those before them."""


class WithHttptools(Watched, HttpToolsProtocol):  # type: ignore[misc]
    """uvicorn's, bounded."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._beside = 0
        """Bytes since the parser had something to tell: of headers, trailers and the like."""
        self._piece = self._again = b""
        """What the parser is given now, and is to be given once more."""
        self._in_head = False
        self._cycles: deque[Any] = deque()

    def _read(self, data: bytes) -> None:
        self._beside += len(data)
        while data:
            self._piece, self._again = data, b""
            HttpToolsProtocol.data_received(self, data)
            data = self._again
        self._piece = b""
        if self._beside > MOST_HEAD and self._ignored is None:
            self._refuse(headers_too_large(MOST_HEAD))

    def _unfinished(self) -> deque[Any]:
        while self._cycles and self._cycles[0].response_complete:  # they are answered in order
            self._cycles.popleft()
        return self._cycles

    def _path(self) -> str:
        url = self.url if self._in_head else b""
        return url.partition(b"?")[0].decode("latin-1")

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._beside, self._in_head = 0, True
        if self._waited is None:
            self._waited = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        if self._in_head:  # trailers come after the headers were read, and may have no end
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, or put it behind others."""
        self._beside, self._in_head = 0, False
        if self.parser.should_upgrade():
            return  # parsed once more, without that
        if len(self._unfinished()) >= MOST_IN_A_ROW:
            raise ValueError("too many requests in a row")  # as if it were no HTTP
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._beside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing more is awaited of the client."""
        if self.parser.should_upgrade():
            return
        self._beside, self._waited = 0, None
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Go on in HTTP/1.1, as a client that asks for another protocol must expect.

        The parser takes what follows such a request for the other protocol; Java's own
        client asks for HTTP/2 with every first request, and sends its body.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(405, "validation", "this server is no proxy"))
            return
        rest = self._piece[getattr(sys.exception(), "args", (0,))[0] :]
        version = self.parser.get_http_version().encode()
        head = [method + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                kept = [part.strip() for part in value.split(b",")]
                value = b", ".join(part for part in kept if part.lower() != b"upgrade")
            head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self._again = b"\r\n".join([*head, b"", rest])
