"""Log lines with the request they belong to, as text or as JSON.

Owner: the server integration. Invariants: no header and no body is ever logged, and no key
either, wherever a client has put it and whoever logs the line.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from collections.abc import Iterable

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The request that the running code serves."""

_EXTRA = ("method", "path", "status", "seconds", "client")


def new_id(prefix: str) -> str:
    """Return a new, unique id."""
    return f"{prefix}-{secrets.token_hex(12)}"


HIDDEN = "***"
"""What is shown of a key."""


class Keys:
    """Knows the keys that no line may show, in every spelling that a line may have of them."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        spellings = set()
        for key in keys:
            escaped = json.dumps(key)[1:-1], ascii(key)[1:-1]
            spellings |= {key, quote(key), quote(key, safe=""), quote_plus(key), *escaped}
        # A key may be the beginning of another one.
        longest = sorted(spellings, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest))) if longest else None

    def hide(self, text: str) -> str:
        """Return a text without them."""
        return text if self._found is None else self._found.sub(HIDDEN, text)


class _WithRequest(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class _Text(logging.Formatter):
    def __init__(self, keys: Keys) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")
        self._keys = keys

    def format(self, record: logging.LogRecord) -> str:
        return self._keys.hide(super().format(record))


class _Json(logging.Formatter):
    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys

    def format(self, record: logging.LogRecord) -> str:
        moment = time.gmtime(record.created)
        line = {
            "timestamp": f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
            "request_id": record.request_id,  # type: ignore[attr-defined]  # the filter's
        }
        line |= {name: getattr(record, name) for name in _EXTRA if hasattr(record, name)}
        if record.exc_info or record.exc_text:  # the latter where it comes from another process
            exception = record.exc_info and self.formatException(record.exc_info)
            line["exception"] = exception or record.exc_text
        # Values alone, and before they are JSON: a key may be a part of its syntax.
        hide = self._keys.hide
        return json.dumps({k: hide(v) if isinstance(v, str) else v for k, v in line.items()})


def make_handler(keys: Iterable[str] = (), *, as_json: bool) -> logging.StreamHandler[TextIO]:
    """Return what writes log lines to standard error, without these keys."""
    handler = logging.StreamHandler()
    handler.addFilter(_WithRequest())
    known = Keys(keys)
    handler.setFormatter(_Json(known) if as_json else _Text(known))
    return handler


def configure(level: str, keys: Iterable[str] = (), *, as_json: bool) -> None:
    """Send this process's log, and Python's warnings, to standard error."""
    handler = make_handler(keys, as_json=as_json)
    logging.captureWarnings(capture=True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("pagedllm", "pagedllm_server"):
        logging.getLogger(name).setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
