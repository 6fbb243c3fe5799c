"""Log lines with the request they belong to, as text or as JSON.

Owner: the server integration. Invariant: no header, no body and no key is ever logged.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The request that the running code serves."""

_EXTRA = ("method", "path", "status", "seconds", "client")


def new_id(prefix: str) -> str:
    """Return a new, unique id."""
    return f"{prefix}-{secrets.token_hex(12)}"


class _WithRequest(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class _Json(logging.Formatter):
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
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str, *, as_json: bool) -> None:
    """Send this process's log to standard error."""
    handler = logging.StreamHandler()
    handler.addFilter(_WithRequest())
    text = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
    handler.setFormatter(_Json() if as_json else logging.Formatter(text))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("pagedllm", "pagedllm_server"):
        logging.getLogger(name).setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
