"""The deadline policy: earliest target first, and what must be late out of the others' way."""

from __future__ import annotations

import time

import pytest

from pagedllm import LLM, AsyncLLM, SamplingParams, ValidationError
from pagedllm.cache.manager import CacheManager
from pagedllm.engine.scheduler import Scheduler
from pagedllm.engine.sequence import SequenceState, Status
from pagedllm.types import Request, RowOutput, StepOutput


class Bench:
    """A scheduler that serves a few sequences at a time."""

    def __init__(self, slots=1):
        self.scheduler = Scheduler(
            CacheManager(64, 4), max_batch_size=slots, max_num_batched_tokens=64, policy="deadline"
        )
        self.order = 0
        self.finished = []

    def add(self, *, ttft=None, e2e=None, age=0.0, tokens=4):
        request = Request(
            str(self.order),
            (1, 2, 3),
            SamplingParams(max_tokens=tokens),
            arrival_time=time.monotonic() - age,
            ttft_target=ttft,
            e2e_target=e2e,
        )
        sequence = SequenceState(request, 0, 0, self.order, tokens, [1, 2, 3])
        self.order += 1
        self.scheduler.add([sequence])
        return sequence

    def step(self):
        step = self.scheduler.schedule()
        if step is None:
            return False
        rows = tuple(RowOutput(r.slot, r.generation, token_id=7) for r in step.rows)
        for update in self.scheduler.update(StepOutput(step.step_id, rows)):
            if update.sequence.num_output_tokens >= update.sequence.max_tokens:
                self.scheduler.remove(update.sequence)
                self.finished.append(update.sequence)
        self.scheduler.check()
        return True

    def run(self):
        while self.step():
            pass
        return self.finished


def test_the_earliest_target_is_served_first():
    bench = Bench()
    late, soon, none, middle = (
        bench.add(ttft=30), bench.add(ttft=10), bench.add(), bench.add(e2e=20, ttft=40)
    )  # fmt: skip
    assert bench.run() == [soon, middle, late, none]


def test_what_cannot_be_on_time_goes_last_and_is_served_all_the_same():
    bench = Bench()
    missed = bench.add(ttft=1, age=2)
    hopeless = bench.add(e2e=3, tokens=40)
    possible = bench.add(e2e=5, tokens=4)
    bench.scheduler.step_seconds = 0.2  # 40 tokens take 8 seconds
    assert bench.run() == [possible, missed, hopeless]
    assert [s.late for s in (missed, hopeless, possible)] == [True, True, False]


def test_one_on_time_displaces_one_that_is_late():
    bench = Bench()
    late = bench.add(ttft=1, age=2, tokens=10)
    bench.step()
    assert late.status is Status.RUNNING
    fresh = bench.add(ttft=60)
    bench.step()
    assert (fresh.status, late.status) == (Status.RUNNING, Status.WAITING)
    assert bench.run() == [fresh, late]
    assert late.num_preemptions == 1


def test_late_ones_take_a_quarter_of_the_batch_or_all_of_it_when_they_are_alone():
    bench = Bench(slots=8)
    fresh = bench.add(ttft=60, tokens=8)
    late = [bench.add(ttft=1, age=2) for _ in range(8)]
    bench.step()
    assert fresh.status is Status.RUNNING
    assert sum(s.status is Status.RUNNING for s in late) == 2
    assert sorted(s.order for s in bench.run()) == list(range(9))
    alone = [bench.add(ttft=1, age=2) for _ in range(8)]
    bench.step()
    assert all(s.status is Status.RUNNING for s in alone)


async def _metrics(stream):
    async for output in stream:
        last = output
    return last.metrics


def test_through_the_engine(tiny_and_long):
    import asyncio

    async def main():
        options = {"scheduling_policy": "deadline", "max_batch_size": 1, "threads": 1}
        async with AsyncLLM(str(tiny_and_long), **options) as llm:

            def ask(tokens, **targets):
                params = SamplingParams(max_tokens=tokens, ignore_eos=True)
                return llm.submit(llm.prepare("Hello", params, **targets))

            # Both are there before the engine has room for either.
            first = ask(8000, ttft_target=600)
            await anext(first)
            streams = ask(20, ttft_target=600), ask(20, ttft_target=300)
            await first.aclose()
            return await asyncio.gather(*map(_metrics, streams))

    no_hurry, hurry = asyncio.run(main())
    assert hurry.finished_time <= no_hurry.first_token_time


def test_targets_need_the_policy(tiny_with_text):
    with (
        LLM(str(tiny_with_text), threads=1) as llm,
        pytest.raises(ValidationError, match="scheduling_policy='deadline'"),
    ):
        llm._intake.request("A", None, ttft_target=1.0)
