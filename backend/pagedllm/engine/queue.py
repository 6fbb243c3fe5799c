"""Who is served next: the waiting queue and the policies that order it.

Owner: the scheduler. Invariants: a policy's key never changes while a sequence is in the queue
or runs, and no two keys are equal; so a preempted sequence returns to its old place, and the
first in the order is never preempted by a later one. Adding and taking cost O(log n).
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


class Deadline:
    """Earliest target first (EDF, Liu and Layland 1973), those that cannot meet theirs last.

    Earliest-deadline-first alone collapses under overload: it spends itself on requests that
    are about to be late anyway. So one that can no longer meet its target goes behind all that
    can, gives way to them, and fills what room they leave.
    """

    def key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Order by whether the target can be met, then by target, then by arrival."""
        request = sequence.request
        targets = [t for t in (request.ttft_target, request.e2e_target) if t is not None]
        due = request.arrival_time + min(targets, default=_NO_TARGET)
        return (sequence.late, due, sequence.order)

    def outranks(self, waiting: SequenceState, running: SequenceState) -> bool:
        """One that can be on time displaces one that cannot."""
        return running.late and not waiting.late

    @staticmethod
    def is_late(sequence: SequenceState, now: float, step_seconds: float, budget: int) -> bool:
        """Whether a waiting sequence's target cannot be met any more.

        Args:
            sequence: waits.
            now: seconds of ``time.monotonic()``.
            step_seconds: what a step has taken of late.
            budget: tokens of a step.
        """
        request = sequence.request
        waited = now - request.arrival_time
        prefill = -(-len(sequence.tokens) // budget) * step_seconds
        if request.ttft_target is not None and sequence.num_output_tokens == 0:
            return waited + prefill > _CERTAIN * request.ttft_target
        if request.e2e_target is None:
            return False
        left = sequence.max_tokens - sequence.num_output_tokens
        return waited + prefill + left * step_seconds > _CERTAIN * request.e2e_target


_CERTAIN = 0.8
"""The part of a target that estimates may fill. Under overload those served are the ones that
have waited longest, so without a margin all of them would be on the edge."""
_NO_TARGET = 60.0
"""Seconds that stand in for the target of a request without one."""
_POLICIES: dict[str, type[FCFS] | type[Priority] | type[Deadline]] = {
    "fcfs": FCFS,
    "priority": Priority,
    "deadline": Deadline,
}


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
