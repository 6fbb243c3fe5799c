"""Scheduling: budgets, mixed batches, order, preemption, sharing; and that nobody starves.

The executor's part is played by a few lines that give every sampling row a token: a real
model adds nothing to what is decided here.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.cache.manager import CacheManager
from pagedllm.engine.scheduler import Scheduler
from pagedllm.engine.sequence import SequenceState, Status
from pagedllm.errors import ConfigError
from pagedllm.sampling_params import SamplingParams
from pagedllm.types import Request, RowOutput, ScheduleStep, StepOutput


class Bench:
    """A scheduler with numbered requests and a stand-in for the worker."""

    def __init__(self, *, pages: int = 64, page_size: int = 4, **options: object) -> None:
        settings_ = {"max_batch_size": 8, "max_num_batched_tokens": 64, "policy": "fcfs"}
        self.cache = CacheManager(pages, page_size)
        self.scheduler = Scheduler(self.cache, **{**settings_, **options})  # type: ignore[arg-type]
        self.order = 0

    def add(
        self, prompt: list[int], max_tokens: int = 4, *, priority: int = 0, n: int = 1
    ) -> list[SequenceState]:
        request = Request(
            str(self.order), tuple(prompt), SamplingParams(n=n, max_tokens=max_tokens),
            priority=priority,
        )  # fmt: skip
        sequences = []
        for index in range(n):
            sequences.append(SequenceState(request, index, 0, self.order, max_tokens, list(prompt)))
            self.order += 1
        self.scheduler.add(sequences)
        return sequences

    def answer(self, step: ScheduleStep, token: int = 7) -> StepOutput:
        return StepOutput(
            step.step_id,
            tuple(
                RowOutput(row.slot, row.generation, token_id=token if row.sample else None)
                for row in step.rows
            ),
        )

    def run_step(self) -> ScheduleStep | None:
        step = self.scheduler.schedule()
        if step is not None:
            for update in self.scheduler.update(self.answer(step)):
                sequence = update.sequence
                if sequence.num_output_tokens >= sequence.max_tokens:
                    self.scheduler.remove(sequence)
            self.scheduler.check()
        return step

    def run(self, limit: int = 10_000) -> list[ScheduleStep]:
        steps = []
        while (step := self.run_step()) is not None:
            steps.append(step)
            assert len(steps) < limit, "the scheduler does not come to an end"
        return steps


def test_a_prompt_is_computed_once_and_then_a_token_a_step() -> None:
    bench = Bench()
    (sequence,) = bench.add([1] * 10, max_tokens=3)
    steps = bench.run()
    assert [step.num_tokens for step in steps] == [10, 1, 1]
    assert sequence.tokens == [1] * 10 + [7] * 3
    assert sequence.status is Status.FINISHED


def test_long_prompts_come_in_chunks_beside_decoding_sequences() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add([1] * 4, max_tokens=20)
    bench.run_step()
    bench.add(list(range(20)), max_tokens=1)
    chunks = []
    for _ in range(3):
        step = bench.run_step()
        assert step is not None
        assert step.rows[0].count == 1  # the first one decodes on in every step
        chunks.append(step.rows[1].count)
        assert step.num_tokens <= 8
    assert chunks == [7, 7, 6]


def test_a_prompt_in_chunks_leaves_later_sequences_their_token() -> None:
    bench = Bench(max_num_batched_tokens=8)
    first = bench.add(list(range(30)), max_tokens=1)[0]
    bench.run_step()
    second = bench.add([5], max_tokens=10)[0]
    bench.run_step()
    assert first.num_computed == 16  # the budget was spent before the second came
    bench.scheduler.remove(first)
    bench.run_step()
    third = bench.add(list(range(100, 130)), max_tokens=1)[0]
    for _ in range(3):
        before = second.num_output_tokens
        bench.run_step()
        assert second.num_output_tokens == before + 1
    assert third.num_computed > 0


def test_first_come_first_served() -> None:
    bench = Bench(max_batch_size=2)
    order: list[int] = []
    sequences = [bench.add([i] * 5, max_tokens=2)[0] for i in range(6)]
    while (step := bench.run_step()) is not None:
        order += [init.token_ids[0] for init in step.added]
    assert order == sorted(order)
    assert all(s.status is Status.FINISHED for s in sequences)


def test_an_urgent_request_displaces_the_least_urgent_one() -> None:
    bench = Bench(max_batch_size=2, policy="priority")
    slow = [bench.add([i] * 5, max_tokens=30, priority=5)[0] for i in range(2)]
    bench.run_step()
    urgent = bench.add([9] * 5, max_tokens=2, priority=1)[0]
    bench.run_step()
    assert urgent.status is Status.RUNNING
    assert [s.status for s in slow] == [Status.RUNNING, Status.WAITING]
    bench.run()
    assert slow[1].tokens == [1] * 5 + [7] * 30  # nothing was lost


def test_equal_priorities_do_not_displace_each_other() -> None:
    bench = Bench(max_batch_size=1, policy="priority")
    first = bench.add([1] * 5, max_tokens=5, priority=3)[0]
    bench.run_step()
    bench.add([2] * 5, max_tokens=5, priority=3)
    bench.run_step()
    assert first.status is Status.RUNNING
    assert first.num_preemptions == 0


def test_the_newest_is_preempted_and_resumes_with_its_tokens() -> None:
    bench = Bench(pages=6, page_size=4)
    old = bench.add([1] * 8, max_tokens=12)[0]
    new = bench.add([2] * 8, max_tokens=12)[0]
    steps = bench.run()
    assert old.num_preemptions == 0
    assert new.num_preemptions > 0
    assert new.tokens == [2] * 8 + [7] * 12
    resumed = [init for step in steps for init in step.added if len(init.token_ids) > 8]
    assert resumed
    assert all(init.num_prompt_tokens == 8 for init in resumed)


def test_a_shared_prefix_is_computed_by_one_of_those_who_arrive_together() -> None:
    bench = Bench(max_num_batched_tokens=1000, pages=256)
    prefix = list(range(40))
    for i in range(5):
        bench.add([*prefix, 100 + i], max_tokens=1)
    steps = bench.run()
    assert sum(step.num_tokens for step in steps) == 41 + 4 * 1
    assert len(steps) == 2


def test_requests_without_much_in_common_are_not_held_back() -> None:
    bench = Bench(max_num_batched_tokens=1000, pages=256)
    for i in range(5):
        bench.add([1, 2, 3, 4, *[10 + i] * 30], max_tokens=1)
    assert len(bench.run()) == 1


def test_the_sequences_of_a_request_share_its_prompt_pages() -> None:
    bench = Bench(page_size=4)
    sequences = bench.add(list(range(10)), max_tokens=6, n=3)
    first = bench.run_step()
    assert first is not None
    assert first.num_tokens == 10
    second = bench.run_step()
    assert second is not None
    assert second.num_tokens == 3  # one decodes, two draw their first token from the prompt's last
    tables = [sequence.table.pages for sequence in sequences]
    assert len({tuple(pages[:2]) for pages in tables}) == 1
    assert len({pages[2] for pages in tables}) == 3
    assert len(second.page_copies) == 2
    bench.run()
    assert {len(s.tokens) for s in sequences} == {16}


@pytest.mark.parametrize("length", [1, 4, 8, 9])
def test_sharing_works_at_page_boundaries(length: int) -> None:
    bench = Bench(page_size=4)
    sequences = bench.add(list(range(length)), max_tokens=5, n=4)
    bench.run()
    assert all(s.tokens == list(range(length)) + [7] * 5 for s in sequences)
    assert bench.cache.pool.counts.used == 0


def test_followers_go_on_alone_when_their_leader_is_aborted() -> None:
    bench = Bench(max_num_batched_tokens=4, max_batch_size=4)
    leader, *others = bench.add(list(range(10)), max_tokens=2, n=3)
    bench.run_step()
    bench.scheduler.remove(leader)
    assert bench.scheduler.num_waiting == 2
    bench.run()
    assert all(s.num_output_tokens == 2 for s in others)


def test_an_abort_frees_pages_at_once_and_late_results_are_dropped() -> None:
    bench = Bench()
    sequence = bench.add([1] * 10)[0]
    step = bench.scheduler.schedule()
    assert step is not None
    bench.scheduler.remove(sequence)
    assert bench.cache.pool.counts.used == 0
    other = bench.add([2] * 3, max_tokens=1)[0]
    following = bench.scheduler.schedule()
    assert following is not None
    assert following.released == (step.rows[0].slot,)
    assert bench.scheduler.update(bench.answer(step)) == []
    assert len(bench.scheduler.update(bench.answer(following))) == 1
    assert other.tokens == [2, 2, 2, 7]


def test_a_failed_step_reports_an_error_for_each_row() -> None:
    bench = Bench()
    bench.add([1] * 3)
    bench.add([2] * 3)
    step = bench.scheduler.schedule()
    assert step is not None
    problem = MemoryError("no room")
    updates = bench.scheduler.update(StepOutput(step.step_id, error=problem))
    assert [update.error for update in updates] == [problem, problem]
    for update in updates:
        bench.scheduler.remove(update.sequence)
    assert bench.cache.pool.counts.used == 0
    assert bench.cache.pool.counts.cached == 0  # nothing that failed is ever found again


def test_steps_can_be_submitted_ahead_of_their_results() -> None:
    bench = Bench()
    sequence = bench.add([1] * 5, max_tokens=3)[0]
    steps = [bench.scheduler.schedule() for _ in range(4)]
    assert [step.num_tokens if step else 0 for step in steps] == [5, 1, 1, 0]
    for step in steps[:3]:
        assert step is not None
        bench.scheduler.update(bench.answer(step))
    assert sequence.tokens == [1] * 5 + [7] * 3


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'lottery': choose one of fcfs, priority"):
        Bench(policy="lottery")


def test_ten_thousand_waiting_requests_do_not_slow_a_step_down() -> None:
    few, many = Bench(max_batch_size=4), Bench(max_batch_size=4)
    for bench, number in ((few, 10), (many, 10_000)):
        for i in range(number):
            bench.add([i % 50] * 3, max_tokens=50)
        bench.run_step()
    operations = []
    for bench in (few, many):
        looked_at = 0
        original = bench.cache.find_prefix

        def counting(*arguments: object, original: object = original) -> object:
            nonlocal looked_at
            looked_at += 1
            return original(*arguments)  # type: ignore[operator]

        bench.cache.find_prefix = counting  # type: ignore[method-assign,assignment]
        for _ in range(20):
            bench.run_step()
        operations.append(looked_at)
    assert operations[0] == operations[1]


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(8, 40),
    page_size=st.integers(1, 6),
    batch=st.integers(1, 6),
    depth=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_everything_ends_and_nothing_is_lost(
    seed: int, pages: int, page_size: int, batch: int, depth: int, policy: str
) -> None:
    """Random arrivals, lengths, n, priorities and aborts, with steps in flight."""
    draw = random.Random(seed)
    bench = Bench(
        pages=pages, page_size=page_size, max_batch_size=batch, policy=policy,
        max_num_batched_tokens=draw.randint(batch, batch + 20),
    )  # fmt: skip
    room = pages * page_size
    alive: set[SequenceState] = set()
    finished: list[SequenceState] = []
    in_flight: list[ScheduleStep] = []
    arrivals = 25
    for _ in range(20_000):
        if arrivals and draw.random() < 0.4:
            arrivals -= 1
            length = draw.randint(1, room - 1)
            limit = draw.randint(1, room - length)
            prompt = [draw.randrange(2) for _ in range(length)]
            alive |= set(
                bench.add(prompt, limit, priority=draw.randrange(3), n=draw.choice((1, 1, 3)))
            )
        if alive and draw.random() < 0.03:
            victim = draw.choice(sorted(alive, key=lambda s: s.order))
            bench.scheduler.remove(victim)
            alive.discard(victim)
        while len(in_flight) < depth and (step := bench.scheduler.schedule()) is not None:
            assert step.num_tokens <= bench.scheduler.max_num_batched_tokens
            in_flight.append(step)
        if not in_flight:
            if not arrivals:
                break
            continue
        for update in bench.scheduler.update(bench.answer(in_flight.pop(0))):
            sequence = update.sequence
            if sequence.num_output_tokens >= sequence.max_tokens:
                bench.scheduler.remove(sequence)
                alive.discard(sequence)
                finished.append(sequence)
        bench.scheduler.check()
    assert not alive, f"{len(alive)} sequences starve"
    assert bench.scheduler.num_running == bench.scheduler.num_waiting == 0
    assert bench.cache.pool.counts.used == 0
    for sequence in finished:
        assert sequence.num_output_tokens == sequence.max_tokens
