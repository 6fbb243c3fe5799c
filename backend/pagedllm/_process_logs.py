"""What the engine's own process logs, in the log of the process that started it.

Owner: the facade. Invariants: loggers there have the levels that the same loggers here had when
the process was started; what crosses is plain data, so a line cannot fail to be sent; nothing
that a handler here does to a line can end the thread that brings it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def levels() -> dict[str, int]:
    """The levels that have been set in this process; the root logger's name is empty."""
    found = {"": logging.root.level}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level:
            found[name] = logger.level
    return found


class _Sender(logging.Handler):
    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            plain = {k: v for k, v in vars(record).items() if isinstance(v, (str, int, float))}
            self._send(plain | {"msg": text, "args": None})
        except Exception:  # noqa: BLE001 - as every handler of logging's does
            self.handleError(record)


def forward(levels: Mapping[str, int], send: Callable[[dict[str, Any]], None]) -> None:
    """Log nothing in this process, and send it: logs, and the warnings of Python's ``warnings``.

    Args:
        levels: what :func:`levels` returned where the lines are to go.
        send: takes a line from any thread, in the middle of anything.
    """
    logging.root.handlers[:] = [_Sender(send)]
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
    logging.captureWarnings(capture=True)


def relay(plain: Mapping[str, Any]) -> None:
    """Log a line that was sent."""
    with contextlib.suppress(Exception):
        record = logging.makeLogRecord(dict(plain))
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
