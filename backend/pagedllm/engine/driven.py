"""Sequences whose tokens their caller chooses: logits come out, tokens go in.

Owner: the caller that drives, in its own thread; :class:`DrivenGroup` alone is the engine's.
Beam search, guided search, speculation and transformers' own decoding loops need no more
than this, and their rows share steps and pages with all other requests.

Invariants: a group's rows move in step: all logits of one position are there before the
caller sees any. A group that was let in holds a claim on slots and pages for its longest, so
that rows that wait for their caller never starve other rows of the same kind.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedllm.engine.engine import Engine
from pagedllm.engine.sequence import SequenceState
from pagedllm.errors import RequestTooLongError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from pagedllm.engine.loop import EngineLoop
    from pagedllm.types import Request


class Room:
    """What groups may claim together: slots, and pages of the cache."""

    def __init__(self, slots: int, pages: int, page_size: int) -> None:
        self.slots, self.pages, self.page_size = slots, pages, page_size
        self._changed = threading.Condition()
        self._free_slots, self._free_pages = slots, pages

    def claim(self, rows: int, length: int) -> Callable[[], None]:
        """Wait for room for ``rows`` sequences of ``length`` tokens; return what gives it back.

        Raises:
            ValidationError: there is never that much; RequestTooLongError when it is pages.
        """
        # One more page each: the scheduler keeps one spare for every running sequence.
        pages = rows * (-(-length // self.page_size) + 1)
        if rows > self.slots:
            raise ValidationError(
                f"{rows} sequences are to move together and max_batch_size is {self.slots}; "
                f"start the engine with max_batch_size={rows} or more"
            )
        if pages > self.pages:
            raise RequestTooLongError(
                f"{rows} sequences of {length} tokens need {pages} pages and the cache has "
                f"{self.pages}; start the engine with a larger kv_cache_memory"
            )
        with self._changed:
            self._changed.wait_for(lambda: rows <= self._free_slots and pages <= self._free_pages)
            self._free_slots -= rows
            self._free_pages -= pages

        def give_back() -> None:
            with self._changed:
                self._free_slots += rows
                self._free_pages += pages
                self._changed.notify_all()

        return give_back


@dataclass(slots=True, eq=False)
class DrivenGroup:
    """Rows that move together, as the engine's thread sees them."""

    requests: Sequence[tuple[Request, tuple[int, ...]]]
    """Distinct prompts, each with the rows that begin with it."""
    rows: list[SequenceState] = field(default_factory=list)
    awaited: dict[SequenceState, int] = field(default_factory=dict)
    """Sequences whose next logits are wanted, with their row."""
    logits: list[Any] = field(default_factory=list)
    """float32 [vocab] by row."""
    result: Future[list[Any]] = field(default_factory=Future)

    def begin(self, take_order: Callable[[], int]) -> list[list[SequenceState]]:
        """Make the sequences; those of one prompt share its pages."""
        found: dict[int, SequenceState] = {}
        families = []
        for request, rows in self.requests:
            family = [
                _sequence(request, index, take_order(), request.prompt_token_ids)
                for index in range(len(rows))
            ]
            found.update(zip(rows, family, strict=True))
            families.append(family)
        self.rows = [found[row] for row in range(len(found))]
        self.expect()
        return families

    def expect(self) -> None:
        """Wait for the logits of every row."""
        self.awaited = {sequence: row for row, sequence in enumerate(self.rows)}
        self.logits = [None] * len(self.rows)

    def take(self, sequence: SequenceState, logits: object) -> None:
        """Note a row's logits; those of a sequence that was computed again are known."""
        row = self.awaited.pop(sequence, None)
        if row is None or logits is None:
            return
        sequence.leader = None
        self.logits[row] = logits
        if not self.awaited:
            result, self.logits = self.logits, []
            self.result.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Tell the caller that nothing more will come."""
        self.awaited.clear()
        if not self.result.done():
            self.result.set_exception(error)

    def plan(
        self, tokens: Sequence[int], parents: Sequence[int], take_order: Callable[[], int]
    ) -> tuple[list[tuple[SequenceState, int]], list[tuple[SequenceState, SequenceState]]]:
        """Move on: row ``i`` becomes what row ``parents[i]`` was, and ``tokens[i]``.

        The first child of a row goes on in its place; others are forks of it.

        Returns:
            the sequences that go on with their tokens, and (parent, fork) pairs.
        """
        old, going, forks = self.rows, [], []
        first: set[int] = set()
        self.rows = []
        for token, parent in zip(tokens, parents, strict=True):
            sequence = old[parent]
            if parent in first:
                known = (*sequence.tokens, token)
                child = _sequence(sequence.request, sequence.index, take_order(), known)
                forks.append((sequence, child))
                sequence = child
            else:
                first.add(parent)
                going.append((sequence, token))
            self.rows.append(sequence)
        self.expect()
        return going, forks


def _sequence(request: Request, index: int, order: int, tokens: Sequence[int]) -> SequenceState:
    if len(tokens) != len(request.prompt_token_ids):
        request = dataclasses.replace(request, prompt_token_ids=tuple(tokens))
    return SequenceState(
        request=request, index=index, seed=0, order=order, max_tokens=sys.maxsize,
        tokens=list(tokens),
    )  # fmt: skip


class DrivenSequences:
    """Rows that a caller drives; see :meth:`pagedllm.LLM.drive`. Not for several threads.

    Args:
        loop: of the engine.
        requests: one for each row.
        give_back: returns the rows' claim.
    """

    def __init__(
        self, loop: EngineLoop, requests: Sequence[Request], give_back: Callable[[], None]
    ) -> None:
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, request in enumerate(requests):
            rows.setdefault(request.prompt_token_ids, []).append(row)
        self._loop = loop
        self._give_back = give_back
        self._group = DrivenGroup([(requests[own[0]], tuple(own)) for own in rows.values()])
        self._closed = False
        try:
            self.logits: Tensor = self._wait(Engine.drive)
        except BaseException:
            self.close()
            raise

    def advance(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        """Give every row its next token and return the logits that follow.

        Args:
            token_ids: one for each row.
            parents: row ``i`` continues what row ``parents[i]`` was; by default itself. Rows
                that nobody continues end, and their pages are free.

        Returns:
            float32 [rows, vocab].

        Raises:
            EngineError: the step failed; the rows are closed then.
        """
        own = range(len(self._group.rows)) if parents is None else parents
        self._group.result = Future()
        try:
            self.logits = self._wait(partial(Engine.advance, tokens=token_ids, parents=own))
        except BaseException:
            self.close()
            raise
        return self.logits

    def _wait(self, command: Callable[..., None]) -> Tensor:
        import torch

        self._loop.call(partial(command, group=self._group))
        return torch.stack(self._group.result.result())

    def close(self) -> None:
        """Free the rows' pages. Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._loop.closed:
                self._loop.post(partial(Engine.leave, group=self._group))
            self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()
