"""LLM.generate on a real (tiny) model: right tokens, shapes of results, errors."""

from __future__ import annotations

import math
import random
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from in_step import slowly
from pagedllm import LLM, Config, SamplingParams
from pagedllm.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    ModelNotFoundError,
    RequestTooLongError,
    ValidationError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Oracle = Callable[[Sequence[int], Sequence[int]], bool]


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, 320) for _ in range(length)]


@pytest.fixture
def draw() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed: {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), skip_tokenizer_init=True, page_size=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def text_llm(tiny_with_text: Path) -> Iterator[LLM]:
    with LLM(str(tiny_with_text)) as engine:
        yield engine


# -- right tokens ----------------------------------------------------------------------


def test_a_batch_gives_what_transformers_gives(
    llm: LLM, oracle: Oracle, draw: random.Random
) -> None:
    prompts = [prompt(draw, draw.randint(1, 60)) for _ in range(12)]
    params = [greedy(draw.randint(1, 40)) for _ in prompts]
    outputs = llm.generate(prompts, params)
    for given, wanted, output in zip(prompts, params, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == wanted.max_tokens
        assert oracle(given, output.outputs[0].token_ids)
        assert output.outputs[0].finish_reason == "length"
        assert list(output.prompt_token_ids) == given
        assert output.finished


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_scarce_pages_chunks_and_depth_change_nothing(
    tiny_model: Path, oracle: Oracle, draw: random.Random, steps_in_flight: int
) -> None:
    config = Config(
        str(tiny_model), skip_tokenizer_init=True, page_size=4, num_pages=24, max_model_len=90,
        max_batch_size=6, max_num_batched_tokens=13, steps_in_flight=steps_in_flight,
    )  # fmt: skip
    prompts = [prompt(draw, draw.randint(1, 50)) for _ in range(20)]
    with LLM(config) as engine:
        outputs = engine.generate(prompts, greedy(40))
        stats = engine.stats()
    assert stats.preemptions > 0, "the cache was not scarce enough to test anything"
    for given, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 40
        assert oracle(given, output.outputs[0].token_ids)
    assert stats.cache.pages_used == 0


def test_a_prefix_hit_changes_nothing(llm: LLM, oracle: Oracle, draw: random.Random) -> None:
    prefix = prompt(draw, 40)
    llm.generate(prefix, greedy(1))
    given = [*prefix, *prompt(draw, 9)]
    (output,) = llm.generate(given, greedy(30))
    assert output.num_cached_tokens == 40
    assert oracle(given, output.outputs[0].token_ids)
    (salted,) = llm.generate(given, greedy(30), cache_salt="somebody else")
    assert salted.num_cached_tokens == 0
    assert oracle(given, salted.outputs[0].token_ids)


def test_two_hundred_requests_through_a_cache_for_a_fifth_of_them(
    tiny_model: Path, oracle: Oracle, draw: random.Random
) -> None:
    """Random lengths, priorities, aborts and n; greedy outputs are transformers'."""
    work = []
    for index in range(200):
        n = draw.choice((1, 1, 1, 2, 3))
        temperature = draw.choice((0.0, 0.0, 0.8))
        params = SamplingParams(
            temperature=temperature, n=n, max_tokens=draw.randint(1, 40), seed=index
        )
        work.append((prompt(draw, draw.randint(1, 60)), params, draw.randrange(4)))
    tokens = sum(p.n * (len(given) + (p.max_tokens or 0)) for given, p, _ in work)
    config = Config(
        str(tiny_model), skip_tokenizer_init=True, page_size=8, max_model_len=128,
        num_pages=tokens // 5 // 8, max_batch_size=200, scheduling_policy="priority",
        max_num_batched_tokens=256,
    )  # fmt: skip
    with LLM(config) as engine:
        streams = [engine.stream(g, p, priority=priority) for g, p, priority in work]
        aborted = set(draw.sample(range(200), 30))
        threads = [
            threading.Timer(draw.random(), streams[index].close) for index in sorted(aborted)
        ]
        for thread in threads:
            thread.start()
        results = [list(s)[-1] if i not in aborted else None for i, s in enumerate(streams)]
        for thread in threads:
            thread.join()
        for (given, params, _), result in zip(work, results, strict=True):
            if result is None:
                continue
            assert [len(c.token_ids) for c in result.outputs] == [params.max_tokens] * params.n
            if params.greedy:
                for completion in result.outputs:
                    assert oracle(given, completion.token_ids)
        stats = engine.stats()
    assert stats.running == stats.waiting == stats.cache.pages_used == 0
    assert stats.cache.pages_cached + stats.cache.pages_free == config.num_pages


def test_a_seed_gives_the_same_tokens_in_any_company(llm: LLM, draw: random.Random) -> None:
    given = prompt(draw, 10)
    seeded = SamplingParams(temperature=1.0, seed=1234, max_tokens=30)
    (alone,) = llm.generate(given, seeded)
    others = [prompt(draw, draw.randint(1, 40)) for _ in range(7)]
    crowd = llm.generate([*others, given], [*[SamplingParams(max_tokens=20)] * 7, seeded])
    assert crowd[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    (three,) = llm.generate(given, seeded.replace(n=3))
    assert three.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(c.token_ids) for c in three.outputs}) == 3


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(
    tiny_model: Path, draw: random.Random
) -> None:
    given = prompt(draw, 10)
    runs = []
    for _ in range(2):
        with LLM(str(tiny_model), skip_tokenizer_init=True, seed=5) as engine:
            outputs = engine.generate([given, given], SamplingParams(max_tokens=20))
        runs.append([o.outputs[0].token_ids for o in outputs])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_logprobs_are_those_of_the_model(tiny_model: Path, llm: LLM, draw: random.Random) -> None:
    from transformers import AutoModelForCausalLM

    given = prompt(draw, 21)
    (output,) = llm.generate(given, greedy(12, logprobs=3, prompt_logprobs=2))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    whole = [*given, *output.outputs[0].token_ids]
    with torch.no_grad():
        expected = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs[0] is None
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for position, entry in enumerate(found):
        assert entry is not None
        chosen = whole[position + 1]
        k = 2 if position + 1 < len(given) else 3
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[position, token]), abs=1e-3)
        # Of tokens that are as likely but for rounding either may come first.
        assert len(entry) == (k if entry[chosen].rank <= k else k + 1)
        listed = sorted((float(expected[position, token]) for token in entry), reverse=True)
        assert listed[:k] == pytest.approx(expected[position].topk(k).values.tolist(), abs=1e-4)
        own = expected[position] - expected[position, chosen]
        assert int((own > 1e-4).sum()) < entry[chosen].rank <= int((own > -1e-4).sum())
    total = sum(entry[t].logprob for entry, t in zip(
        output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True))  # fmt: skip
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_survive_chunks_preemption_and_cached_prefixes(
    tiny_model: Path, draw: random.Random
) -> None:
    prompts = [prompt(draw, 40) for _ in range(4)]
    params = greedy(12, prompt_logprobs=0)
    with LLM(str(tiny_model), skip_tokenizer_init=True) as roomy:
        expected = roomy.generate(prompts, params)
        again = roomy.generate(prompts, params)
    with LLM(
        str(tiny_model), skip_tokenizer_init=True, page_size=4, num_pages=16, max_model_len=60,
        max_num_batched_tokens=7, max_batch_size=4,
    ) as scarce:  # fmt: skip
        found = scarce.generate(prompts, params)
    for one, two, three in zip(expected, again, found, strict=True):
        assert one.prompt_logprobs is not None
        for position in range(1, 40):
            token = one.prompt_token_ids[position]
            values = [
                o.prompt_logprobs[position][token].logprob  # type: ignore[index]
                for o in (one, two, three)
            ]
            assert values == pytest.approx([values[0]] * 3, abs=1e-4)


# -- ends ------------------------------------------------------------------------------


def test_stop_tokens_end_an_answer_after_min_tokens(llm: LLM, draw: random.Random) -> None:
    given = prompt(draw, 10)
    # A salt for each: what a cached page saves would be rounded in other places.
    tokens = llm.generate(given, greedy(30), cache_salt="a")[0].outputs[0].token_ids
    stop = tokens[5]
    first = list(tokens).index(stop)
    (output,) = llm.generate(given, greedy(30, stop_token_ids=[stop]), cache_salt="b")
    assert output.outputs[0].token_ids == list(tokens)[: first + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    (longer,) = llm.generate(given, greedy(30, stop_token_ids=[stop], min_tokens=20))
    assert len(longer.outputs[0].token_ids) >= 20
    assert stop not in longer.outputs[0].token_ids[:19]


def test_the_end_token_ends_an_answer_unless_ignored(text_llm: LLM) -> None:
    eos = text_llm.tokenizer.eos_token_id
    bias = {eos: 100.0}
    (output,) = text_llm.generate("Hello there", greedy(5, logit_bias=bias))
    assert output.outputs[0].token_ids == [eos]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    assert output.outputs[0].text == ""
    (on,) = text_llm.generate("Hello there", greedy(5, logit_bias=bias, ignore_eos=True))
    assert on.outputs[0].token_ids == [eos] * 5
    assert on.outputs[0].finish_reason == "length"
    (later,) = text_llm.generate("Hello there", greedy(9, logit_bias=bias, min_tokens=3))
    assert len(later.outputs[0].token_ids) == 4


def test_stop_strings_cut_the_text(text_llm: LLM) -> None:
    # Greedy and without repetition: a text of words.
    params = SamplingParams(temperature=0, frequency_penalty=2.0, max_tokens=40)
    (whole,) = text_llm.generate("Some words", params)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    (cut,) = text_llm.generate("Some words", params.replace(stop=stop))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].stop_reason == stop
    (kept,) = text_llm.generate(
        "Some words", params.replace(stop=stop, include_stop_str_in_output=True)
    )
    assert kept.outputs[0].text == text[: text.index(stop)] + stop
    slow = params.replace(stop=stop, logits_processors=[slowly])
    pieces = [o.outputs[0].text_delta for o in text_llm.stream("Some words", slow)]
    assert "".join(pieces) == cut.outputs[0].text
    assert len(pieces) > 1


def test_without_max_tokens_an_answer_fills_the_model(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], greedy(1).replace(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 256 - 3
    assert output.outputs[0].finish_reason == "length"


def test_force_max_tokens_caps_every_answer(tiny_model: Path) -> None:
    with LLM(str(tiny_model), skip_tokenizer_init=True, force_max_tokens=4) as engine:
        lengths = [
            len(engine.generate([5], greedy(1).replace(max_tokens=wanted))[0].outputs[0].token_ids)
            for wanted in (3, 4, 100, None, 400)
        ]
    assert lengths == [3, 4, 4, 4, 4]


# -- chat ------------------------------------------------------------------------------


def test_chat_renders_the_template(text_llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer = text_llm.tokenizer
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    (one,) = text_llm.chat(messages, greedy(2))
    assert list(one.prompt_token_ids) == list(expected)
    many = text_llm.chat([messages, [*messages, {"role": "assistant", "content": "Yes"},
                                     {"role": "user", "content": "And?"}]], greedy(2))  # fmt: skip
    assert len(many) == 2
    assert list(many[0].prompt_token_ids) == list(expected)


# -- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "params", "error", "message"),
    [
        ("", greedy(4), ValidationError, "empty"),
        ([], greedy(4), None, ""),
        ([[]], greedy(4), ValidationError, "empty"),
        ([1, 10**9], greedy(4), ValidationError, "1000000000"),
        ([-1], greedy(4), ValidationError, "-1"),
        ([True], greedy(4), ValidationError, "boolean"),
        ([1.5], greedy(4), ValidationError, "1.5"),
        (5, greedy(4), ValidationError, "int"),
        ([1] * 600, greedy(4), RequestTooLongError, "600 tokens and max_model_len is 512"),
        ([1] * 500, greedy(40), RequestTooLongError, "at most 12"),
        ("x", greedy(4, stop_token_ids=[10**8]), ValidationError, "stop_token_ids"),
        ("x", greedy(4, logit_bias={10**8: 1}), ValidationError, "logit_bias"),
        ("x", greedy(4, allowed_token_ids=[10**8]), ValidationError, "allowed_token_ids"),
        ("x", greedy(4, logprobs=10**8), ValidationError, "logprobs"),
        ({"text": "x"}, greedy(4), ValidationError, "prompt_token_ids"),
        ("x", {"temperature": 0}, ValidationError, "SamplingParams"),
        (["x", ""], greedy(4), ValidationError, "prompt 1"),
        ("bad \ud800 surrogate", greedy(4), ValidationError, "surrogate"),
    ],
)
def test_a_wrong_request_is_one_clear_error_and_the_engine_goes_on(
    text_llm: LLM, given: object, params: object, error: type[Exception] | None, message: str
) -> None:
    if error is None:
        assert text_llm.generate(given, params) == []  # type: ignore[arg-type]
    else:
        with pytest.raises(error, match=message) as caught:
            text_llm.generate(given, params)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert len(text_llm.generate("Go on", greedy(3))[0].outputs[0].token_ids) == 3


def test_lists_must_match(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [greedy(1)] * 2)


def test_priority_needs_its_policy(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="scheduling_policy='priority'"):
        llm.generate([[1]], greedy(1), priority=2)


def test_text_without_a_tokenizer_is_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        llm.generate("text", greedy(1))
    with pytest.raises(ValidationError, match="stop needs a tokenizer"):
        llm.generate([1], greedy(1, stop="x"))
    with pytest.raises(ValidationError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_truncation_is_on_request_only(llm: LLM, oracle: Oracle, draw: random.Random) -> None:
    given = prompt(draw, 300)
    with pytest.raises(RequestTooLongError):
        llm.generate(given, greedy(4))
    (output,) = llm.generate(given, greedy(4, truncate_prompt_tokens=50))
    assert list(output.prompt_token_ids) == given[-50:]
    assert oracle(given[-50:], output.outputs[0].token_ids)


def test_a_failing_logits_processor_fails_its_request_alone(
    llm: LLM, oracle: Oracle, draw: random.Random
) -> None:
    def broken(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) > 12:
            raise ZeroDivisionError("user code")
        return logits

    given = prompt(draw, 10)
    with pytest.raises(EngineError, match="user code") as caught:
        llm.generate([given, given], [greedy(20), greedy(20, logits_processors=[broken])])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    good, bad = caught.value.outputs
    assert oracle(given, good.outputs[0].token_ids)
    assert bad.outputs[0].finish_reason == "error"
    assert len(bad.outputs[0].token_ids) == 3
    assert llm.stats().cache.pages_used == 0


def test_a_failed_step_fails_its_requests_and_the_engine_lives_on(
    tiny_model: Path, oracle: Oracle, draw: random.Random
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with LLM.from_model(model, model_impl="generic") as engine:
        given = prompt(draw, 10)
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda *_: (_ for _ in ()).throw(MemoryError("no room on the device"))
        )
        with pytest.raises(EngineError, match="no room on the device") as caught:
            engine.generate(given, greedy(4))
        assert isinstance(caught.value.__cause__, MemoryError)
        hook.remove()
        (output,) = engine.generate(given, greedy(20))
        assert oracle(given, output.outputs[0].token_ids)
        assert output.num_cached_tokens == 0  # pages of the failed step are not found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 10_000}, "256 positions"),
        ({"num_pages": 4, "max_model_len": 200}, "needs 13 pages"),
        ({"kv_cache_memory": 10}, "no room for one page"),
        ({"max_num_batched_tokens": 8, "max_batch_size": 9}, "max_batch_size=9"),
        ({"executor": "nosuch"}, "no plugin"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"page_sice": 4}, "page_size"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    tiny_model: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), skip_tokenizer_init=True, **settings)


def test_an_unknown_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        LLM("smolm2")
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_a_short_cache_lowers_the_models_length_and_says_so(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(tiny_model), skip_tokenizer_init=True, page_size=8, num_pages=10) as engine:
        assert engine.model_info.max_model_len == 80
    assert "max_model_len is 80 and not the model's 256" in caplog.text


def test_a_closed_engine_says_so(tiny_and_long: Path) -> None:
    engine = LLM(str(tiny_and_long), skip_tokenizer_init=True)
    stream = engine.stream([1, 2], greedy(1).replace(max_tokens=None))
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError, match="closed"):
        engine.generate([[1]], greedy(1))
    assert engine.health() == "the engine is closed"


def test_infinities_do_not_leak_into_logprobs(llm: LLM) -> None:
    (output,) = llm.generate([3, 4], greedy(2, allowed_token_ids=[5, 6], logprobs=1))
    assert set(output.outputs[0].token_ids) <= {5, 6}
    assert math.isfinite(output.outputs[0].cumulative_logprob or 0)
