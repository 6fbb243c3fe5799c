"""Who is served next: the waiting queue and the policies that order it.

Owner: the scheduler. Invariants: a policy's key never changes while a sequence lives, and
no two keys are equal; so a preempted sequence returns to its old place, and the first in
the order is never preempted by a later one. Adding and taking cost O(log n).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

from pagedllm.engine.sequence import Status
from pagedllm.errors import ConfigError

if TYPE_CHECKING:
    from pagedllm.engine.sequence import SequenceState


class QueuePolicy(Protocol):
    """An order of service."""

    def key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Smaller is served first."""
        ...

    def outranks(self, waiting: SequenceState, running: SequenceState) -> bool:
        """Whether a waiting sequence may take a running one's place."""
        ...


class FCFS:
    """First come, first served."""

    def key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Order by arrival."""
        return (sequence.order,)

    def outranks(self, waiting: SequenceState, running: SequenceState) -> bool:
        """Nobody is displaced."""
        return False


class Priority:
    """Lower ``priority`` values first and at once; equal ones in the order of arrival."""

    def key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Order by priority, then arrival."""
        return (sequence.request.priority, sequence.order)

    def outranks(self, waiting: SequenceState, running: SequenceState) -> bool:
        """A strictly more urgent sequence displaces a less urgent one."""
        return waiting.request.priority < running.request.priority


_POLICIES: dict[str, type[FCFS] | type[Priority]] = {"fcfs": FCFS, "priority": Priority}


def make_policy(name: str) -> QueuePolicy:
    """Return the policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _POLICIES:
        raise ConfigError(f"scheduling_policy={name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()


class WaitingQueue:
    """A heap by the policy's key; sequences that stopped waiting are dropped when met."""

    __slots__ = ("_count", "_heap", "_policy")

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], SequenceState]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: SequenceState) -> None:
        """Add a sequence whose status is WAITING."""
        heapq.heappush(self._heap, (self._policy.key(sequence), sequence))
        self._count += 1

    def peek(self) -> SequenceState | None:
        """Return the first sequence, which stays."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> SequenceState:
        """Remove and return the first sequence. Raises IndexError when empty."""
        if self.peek() is None:
            raise IndexError("the waiting queue is empty")
        self._count -= 1
        return heapq.heappop(self._heap)[1]

    def discard(self, sequence: SequenceState) -> None:
        """A waiting sequence was aborted; the caller sets its status."""
        self._count -= 1
