"""Streaming, asyncio and threads: deltas, aborts, cancellation, shared batches."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pagedllm import LLM, AsyncLLM, SamplingParams
from pagedllm.errors import EngineClosedError, EngineError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pagedllm import RequestOutput

LONG = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def llm(tiny_with_text: Path) -> Iterator[LLM]:
    with LLM(str(tiny_with_text)) as engine:
        yield engine


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
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
    outputs = list(llm.stream("A story:", SamplingParams(temperature=0, max_tokens=50)))
    assert len(outputs) > 10
    assert outputs[0].metrics is not None
    assert outputs[0].metrics.finished_time is None
    assert outputs[-1].metrics is not None
    assert (outputs[-1].metrics.ttft or 0) < (outputs[-1].metrics.e2e_time or 0)


def test_a_slow_reader_gets_everything_in_fewer_pieces(llm: LLM) -> None:
    stream = llm.stream("A story:", SamplingParams(seed=2, max_tokens=60))
    first = next(stream)
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


def test_threads_share_batches_and_get_their_own_answers(llm: LLM) -> None:
    prompts = [f"{i} is a number" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]
    before = llm.stats()
    found: dict[int, Sequence[int]] = {}
    gate = threading.Barrier(8)

    def ask(index: int) -> None:
        gate.wait()
        found[index] = llm.generate(prompts[index], params)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == expected
    after = llm.stats()
    assert after.steps - before.steps < 8 * 30 / 2  # many requests to a step


def test_an_idle_engine_waits_for_company(tiny_with_text: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    with LLM(str(tiny_with_text), batch_timeout_ms=3000, max_batch_size=2) as engine:
        streams = [engine.stream("One", params)]
        time.sleep(0.3)
        assert engine.stats().steps == 0
        streams.append(engine.stream("Two", params))  # a full batch: no reason to wait on
        start = time.monotonic()
        for stream in streams:
            list(stream)
        assert time.monotonic() - start < 2.0
        assert engine.stats().steps == 5


# -- asyncio ---------------------------------------------------------------------------


def test_async_requests_run_together(tiny_with_text: Path, llm: LLM) -> None:
    prompts = [f"{i} is a number" for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=25)
    expected = [o.outputs[0] for o in llm.generate(prompts, params)]

    async def collect(engine: AsyncLLM, prompt: str) -> tuple[str, Sequence[int]]:
        text = ""
        async for output in engine.generate(prompt, params):
            text += output.outputs[0].text_delta
        return text, output.outputs[0].token_ids

    async def main() -> list[tuple[str, Sequence[int]]]:
        async with await AsyncLLM.create(str(tiny_with_text)) as engine:
            found = await asyncio.gather(*(collect(engine, p) for p in prompts))
            assert engine.stats().steps < 12 * 25 / 3
            return found

    assert asyncio.run(main()) == [(c.text, c.token_ids) for c in expected]


def test_cancelling_closing_and_aborting_free_pages(tiny_with_text: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_with_text)) as engine:

            async def read() -> None:
                async for _ in engine.generate("A story:", LONG):
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.1)
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


def test_closing_fails_what_is_unfinished(tiny_with_text: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(str(tiny_with_text))
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
            thread.join(timeout=20)
            assert not thread.is_alive(), "a request was never answered"
        assert outcomes == ["closed"] * 4
