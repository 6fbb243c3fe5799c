"""Streams whose readers are not late, however busy the machine is."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class InStep:
    """A logits processor with which the engine draws a token when the one before was read.

    Tokens that come while their reader waits for the processor arrive together, which is no
    fault; so a test that counts the pieces of a stream holds the engine back.
    """

    def __init__(self) -> None:
        self._read = threading.Semaphore()  # nobody waits before the first token

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        assert self._read.acquire(timeout=120), "nobody reads"
        return logits

    def read(self, tokens: int = 1) -> None:
        """Say that so many tokens were read, or that nobody will wait for them."""
        self._read.release(tokens)

    def each(self, stream: Iterable[Any]) -> Iterator[Any]:
        """Read a stream of one item a token."""
        for item in stream:
            yield item
            self.read()


def slowly(token_ids: Any, logits: Any) -> Any:
    """A logits processor that leaves readers time, where not every token is an item of theirs."""
    time.sleep(0.01)
    return logits
