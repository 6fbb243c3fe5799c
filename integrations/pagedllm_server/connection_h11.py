"""A connection whose requests h11 parses, where httptools is not installed.

Owner: the server integration; see connection.py. What h11 keeps of headers, trailers and the
like is bounded by ``h11_max_incomplete_event_size``.
"""

from __future__ import annotations

import re

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedllm_server.connection import Watched


class WithH11(Watched, H11Protocol):
    """uvicorn's, bounded."""

    def _read(self, data: bytes) -> None:
        H11Protocol.data_received(self, data)
        state = self.conn.their_state
        partial = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        if self._ignored is None and not partial:
            self._waited = None

    def _path(self) -> str:
        found = re.match(rb"[A-Z]+ ([^ ?]+)", self.conn.trailing_data[0][:2048])
        return found[1].decode("latin-1") if found else ""
