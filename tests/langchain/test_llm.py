"""PagedLLM: one batch, real streams, nothing dropped; among them faults that others have."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, load
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField

from in_step import slowly
from pagedllm import LLM, EngineClosedError, PagedLLM, SamplingParams


class Recorder(BaseCallbackHandler):
    def __init__(self):
        self.started, self.tokens, self.ended, self.errors = [], [], [], []

    def on_llm_start(self, serialized, prompts, **kwargs):
        self.started.append((prompts, kwargs))

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)

    def on_llm_end(self, response, **kwargs):
        self.ended.append(response)

    def on_llm_error(self, error, **kwargs):
        self.errors.append(error)


@pytest.fixture
def llm(settings):
    return PagedLLM(**settings, temperature=0)


def direct(llm, prompt, **fields):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, **fields})
    return llm.engine.generate(prompt, params)[0].outputs[0]


def test_invoke_is_what_the_engine_answers(llm):
    assert llm.invoke("Once upon a time") == direct(llm, "Once upon a time").text


def test_a_batch_of_64_is_one_batch_in_the_engine(llm):
    prompts = [f"Number {i} is" for i in range(64)]
    before = llm.engine.stats()
    texts = llm.batch(prompts)
    after = llm.engine.stats()
    assert after.requests - before.requests == 64
    # 64 answers of 12 tokens: one after another they would take 768 steps. On a busy machine
    # the engine may begin before the last ones are there.
    assert after.steps - before.steps <= 5 * 12
    assert texts == [direct(llm, prompt).text for prompt in prompts]


def test_an_async_batch_of_64_is_one_batch_in_the_engine(llm):
    prompts = [f"Number {i} is" for i in range(64)]
    before = llm.engine.stats().steps
    texts = asyncio.run(llm.abatch(prompts))
    assert llm.engine.stats().steps - before <= 5 * 12
    assert len(texts) == 64


def test_max_concurrency_is_respected(llm):
    before = llm.engine.stats().steps
    llm.batch(["a", "b", "c", "d"], config={"max_concurrency": 1})
    assert llm.engine.stats().steps - before >= 4 * 12


def test_a_stream_comes_in_pieces_that_add_up(settings):
    # Drawn, not greedy: a random model's likeliest token may be no text at all.
    llm = PagedLLM(**{**settings, "max_tokens": 48}, seed=20)
    pieces = list(llm.stream("Once upon a time", logits_processors=[slowly]))
    assert len(pieces) > 2
    assert "".join(pieces) == llm.invoke("Once upon a time")


def test_an_async_stream_comes_in_pieces_and_leaves_the_loop_free(settings):
    llm = PagedLLM(**{**settings, "max_tokens": 48}, seed=20)

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        stream = llm.astream("Once upon a time", logits_processors=[slowly])
        pieces = [piece async for piece in stream]
        ticking.cancel()
        return pieces, ticks

    pieces, ticks = asyncio.run(run())
    assert len(pieces) > 2
    assert "".join(pieces) == llm.invoke("Once upon a time")
    assert ticks > len(pieces)


def test_async_calls_share_batches(llm):
    async def run():
        return await asyncio.gather(*(llm.ainvoke(f"Number {i}") for i in range(16)))

    before = llm.engine.stats().steps
    assert len(asyncio.run(run())) == 16
    assert llm.engine.stats().steps - before < 16 * 12 / 2


def test_the_constructors_stop_holds_when_a_call_has_none(settings):
    # Greedy and without repetition: a text of a dozen words.
    words = {**settings, "temperature": 0, "frequency_penalty": 2.0}
    llm = PagedLLM(**words)
    text = llm.invoke("Once upon a time")
    stop = text[5:9]
    stopped = PagedLLM(**words, stop=[stop])
    expected = text[: text.index(stop)]
    assert stopped.invoke("Once upon a time") == expected
    assert stopped.batch(["Once upon a time"]) == [expected]
    assert "".join(stopped.stream("Once upon a time")) == expected
    assert asyncio.run(stopped.ainvoke("Once upon a time")) == expected
    # a call's own takes its place
    assert stopped.invoke("Once upon a time", stop=["no such text"]) == text
    assert stopped.bind(stop=[text[:3]]).invoke("Once upon a time") == ""


def test_a_stop_string_over_several_tokens_is_found_when_streaming(settings):
    llm = PagedLLM(**settings, temperature=0, frequency_penalty=2.0)
    answer = direct(llm, "Once upon a time", frequency_penalty=2.0)
    middle = llm.engine.tokenizer.decode(list(answer.token_ids[4:7]))
    stop = middle[1:-1]
    assert len(llm.get_token_ids(stop)) > 1
    expected = answer.text[: answer.text.index(stop)]
    assert "".join(llm.stream("Once upon a time", stop=[stop])) == expected
    assert llm.invoke("Once upon a time", stop=[stop]) == expected


def test_n_logprobs_finish_reasons_and_usage_are_reported(llm):
    result = llm.generate(["Once upon a time", "x"], n=3, logprobs=2, temperature=1.0, seed=1)
    assert [len(answers) for answers in result.generations] == [3, 3]
    for answers in result.generations:
        for answer in answers:
            info = answer.generation_info
            assert info["finish_reason"] in ("stop", "length")
            content = info["logprobs"]["content"]
            assert 1 <= len(content) <= 12
            assert all(entry["logprob"] <= 0 for entry in content)
            assert all(len(entry["top_logprobs"]) >= 2 for entry in content)
    usage = result.llm_output["token_usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] > 12
    assert result.llm_output["model_name"] == llm.model_id


def test_cached_tokens_are_counted(llm):
    prompt = "The same long beginning, over and over again, and then once more: " * 3
    llm.invoke(prompt)
    usage = llm.generate([prompt]).llm_output["token_usage"]
    assert usage["cached_tokens"] >= 16


def test_unknown_names_raise_and_name_the_nearest(llm, settings):
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        PagedLLM(**settings, temprature=0)
    with pytest.raises(ValueError, match="did you mean 'top_p'"):
        llm.invoke("x", topp=0.5)
    with pytest.raises(ValueError, match="top_pp"):
        list(llm.stream("x", top_pp=0.5))
    with pytest.raises(ValueError, match="another"):
        llm.invoke("x", model="another model")


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"n": 0}, {"engine_config": {"no_such": 1}}, {"top_p": "much"}],
    ids=str,
)
def test_wrong_values_raise_at_construction(settings, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name if name != "engine_config" else "no_such"):
        PagedLLM(**{**settings, **wrong})


def test_every_sampling_parameter_is_a_field_and_a_keyword(settings):
    import dataclasses

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names <= set(PagedLLM.model_fields)
    changed = {
        "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "typical_p": 0.5,
        "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0, "seed": 3,
        "stop": ["a"], "stop_token_ids": [5], "ignore_eos": True, "max_tokens": 7,
        "min_tokens": 2, "logprobs": 1, "prompt_logprobs": 1, "logit_bias": {4: 1.0},
        "allowed_token_ids": [1, 2], "bad_words": ["x"], "skip_special_tokens": False,
        "include_stop_str_in_output": True, "truncate_prompt_tokens": 5,
        "structured_output": {"regex": "a"}, "logits_processors": [lambda ids, logits: logits],
    }  # fmt: skip
    assert set(changed) == names, "a new parameter needs a field and a line here"
    plain = SamplingParams(max_tokens=12)
    for name, value in changed.items():
        made = PagedLLM(**{**settings, name: value}).sampling_params()
        called = PagedLLM(**settings).sampling_params(**{name: value})
        assert made == called == plain.replace(**{name: value})


def test_structured_output_and_logits_processors_reach_the_engine(settings):
    llm = PagedLLM(**settings, structured_output={"choice": ["yes", "no"]})
    assert set(llm.batch(["x", "y"])) <= {"yes", "no"}
    seen = []

    def watch(token_ids, logits):
        seen.append(len(token_ids))
        return logits

    PagedLLM(**settings, logits_processors=[watch], ignore_eos=True).invoke("Once upon")
    assert len(seen) == 12


def test_a_chain_works_in_every_form(llm):
    chain = PromptTemplate.from_template("Tell me about {thing}") | llm | StrOutputParser()
    things = [{"thing": "cats"}, {"thing": "dogs"}]
    expected = [direct(llm, f"Tell me about {each['thing']}").text for each in things]
    assert chain.invoke(things[0]) == expected[0]
    assert chain.batch(things) == expected
    assert "".join(chain.stream(things[1])) == expected[1]
    assert asyncio.run(chain.ainvoke(things[0])) == expected[0]
    assert asyncio.run(chain.abatch(things)) == expected


def test_callbacks_hear_of_every_run_and_token(llm):
    recorder = Recorder()
    text = "".join(llm.stream("Once upon", config={"callbacks": [recorder]}))
    assert "".join(recorder.tokens) == text
    assert len(recorder.started) == len(recorder.ended) == 1
    info = recorder.ended[0].generations[0][0].generation_info
    assert info["finish_reason"] == "length"
    assert info["token_usage"]["completion_tokens"] == 12
    batch = Recorder()
    llm.batch(["a", "b", "c"], config={"callbacks": [batch]})
    assert len(batch.ended) == 3
    broken = Recorder()
    with pytest.raises(ValueError, match="max_tokens"):
        llm.invoke("x", config={"callbacks": [broken]}, max_tokens=10**6)
    assert len(broken.errors) == 1


def test_a_cache_tells_settings_apart(settings):
    cache = InMemoryCache()
    one = PagedLLM(**settings, cache=cache, temperature=0)
    first = one.invoke("Once upon")
    before = one.engine.stats().requests
    assert one.invoke("Once upon") == first
    assert one.engine.stats().requests == before
    for change in (
        {"repetition_penalty": 1.7},
        {"max_tokens": 5},
        {"logit_bias": {7: 3.0}},
        {"structured_output": {"choice": ["a"]}},
        {"logits_processors": [lambda ids, logits: -logits]},
    ):
        other = PagedLLM(**{**settings, "temperature": 0, "cache": cache, **change})
        before = other.engine.stats().requests
        other.invoke("Once upon")  # random weights: the text may well be the same
        assert other.engine.stats().requests == before + 1, change
    assert one._identifying_params["dtype"] == "float32"


def test_configurable_fields_and_bind(llm):
    flexible = llm.configurable_fields(max_tokens=ConfigurableField(id="length"))
    short = flexible.with_config(configurable={"length": 3}).invoke("Once upon")
    assert short == direct(llm, "Once upon", max_tokens=3).text
    assert llm.bind(max_tokens=3).invoke("Once upon") == short


def test_tracing_gets_the_model_and_its_settings(llm):
    params = llm._get_ls_params(stop=["x"])
    assert params["ls_provider"] == "pagedllm"
    assert params["ls_model_name"] == llm.model_id
    assert params["ls_model_type"] == "llm"
    assert params["ls_temperature"] == 0
    assert params["ls_max_tokens"] == 12
    assert params["ls_stop"] == ["x"]


def test_serialisation_round_trips_without_the_secret(settings):
    llm = PagedLLM(**settings, token="hf_secret", stop=["x"])
    written = dumpd(llm)
    assert "hf_secret" not in json.dumps(written)
    again = load(written, allowed_objects=[PagedLLM], valid_namespaces=["langchain_pagedllm"])
    assert again._identifying_params == llm._identifying_params


def test_copies_and_pickles_work_on(llm):
    text = llm.invoke("Once upon")
    for other in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy()):
        assert other.invoke("Once upon") == text
    assert pickle.loads(pickle.dumps(llm)).invoke("Once upon") == text


def test_tokens_are_counted_by_the_models_own_tokenizer(llm):
    text = "Zürich naïve 🙂"
    assert llm.get_token_ids(text) == llm.engine.tokenizer(text)["input_ids"]
    assert llm.get_num_tokens(text) == len(llm.engine.tokenizer(text)["input_ids"])


def test_a_timeout_aborts_and_frees(settings):
    slow = PagedLLM(**{**settings, "max_tokens": 900, "timeout": 0.02, "ignore_eos": True})
    with pytest.raises(TimeoutError):
        slow.invoke("Once upon")
    with pytest.raises(TimeoutError):
        asyncio.run(slow.ainvoke("Once upon"))
    with pytest.raises(TimeoutError):
        list(slow.stream("Once upon"))
    assert slow.engine.stats().running == 0


def test_leaving_a_stream_aborts_its_request(settings):
    llm = PagedLLM(**{**settings, "max_tokens": 900, "ignore_eos": True})
    stream = llm.stream("Once upon")
    next(stream)
    stream.close()
    for _ in range(100):
        if llm.engine.stats().running == 0:
            return
    pytest.fail("the request still runs")


def test_n_answers_cannot_be_streamed(llm):
    with pytest.raises(ValueError, match="n=2"):
        list(llm.stream("x", n=2))


class TestSharing:
    def test_equal_settings_share_one_engine_and_others_do_not(self, settings, llm):
        assert PagedLLM(**settings, temperature=0.7).engine is llm.engine
        with PagedLLM(**{**settings, "max_model_len": 128}) as other:
            assert other.engine is not llm.engine

    def test_weights_load_at_first_use_and_go_with_the_last_user(self, tiny_chat):
        own = {"model_id": tiny_chat, "dtype": "float32", "engine_config": {"num_pages": 33}}
        one, two, never = (PagedLLM(**own, max_tokens=2) for _ in range(3))
        engine = one.engine
        assert isinstance(engine, LLM)
        assert two.engine is engine
        one.close()
        assert not engine.closed
        assert two.invoke("x")
        with pytest.raises(EngineClosedError, match="closed"):
            one.invoke("x")
        two.close()
        two.close()
        assert engine.closed
        never.close()

    def test_the_last_one_collected_closes_it(self, tiny_chat):
        import gc

        one = PagedLLM(model_id=tiny_chat, engine_config={"num_pages": 34}, max_tokens=2)
        engine = one.engine
        del one
        gc.collect()
        assert engine.closed

    def test_threads_that_start_together_load_once(self, tiny_chat):
        from concurrent.futures import ThreadPoolExecutor

        made = [
            PagedLLM(model_id=tiny_chat, engine_config={"num_pages": 35}, max_tokens=2)
            for _ in range(8)
        ]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda each: each.engine, made))
        assert len({id(engine) for engine in found}) == 1
        for each in made:
            each.close()
        assert found[0].closed

    def test_a_model_that_is_not_there_says_so_each_time(self):
        from pagedllm import ModelNotFoundError

        llm = PagedLLM(model_id="./no/such/folder")
        for _ in range(2):
            with pytest.raises(ModelNotFoundError, match="no/such/folder"):
                llm.invoke("x")
