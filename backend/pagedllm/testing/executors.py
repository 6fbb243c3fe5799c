"""What every executor must do, whoever runs its steps.

Owner: plugins; public.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pagedllm import LLM, Config, EngineError, SamplingParams
from pagedllm.testing.models import tiny_model
from pagedllm.types import PageWrite, Row, ScheduleStep, SlotInit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pagedllm.executors.base import Executor
    from pagedllm.types import ModelInfo, StepOutput

PROMPTS = [[1], [5, 6, 7], list(range(40, 57)), [9] * 33, [250, 3, 250, 3, 77]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class FailingProcessor:
    """A logits processor of one request, and that request's own mistake."""

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        """Fail."""
        raise ZeroDivisionError("a request's own logits processor")


class ExecutorSuite:
    """Checks of what ``pagedllm_create_executor`` builds under the name :attr:`executor`.

    The checks run a model of two layers in fp32 on the CPU. The plugin has to be installed.
    """

    executor: str
    """What ``Config(executor=...)`` says."""
    settings: Any = {}  # noqa: RUF012 - to be replaced whole
    """More settings of the engine, such as ``{"tensor_parallel_size": 2}``."""

    # -- what the checks stand on ----------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def model_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The model of the checks."""
        return tiny_model(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, model_folder: Path) -> Config:
        """Of the engines and executors of the checks."""
        values = {"threads": 1, "max_batch_size": 4, "page_size": 8, "num_pages": 64, "seed": 0}
        config = Config(
            str(model_folder),
            skip_tokenizer_init=True,
            executor=cls.executor,
            dtype="float32",
            device="cpu",
            **{**values, **cls.settings},
        )
        return config.resolve()

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, model_folder: Path) -> list[list[int]]:
        """What transformers' own generate continues each prompt with."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        answers = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=GREEDY.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
        return answers

    def make(self, config: Config, load: Any) -> Executor:
        """Build an executor that is not started, as an engine does."""
        from pagedllm.client import _make_executor

        return _make_executor(config, load)

    @pytest.fixture
    def alone(self, config: Config) -> Iterator[tuple[Executor, ModelInfo]]:
        """An executor without an engine, started, and what its start returned."""
        executor = self.make(config, _loader(config))
        try:
            yield executor, executor.start()
        finally:
            executor.close()

    # -- the protocol ----------------------------------------------------------------------

    def test_start_describes_the_model(
        self, alone: tuple[Executor, ModelInfo], config: Config
    ) -> None:
        """The scheduler hands out the pages that ``start`` reports."""
        executor, info = alone
        depth = executor.max_steps_in_flight
        assert isinstance(depth, int) and depth >= 1, f"max_steps_in_flight is {depth!r}"
        assert info.page_size == config.page_size, f"page_size is {info.page_size}"
        assert info.num_pages == config.num_pages, (
            f"num_pages={config.num_pages} was asked for, and start() reports {info.num_pages}"
        )
        assert info.vocab_size == 257, f"the vocabulary is 257, not {info.vocab_size}"
        assert 1 <= info.max_model_len <= 256, f"max_model_len is {info.max_model_len}"
        assert executor.health() is None, f"just started, and health() says {executor.health()}"

    def test_steps_come_back_in_their_order(
        self, alone: tuple[Executor, ModelInfo], expected: list[list[int]]
    ) -> None:
        """As many as may be in flight; each reads what the one before it drew."""
        executor, _ = alone
        steps = [_first_step(PROMPTS[1])]
        start = len(PROMPTS[1])
        for number in range(1, 5):
            steps.append(ScheduleStep(number, (Row(0, 1, start + number - 1, 1, True),)))
        outputs = _run(executor, steps)
        order = [output.step_id for output in outputs]
        assert order == list(range(5)), f"steps 0 to 4 were submitted, and {order} collected"
        tokens = [_token(output) for output in outputs]
        assert tokens == expected[1][:5], f"drawn {tokens}, and transformers {expected[1][:5]}"

    def test_a_slot_is_used_again(
        self, alone: tuple[Executor, ModelInfo], expected: list[list[int]]
    ) -> None:
        """A sequence that leaves and one that enters in the same step share nothing."""
        executor, _ = alone
        outputs = _run(executor, [_first_step(PROMPTS[3])])
        again = _first_step(PROMPTS[4], step=1, generation=2, released=(0,))
        outputs += _run(executor, [again])
        tokens = [_token(output) for output in outputs]
        wanted = [expected[3][0], expected[4][0]]
        assert tokens == wanted, f"a slot used twice gave {tokens}, not {wanted}"

    def test_a_failing_step_is_its_result(
        self, alone: tuple[Executor, ModelInfo], expected: list[list[int]]
    ) -> None:
        """Submit and collect do not raise it, and the next step works."""
        executor, _ = alone
        impossible = ScheduleStep(0, (Row(2, 1, 0, 1, True),))  # nobody is in slot 2
        try:
            [output] = _run(executor, [impossible])
        except Exception as error:
            raise AssertionError(
                f"a step that fails must come back as StepOutput(error=...); the executor "
                f"raised {type(error).__name__}: {error}"
            ) from error
        assert output.error is not None, f"a step of an empty slot gave {output}"
        [output] = _run(executor, [_first_step(PROMPTS[0], step=1)])
        assert _token(output) == expected[0][0], "after a step that failed the next is wrong"

    def test_a_failing_row_fails_alone(
        self, alone: tuple[Executor, ModelInfo], expected: list[list[int]]
    ) -> None:
        """One request's mistake is no other request's."""
        executor, _ = alone
        failing = GREEDY.replace(logits_processors=[FailingProcessor()])
        one, other = _first_step(PROMPTS[1]), _first_step(PROMPTS[2], slot=1, params=failing)
        step = ScheduleStep(
            0,
            one.rows + other.rows,
            added=one.added + other.added,
            page_writes=one.page_writes + other.page_writes,
        )
        [output] = _run(executor, [step])
        assert output.error is None, f"one row's failure failed the step: {output.error}"
        good, bad = output.rows
        assert good.error is None and good.token_id == expected[1][0], f"the sound row: {good}"
        assert bad.error is not None, f"the failing row: {bad}"

    def test_a_model_that_cannot_be_loaded(self, config: Config) -> None:
        """``start`` raises what loading raises, and ``close`` still works."""
        executor = self.make(config, _no_weights)
        with pytest.raises(Exception, match="the weights are not there"):
            executor.start()
        executor.close()

    def test_close_gives_all_back(self, config: Config) -> None:
        """Nothing holds the model any more, closing twice is harmless, and health says so."""
        watched = _Watched(_loader(config))
        executor = self.make(config, watched)
        executor.start()
        _run(executor, [_first_step(PROMPTS[1])])
        executor.close()
        executor.close()
        gc.collect()
        held = [reference for reference in watched.loaded if reference() is not None]
        assert not held, "the model is still held after close()"
        assert executor.health() is not None, "closed, and health() says that all is well"

    # -- in an engine ------------------------------------------------------------------------

    def test_an_engine_gives_transformers_tokens(
        self, config: Config, expected: list[list[int]]
    ) -> None:
        """Requests that share batches, in chunks and out of step."""
        with LLM(config) as llm:
            self._compare(llm, expected)

    def test_an_engine_that_runs_out_of_pages(
        self, config: Config, expected: list[list[int]]
    ) -> None:
        """Sequences are preempted, computed again, share pages and copy them."""
        with LLM(config.replace(num_pages=9, max_model_len=60)) as llm:
            self._compare(llm, expected)
            self._compare(llm, expected)
            forked = llm.generate(PROMPTS[4], GREEDY.replace(n=3), use_tqdm=False)[0]
            answers = [list(output.token_ids) for output in forked.outputs]
            assert answers == [expected[4]] * 3, f"three answers of one prompt: {answers}"
            stats = llm.stats()
            assert stats.cache.pages_used == 0, f"{stats.cache.pages_used} pages are left behind"

    def _compare(self, llm: LLM, expected: list[list[int]]) -> None:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for prompt, output, wanted in zip(PROMPTS, outputs, expected, strict=True):
            tokens = list(output.outputs[0].token_ids)
            assert tokens == wanted, f"after {prompt}: {tokens}, and transformers {wanted}"


def _no_weights() -> Any:
    raise EngineError("the weights are not there")


class _Watched:
    """Loads, and watches the models that were loaded in this process."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.loaded: list[weakref.ref[Any]] = []
        self._load = load

    def __call__(self) -> Any:
        model = self._load()
        self.loaded.append(weakref.ref(model))
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watched, (self._load,)


def _loader(config: Config) -> Callable[[], Any]:
    from pagedllm.client import _load_model

    return partial(_load_model, config, config.model)


def _first_step(
    prompt: Sequence[int],
    *,
    step: int = 0,
    slot: int = 0,
    generation: int = 1,
    released: tuple[int, ...] = (),
    params: SamplingParams = GREEDY,
) -> ScheduleStep:
    """A whole prompt in one step, in eight pages of the slot's own."""
    init = SlotInit(
        slot=slot,
        generation=generation,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        params=params,
        seed=0,
    )
    pages = tuple(range(8 * slot, 8 * slot + 8))
    return ScheduleStep(
        step,
        (Row(slot, generation, 0, len(prompt), True),),
        released=released,
        added=(init,),
        page_writes=(PageWrite(slot, 0, pages),),
    )


def _run(executor: Executor, steps: Sequence[ScheduleStep]) -> list[StepOutput]:
    """Submit as many as may be in flight, collect the oldest, and so on."""
    outputs = []
    for number, step in enumerate(steps):
        executor.submit(step)
        if number + 1 >= executor.max_steps_in_flight:
            outputs.append(executor.collect())
    while len(outputs) < len(steps):
        outputs.append(executor.collect())
    return outputs


def _token(output: StepOutput) -> int | None:
    assert output.error is None, f"the step failed: {output.error}"
    [row] = output.rows
    assert row.error is None, f"the row failed: {row.error}"
    return row.token_id
