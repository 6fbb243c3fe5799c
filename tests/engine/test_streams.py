"""Streaming, asyncio and threads: deltas, aborts, cancellation, shared batches."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from in_step import InStep
from pagedllm import LLM, AsyncLLM, SamplingParams
from pagedllm.errors import EngineClosedError, EngineError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pagedllm import RequestOutput

    Oracle = Callable[[Sequence[int], Sequence[int]], bool]

LONG = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def llm(tiny_and_long: Path) -> Iterator[LLM]:
    with LLM(str(tiny_and_long)) as engine:
        yield engine


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def idle(engine: LLM | AsyncLLM) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == stats.cache.pages_used == 0


def test_deltas_add_up_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=40, n=2)
    (whole,) = llm.generate("A story:", params)
    texts, tokens = ["", ""], [[], []]  # type: ignore[var-annotated]
    last: RequestOutput | None = None
    for output in llm.stream("A story:", params):
        for completion in output.outputs:
            texts[completion.index] += completion.text_delta
            tokens[completion.index] += completion.new_token_ids
            assert completion.text == texts[completion.index]
        last = output
    assert last is not None
    assert last.finished
    assert texts == [c.text for c in whole.outputs]
    assert tokens == [c.token_ids for c in whole.outputs]


def test_a_stream_arrives_bit_by_bit(llm: LLM) -> None:
    in_step = InStep()
    params = SamplingParams(temperature=0, max_tokens=50, logits_processors=[in_step])
    outputs = list(in_step.each(llm.stream("A story:", params)))
    assert len(outputs) == 50
    assert outputs[0].metrics is not None
    assert outputs[0].metrics.finished_time is None
    assert outputs[-1].metrics is not None
    assert (outputs[-1].metrics.ttft or 0) < (outputs[-1].metrics.e2e_time or 0)


def test_a_slow_reader_gets_everything_in_fewer_pieces(llm: LLM) -> None:
    in_step = InStep()
    params = SamplingParams(seed=2, max_tokens=60, ignore_eos=True, logits_processors=[in_step])
    stream = llm.stream("A story:", params)
    first = next(stream)
    in_step.read(60)
    wait_until(lambda: idle(llm))
    rest = list(stream)
    assert len(rest) == 1
    assert len(rest[0].outputs[0].token_ids) == 60
    assert rest[0].outputs[0].text == first.outputs[0].text + rest[0].outputs[0].text_delta


@pytest.mark.parametrize("how", ["close", "with", "drop", "abort"])
def test_whoever_stops_reading_frees_the_pages(llm: LLM, how: str) -> None:
    stream = llm.stream("A story:", LONG)
    next(stream)
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    elif how == "drop":
        del stream
        gc.collect()
    else:
        llm.abort(stream.request_id)
        last = list(stream)[-1]
        assert last.outputs[0].finish_reason == "abort"
        assert last.finished
    wait_until(lambda: idle(llm))
    assert llm.stats().finished["abort"] >= 1


def test_wrong_requests_fail_before_the_first_item(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="empty"):
        llm.stream("")


def test_a_request_id_must_be_new(llm: LLM) -> None:
    first = llm.stream("A story:", LONG, request_id="mine")
    second = llm.stream("A story:", LONG, request_id="mine")
    with pytest.raises(EngineError, match="'mine' is in use"):
        next(second)
    assert first.request_id == "mine"
    assert len(next(first).outputs[0].token_ids) > 0
    first.close()
    wait_until(lambda: idle(llm))


def test_threads_share_batches_and_get_their_own_answers(
    tiny_and_long: Path, text_oracle: Oracle
) -> None:
    prompts = [f"{i} is a number" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=30)
    found: dict[int, RequestOutput] = {}

    def ask(index: int) -> None:
        (found[index],) = llm.generate(prompts[index], params)

    # It begins when all are there.
    with LLM(str(tiny_and_long), batch_timeout_ms=60_000, max_batch_size=8) as llm:
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert llm.stats().steps == 30
        for index, prompt in enumerate(prompts):
            assert list(found[index].prompt_token_ids) == llm.tokenize(prompt)
    for output in found.values():
        assert len(output.outputs[0].token_ids) == 30
        assert text_oracle(output.prompt_token_ids, output.outputs[0].token_ids)


def test_an_idle_engine_waits_for_company(tiny_with_text: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    with LLM(str(tiny_with_text), batch_timeout_ms=100_000, max_batch_size=2) as engine:
        streams = [engine.stream("One", params)]
        time.sleep(0.3)
        assert engine.stats().steps == 0
        streams.append(engine.stream("Two", params))  # a full batch: no reason to wait on
        start = time.monotonic()
        for stream in streams:
            list(stream)
        assert time.monotonic() - start < 60
        assert engine.stats().steps == 5


# -- asyncio ---------------------------------------------------------------------------


def test_async_requests_run_together(tiny_and_long: Path, text_oracle: Oracle) -> None:
    prompts = [f"{i} is a number" for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=25)

    async def collect(engine: AsyncLLM, prompt: str) -> None:
        text = ""
        async for output in engine.generate(prompt, params):
            text += output.outputs[0].text_delta
        assert list(output.prompt_token_ids) == engine.tokenize(prompt)
        assert text == output.outputs[0].text
        assert len(output.outputs[0].token_ids) == 25
        assert text_oracle(output.prompt_token_ids, output.outputs[0].token_ids)

    async def main() -> None:
        async with await AsyncLLM.create(str(tiny_and_long)) as engine:
            await asyncio.gather(*(collect(engine, p) for p in prompts))
            assert engine.stats().steps < 12 * 25 / 3

    asyncio.run(main())


def test_cancelling_closing_and_aborting_free_pages(tiny_and_long: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_and_long)) as engine:
            reads = asyncio.Event()

            async def read() -> None:
                async for _ in engine.generate("A story:", LONG):
                    reads.set()

            task = asyncio.create_task(read())
            await reads.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = engine.chat([{"role": "user", "content": "Hi"}], LONG)
            await anext(stream)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            stream = engine.generate("A story:", LONG, request_id="three")
            await anext(stream)
            await engine.abort("three")
            reasons = [o.outputs[0].finish_reason async for o in stream]
            assert reasons[-1] == "abort"
            await asyncio.to_thread(wait_until, lambda: idle(engine))
            assert engine.stats().finished == {"abort": 3}

    asyncio.run(main())


def test_an_event_loop_stays_responsive(tiny_with_text: Path) -> None:
    async def main() -> int:
        async with AsyncLLM(str(tiny_with_text)) as engine:
            ticks = 0
            streams = [engine.generate(f"{i}", LONG) for i in range(8)]
            readers = [asyncio.create_task(_drain(s)) for s in streams]
            while not all(reader.done() for reader in readers):
                await asyncio.sleep(0)
                ticks += 1
            return ticks

    async def _drain(stream: object) -> None:
        async for _ in stream:  # type: ignore[attr-defined]
            pass

    assert asyncio.run(main()) > 100


def test_closing_fails_what_is_unfinished(tiny_and_long: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(str(tiny_and_long))
        stream = engine.generate("A story:", LONG)
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass
        with pytest.raises(EngineClosedError):
            engine.generate("A story:", LONG)

    asyncio.run(main())


def test_closing_while_threads_submit_leaves_nobody_waiting(tiny_with_text: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed: {seed}")
    draw = random.Random(seed)
    for _ in range(5):
        engine = LLM(str(tiny_with_text))
        outcomes: list[str] = []

        def ask(engine: LLM = engine, outcomes: list[str] = outcomes) -> None:
            try:
                while True:
                    engine.generate("x", SamplingParams(max_tokens=3))
            except EngineClosedError:
                outcomes.append("closed")

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(draw.random() * 0.2)
        engine.close()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), "a request was never answered"
        assert outcomes == ["closed"] * 4
