"""Conversations that LangChain asks one after another, and the engine answers together.

Owner: the LangChain integration. LangChain's chat models are handed one conversation at a time,
in a loop or a pool of threads. So whoever is given many starts all of them first, and each
call then takes up the one that is under way with the same prompt and parameters. Invariants:
nothing is started twice; what nobody took up (a cache had the answer, an error came first) is
aborted in the end.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from langchain_pagedllm.engines import Handle
    from pagedllm.structured import PreparedChat


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One conversation, rendered and checked."""

    chat: PreparedChat
    handle: Handle

    @property
    def key(self) -> Any:
        """What makes two of them one and the same question."""
        return id(self.handle), self.chat.prompt_token_ids, self.chat.params

    def stream(self) -> Any:
        """The engine's stream of outputs, perhaps one that is under way."""
        under_way = _current.get()
        found = under_way.take(self) if under_way is not None else None
        return self._start() if found is None else found

    async def astream(self) -> Any:
        """The same for asyncio."""
        under_way = _current.get()
        found = under_way.take(self) if under_way is not None else None
        return self._astart() if found is None else found

    def _start(self) -> Any:
        return self.handle.llm.stream(self.chat.prompt_token_ids, self.chat.params)

    def _astart(self) -> Any:
        return self.handle.async_llm.generate(self.chat.prompt_token_ids, self.chat.params)


class Together:
    """A context in which these conversations are under way."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = asked
        self._lock = threading.Lock()
        self._streams: defaultdict[Any, deque[Any]] = defaultdict(deque)
        self._token: Token[Together | None] | None = None

    def take(self, asked: Asked) -> Any:
        """Hand a stream over to the one who asked, or None."""
        with self._lock:
            waiting = self._streams.get(asked.key)
            return waiting.popleft() if waiting else None

    def _enter(self, streams: Sequence[Any]) -> None:
        for asked, stream in zip(self._asked, streams, strict=True):
            self._streams[asked.key].append(stream)
        if self._asked:  # else what is under way around here stays so
            self._token = _current.set(self)

    def _exit(self) -> list[Any]:
        if self._token is not None:
            _current.reset(self._token)
        with self._lock:
            left = [stream for waiting in self._streams.values() for stream in waiting]
            self._streams.clear()
        return left

    def __enter__(self) -> Together:
        self._enter([asked._start() for asked in self._asked])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in self._exit():
            stream.close()

    async def __aenter__(self) -> Together:
        self._enter([asked._astart() for asked in self._asked])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in self._exit():
            await stream.aclose()


_current: ContextVar[Together | None] = ContextVar("pagedllm_under_way", default=None)
