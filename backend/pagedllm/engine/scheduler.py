"""Decides, step by step, which tokens are computed.

Owner: :class:`~pagedllm.engine.engine.Engine`; imports no torch. One budget of tokens a
step serves running sequences first, then waiting ones, so chunks of prompts and single
decoded tokens share a batch.

Invariants: the first sequence in the policy's order always progresses, since pages are
taken only from later ones; a request is accepted only if it fits an empty cache; so no
admission deadlocks and none starves under ``fcfs``. Pages of a sequence that leaves are
reused at once: executors run steps in order, so a step in flight reads them before a
later one writes them.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedllm.cache.page_table import TableChange
from pagedllm.engine.queue import Deadline, WaitingQueue, make_policy
from pagedllm.engine.sequence import Status
from pagedllm.types import PageWrite, Row, RowOutput, ScheduleStep, SlotInit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedllm.cache.manager import CacheManager
    from pagedllm.engine.sequence import SequenceState
    from pagedllm.types import StepOutput


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a collected step did to a sequence that still lives."""

    sequence: SequenceState
    start: int
    """First position that the step computed."""
    output: RowOutput
    error: BaseException | None = None


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    added: list[SlotInit] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Sequences in, :class:`~pagedllm.types.ScheduleStep`s out, results back in."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_batch_size: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
    ) -> None:
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self.step_seconds = 0.0
        """What a step has taken of late; the engine measures it, the deadline policy asks."""
        self._policy = make_policy(policy)
        self._waiting = WaitingQueue(self._policy)
        self._num_held_back = 0
        self._running: list[SequenceState] = []  # in the policy's order
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._generations = [0] * max_batch_size
        self._in_slot: list[SequenceState | None] = [None] * max_batch_size
        self._released: list[int] = []
        self._appended: dict[int, int] = {}  # by slot
        self._computing: dict[bytes, SequenceState] = {}
        self._steps: dict[int, tuple[Row, ...]] = {}
        self._next_step = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, for pages or for a sequence of their request."""
        return len(self._waiting) + self._num_held_back

    @property
    def running(self) -> Iterable[SequenceState]:
        """The sequences that hold slots and pages."""
        return tuple(self._running)

    # -- arrivals and departures ---------------------------------------------------

    def add(self, sequences: list[SequenceState]) -> None:
        """Queue a request's sequences; all but the first wait for the first one's prompt."""
        leader, *followers = sequences
        leader.followers = followers
        for follower in followers:
            follower.leader = leader
        self._num_held_back += len(followers)
        self._waiting.push(leader)

    def append(self, sequence: SequenceState, token: int) -> None:
        """Take a driven sequence's next token from its caller."""
        sequence.tokens.append(token)
        if sequence.status is Status.RUNNING:
            self._appended[sequence.slot] = token

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Queue a sequence that is another one's computed tokens and one more: pages shared."""
        full = parent.num_computed // self.cache.page_size
        child.table.hashes.extend(parent.table.hashes[:full])
        child.leader = parent
        self._waiting.push(child)

    def remove(self, sequence: SequenceState) -> None:
        """A sequence finished or was aborted: its slot and pages are free at once."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            leader = sequence.leader
            if leader is not None and sequence in leader.followers:
                leader.followers.remove(sequence)
                self._num_held_back -= 1
            else:
                self._waiting.discard(sequence)
        sequence.status = Status.FINISHED
        self._let_followers_go(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        self._running.remove(sequence)
        self._forget_claims(sequence)
        self.cache.release(sequence.table)
        self._in_slot[sequence.slot] = None
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)
        self._appended.pop(sequence.slot, None)
        sequence.slot = sequence.generation = -1
        sequence.num_computed = sequence.num_scheduled = sequence.num_pending = 0

    def _preempt(self, sequence: SequenceState) -> None:
        """Take everything away; the known tokens are computed again later."""
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(sequence)

    def _let_followers_go(self, leader: SequenceState) -> None:
        self._num_held_back -= len(leader.followers)
        for follower in leader.followers:
            self._waiting.push(follower)
        leader.followers = []

    # -- a step --------------------------------------------------------------------

    def schedule(self) -> ScheduleStep | None:
        """Return the next step, or None when nothing can be computed now."""
        draft = _Draft(self.max_num_batched_tokens)
        if isinstance(self._policy, Deadline):
            self._set_late_ones_back(self._policy)
        self._make_room_for_urgent()
        before = self.num_preemptions
        self._schedule_running(draft)
        if self.num_preemptions == before:  # pages are short: admit nobody
            self._admit(draft)
        if not draft.rows:
            return None
        step = ScheduleStep(
            step_id=self._next_step,
            rows=tuple(draft.rows),
            released=tuple(self._released),
            added=tuple(draft.added),
            appended=tuple(self._appended.items()),
            page_writes=tuple(draft.page_writes),
            page_copies=tuple(draft.page_copies),
        )
        self._next_step += 1
        self._released.clear()
        self._appended.clear()
        self._steps[step.step_id] = step.rows
        return step

    def _schedule_running(self, draft: _Draft) -> None:
        # A prompt's chunk leaves one token to every decoding sequence behind it.
        reserved = sum(sequence.num_to_schedule == 1 for sequence in self._running)
        position = 0
        while position < len(self._running):
            sequence = self._running[position]
            wanted = sequence.num_to_schedule
            if wanted == 1:
                reserved -= 1
            count = min(wanted, draft.budget - reserved)
            if count > 0 and not self._extend_or_preempt(draft, sequence, count):
                return  # it gave way itself, so nobody is behind it
            position += 1

    def _extend_or_preempt(self, draft: _Draft, sequence: SequenceState, count: int) -> bool:
        """Schedule a row, preempting from the end of the order until its pages are there."""
        start = sequence.num_scheduled
        while (change := self.cache.extend(sequence.table, start, start + count)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._append_row(draft, sequence, count, change)
        return True

    def _append_row(
        self, draft: _Draft, sequence: SequenceState, count: int, change: TableChange
    ) -> None:
        start = sequence.num_scheduled
        sample = start + count == len(sequence.tokens) + sequence.num_pending
        draft.rows.append(Row(sequence.slot, sequence.generation, start, count, sample))
        draft.budget -= count
        if change.page_ids:
            draft.page_writes.append(PageWrite(sequence.slot, change.index, change.page_ids))
        draft.page_copies.extend(change.copies)
        sequence.num_scheduled = start + count
        sequence.num_pending += sample and not sequence.driven

    def _set_late_ones_back(self, policy: Deadline) -> None:
        now, budget = time.monotonic(), self.max_num_batched_tokens
        while (first := self._waiting.peek()) is not None and not first.late:
            if not policy.is_late(first, now, self.step_seconds, budget):
                return
            self._waiting.pop()
            first.late = True
            self._waiting.push(first)

    def _has_place_for_late(self) -> bool:
        """Late sequences fill a quarter of the batch, lest they slow those that are not.

        Where all are late, they fill it.
        """
        late = sum(sequence.late for sequence in self._running)
        return late < max(1, self.max_batch_size // 4) or late == len(self._running)

    def _make_room_for_urgent(self) -> None:
        urgent = self._waiting.peek()
        while urgent is not None and self._running:
            last = self._running[-1]
            if not self._policy.outranks(urgent, last):
                return
            prefix, published = self._starting_pages(urgent)
            start = self._starting_tokens(urgent, prefix, published)
            if self._free_slots and self._has_room(urgent, prefix, start):
                return
            self._preempt(last)

    def _admit(self, draft: _Draft) -> None:
        set_aside: list[SequenceState] = []
        while draft.budget > 0 and self._free_slots and len(set_aside) < self.max_batch_size:
            sequence = self._waiting.peek()
            if sequence is None or (sequence.late and not self._has_place_for_late()):
                break
            prefix, published = self._starting_pages(sequence)
            if published and self._is_being_computed(sequence, len(prefix)):
                set_aside.append(self._waiting.pop())
                continue
            start = self._starting_tokens(sequence, prefix, published)
            if not self._has_room(sequence, prefix, start):
                break
            self._waiting.pop()
            self._enter(draft, sequence, prefix, start, published=published)
        for sequence in set_aside:
            self._waiting.push(sequence)

    def _starting_pages(self, sequence: SequenceState) -> tuple[list[int], bool]:
        """Pages that a sequence need not compute, and whether they are published ones."""
        leader = sequence.leader
        if (
            leader is not None
            and leader.status is Status.RUNNING
            and leader.num_computed >= leader.num_prompt_tokens
            and len(sequence.tokens) == sequence.num_prompt_tokens
        ):
            shared = self.cache.pages_for(sequence.num_prompt_tokens - 1)
            return leader.table.pages[:shared], False
        request = sequence.request
        scored = request.params.prompt_logprobs is not None and sequence.index == 0
        if scored or request.pooling == "mean":
            return [], False  # every position's logits, or states, are wanted
        salt = sequence.request.cache_salt
        return self.cache.find_prefix(sequence.table, sequence.tokens, salt), True

    def _starting_tokens(self, sequence: SequenceState, prefix: list[int], published: bool) -> int:
        # A fork shares the last page too, though not the last token: computing that one
        # again gives the logits to draw from, and writing it copies the page.
        full = len(prefix) * self.cache.page_size
        return full if published else min(full, sequence.num_prompt_tokens - 1)

    def _is_being_computed(self, sequence: SequenceState, num_pages: int) -> bool:
        """Whether waiting a step or two saves half of the work, or more.

        The pages that come next may be those of a running sequence's prompt, computed but
        not published yet: many requests with one long prefix that arrive together would
        else all compute it.
        """
        hashes = sequence.table.hashes
        count = 0
        for digest in hashes[num_pages:]:
            if digest not in self._computing:
                break
            count += 1
        remaining = len(sequence.tokens) - num_pages * self.cache.page_size
        return count > 0 and 2 * count * self.cache.page_size >= remaining

    def _has_room(self, sequence: SequenceState, prefix: list[int], start: int) -> bool:
        if not self._running:
            return True
        known = self.cache.pages_for(len(sequence.tokens) + 1)
        needed = known - len(prefix) + (start % self.cache.page_size > 0)
        # One page for every running sequence to grow into, lest this admission be undone.
        return needed + len(self._running) <= self.cache.num_available_with(prefix)

    def _enter(
        self,
        draft: _Draft,
        sequence: SequenceState,
        prefix: list[int],
        start: int,
        *,
        published: bool,
    ) -> None:
        count = min(len(sequence.tokens) - start, draft.budget)
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        sequence.slot, sequence.generation = slot, self._generations[slot]
        sequence.status = Status.RUNNING
        sequence.num_computed = sequence.num_scheduled = start
        self._in_slot[slot] = sequence
        insort(self._running, sequence, key=self._policy.key)
        self.cache.adopt(sequence.table, prefix, published=published)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = time.monotonic()
            sequence.num_cached_tokens = start
            if published and self.cache.enable_prefix_caching:
                self.cache.count_prefix(sequence.num_prompt_tokens, start)
        self._claim(sequence, len(prefix))
        draft.added.append(
            SlotInit(
                slot=slot,
                generation=sequence.generation,
                token_ids=tuple(sequence.tokens),
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=sequence.request.params,
                seed=sequence.seed,
                eos_token_ids=sequence.request.eos_token_ids,
                bad_words_ids=sequence.request.bad_words_ids,
                driven=sequence.driven,
                pooling=sequence.request.pooling,
            )
        )
        change = self.cache.extend(sequence.table, start, start + count)
        if change is None:
            raise RuntimeError("admission miscounted its pages")
        if prefix:
            # The worker's table for this slot is empty: write it from the first entry on.
            pages = tuple(sequence.table.pages)
            change = TableChange(0, pages, change.copies)
        self._append_row(draft, sequence, count, change)

    def _claim(self, sequence: SequenceState, num_pages: int) -> None:
        for digest in sequence.table.hashes[num_pages:]:
            self._computing.setdefault(digest, sequence)

    def _forget_claims(self, sequence: SequenceState) -> None:
        for digest in sequence.table.hashes:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]

    # -- results -------------------------------------------------------------------

    def update(self, output: StepOutput) -> list[SequenceUpdate]:
        """Take in a collected step: append tokens, publish pages.

        Rows of sequences that have left since (aborted, preempted) are dropped; a
        preempted one draws the same tokens again.

        Returns:
            an update for every row whose sequence still lives, in the order of the rows.
        """
        updates: list[SequenceUpdate] = []
        rows = self._steps.pop(output.step_id)
        for index, row in enumerate(rows):
            sequence = self._in_slot[row.slot]
            if sequence is None or sequence.generation != row.generation:
                continue
            result = _failed(row, output.error) if output.error else output.rows[index]
            if result.error is None:
                self._take(sequence, row, result)
            updates.append(SequenceUpdate(sequence, row.start, result, result.error))
        return updates

    def _take(self, sequence: SequenceState, row: Row, result: RowOutput) -> None:
        sequence.num_computed = row.start + row.count
        if row.sample and not sequence.driven:
            sequence.num_pending -= 1
            if result.token_id is None:
                raise RuntimeError(f"step returned no token for a row that samples: {row}")
            sequence.tokens.append(result.token_id)
        self.cache.publish(
            sequence.table, sequence.tokens, sequence.num_computed, sequence.request.cache_salt
        )
        if sequence.num_computed >= sequence.num_prompt_tokens:
            if sequence.followers:
                self._let_followers_go(sequence)
            if row.start < sequence.num_prompt_tokens:
                self._forget_claims(sequence)

    def check(self) -> None:
        """Verify the cache's books; tests call this after every step.

        Raises:
            CacheIntegrityError: they do not add up.
        """
        self.cache.check(sequence.table for sequence in self._running)


def _failed(row: Row, error: BaseException) -> RowOutput:
    return RowOutput(row.slot, row.generation, error=error)
