"""Answers from a plugin's store: the right ones, in every form, and none that is not sure."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import shutil
import threading
import time

import pytest

import pagedllm
from pagedllm import LLM, AsyncLLM, ConfigError, SamplingParams
from pagedllm.response_cache import store as bounded
from plugin_site import installed

PLUGIN = """
    import threading
    from pagedllm import hookimpl

    answers, calls = {}, []
    fail = None
    gate = threading.Event()
    gate.set()
    waiting = threading.Event()

    class Shelf:
        def __init__(self, config, *, timeout=30.0):
            self.timeout = timeout

        def get(self, keys):
            calls.append(("get", len(keys)))
            if not gate.is_set():
                waiting.set()
            gate.wait()
            if fail:
                raise fail
            return [answers.get(key) for key in keys]

        def put(self, key, answer):
            calls.append(("put", key))
            if fail:
                raise fail
            answers[key] = answer

        def close(self):
            calls.append(("close", None))

    @hookimpl
    def pagedllm_response_caches():
        return {"shelf": "shelf:Shelf"}
"""
GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEXT = "The cat sat on"


@pytest.fixture(scope="module", autouse=True)
def _plugin(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("site"), shelf=PLUGIN):
        yield


@pytest.fixture
def shelf(request):
    module = importlib.import_module("shelf")
    module.answers.clear()
    module.calls.clear()
    module.fail = None
    module.waiting.clear()
    module.gate.set()
    yield module
    module.gate.set()
    # What engines still have to store must not come into the next test's store. One look-up
    # comes after all answers before it, and an answer that fails is not stored itself.
    for name in {"llm", "thread_llm"} & set(request.fixturenames):
        engine = request.getfixturevalue(name)
        end = engine.tokenizer.eos_token_id
        with pytest.raises(pagedllm.EngineError, match="no token is left"):
            once(engine, params=SamplingParams(min_tokens=1, seed=0, allowed_token_ids=[end]))
        until(lambda engine=engine: not engine._entry._store._unstored)


@pytest.fixture(scope="module", params=["thread", "process"])
def llm(request, tiny_with_text, _plugin):
    with LLM(str(tiny_with_text), engine=request.param, response_cache="shelf") as llm:
        yield llm


@pytest.fixture(scope="module")
def thread_llm(tiny_with_text, _plugin):
    with LLM(str(tiny_with_text), response_cache="shelf") as llm:
        yield llm


def until(condition):
    """Wait for what other threads do; the test's own time-out ends it."""
    while not condition():
        time.sleep(0.002)


def once(llm, prompt=TEXT, params=GREEDY, **options):
    return llm.generate(prompt, params, **options)[0]


def same(first, second):
    """Whether two outputs are equal but for ids, times and where they came from."""
    own = {"request_id": "", "metrics": None, "from_response_cache": False, "num_cached_tokens": 0}
    return dataclasses.replace(first, **own) == dataclasses.replace(second, **own)


# -- equal requests -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=7, max_tokens=9, n=2, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2),
        SamplingParams(
            seed=1, max_tokens=20, stop=["e", "a", "o"], include_stop_str_in_output=True
        ),
        SamplingParams(temperature=0, max_tokens=8, structured_output={"choice": ["yes", "no"]}),
        SamplingParams(temperature=0, max_tokens=4, logit_bias={5: 1.5}, bad_words=["the"]),
    ],
    ids=["greedy", "seeded", "logprobs", "stop", "structured", "bias"],
)
def test_the_second_of_two_equal_requests_is_the_first_ones_answer(llm, shelf, params):
    computed = llm.stats().generated_tokens
    first, second = once(llm, params=params), once(llm, params=params)
    assert (first.from_response_cache, second.from_response_cache) == (False, True)
    assert same(first, second)
    tokens = sum(len(answer.token_ids) for answer in first.outputs)
    stats = llm.stats()
    assert stats.generated_tokens - computed == tokens
    assert second.num_cached_tokens == 0
    assert second.metrics.arrival_time <= second.metrics.first_token_time
    assert second.request_id != first.request_id


def test_a_stored_answer_is_streamed_in_pieces(llm, shelf):
    params = SamplingParams(seed=3, max_tokens=50, n=2, logprobs=1, ignore_eos=True)
    whole = once(llm, params=params)
    pieces = list(llm.stream(TEXT, params))
    assert 2 < len(pieces) <= 33
    assert all(piece.from_response_cache for piece in pieces)
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for index, answer in enumerate(whole.outputs):
        mine = [piece.outputs[index] for piece in pieces]
        assert "".join(each.text_delta for each in mine) == answer.text
        assert [t for each in mine for t in each.new_token_ids] == list(answer.token_ids)
        for each in mine:
            assert answer.text.startswith(each.text)
            assert len(each.logprobs) == len(each.token_ids) == len(each.text_offsets)
        assert mine[0].finish_reason is None
    last = dataclasses.replace(pieces[-1], outputs=whole.outputs)
    assert same(last, whole)
    final = [dataclasses.replace(a, text_delta="", new_token_ids=()) for a in pieces[-1].outputs]
    assert final == [dataclasses.replace(a, text_delta="", new_token_ids=()) for a in whole.outputs]


def test_a_stream_that_is_left_early_leaves_nothing_behind(llm, shelf):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = once(llm, params=params)
    with llm.stream(TEXT, params) as stream:
        assert next(stream).from_response_cache
    assert same(once(llm, params=params), whole)


def test_asyncio_and_chats_are_answered_too(thread_llm, shelf):
    messages = [{"role": "user", "content": "Hello"}]
    first = thread_llm.chat(messages, GREEDY)[0]

    async def chat():
        outputs = [output async for output in thread_llm.as_async().chat(messages, GREEDY)]
        again = [output async for output in thread_llm.as_async().chat(messages, GREEDY)]
        return outputs, again

    outputs, again = asyncio.run(chat())
    assert len(outputs) > 1
    assert outputs[-1].from_response_cache
    assert outputs[-1].outputs[0].text == first.outputs[0].text
    assert "".join(each.outputs[0].text_delta for each in again) == first.outputs[0].text


def test_a_batch_is_looked_up_at_once(thread_llm, shelf):
    prompts = [[5 + i, 6, 7] for i in range(20)]
    first = thread_llm.generate(prompts, GREEDY)
    shelf.calls.clear()
    hits = thread_llm.stats().response_cache.hits
    second = thread_llm.generate(prompts, GREEDY)
    assert all(map(same, first, second))
    assert all(each.from_response_cache for each in second)
    lookups = [number for kind, number in shelf.calls if kind == "get"]
    assert sum(lookups) <= 20  # what is still on its way to the store is not asked for
    assert thread_llm.stats().response_cache.hits == hits + 20


def test_engines_share_answers_by_what_is_in_the_folder(tiny_with_text, tmp_path, shelf):
    from safetensors.torch import load_file, save_file

    with LLM(str(tiny_with_text), response_cache="shelf") as llm:
        first = once(llm)
    shutil.copytree(tiny_with_text, tmp_path / "copy")
    with LLM(str(tmp_path / "copy"), response_cache="shelf") as llm:
        second = once(llm)
    assert second.from_response_cache
    assert same(first, second)
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    weights["model.norm.weight"] *= -1
    save_file(weights, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    with LLM(str(tmp_path / "copy"), response_cache="shelf") as llm:
        assert not once(llm).from_response_cache


def test_what_is_not_stored_yet_when_the_engine_closes_is_stored(tiny_with_text, shelf):
    with LLM(str(tiny_with_text), response_cache="shelf") as llm:
        llm.generate([[i, 8, 9] for i in range(5, 15)], GREEDY)
    assert len(shelf.answers) == 10
    assert shelf.calls[-1] == ("close", None)


# -- requests that are not equal, or not sure ------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "options"),
    [
        (TEXT + ".", GREEDY, {}),
        (TEXT, GREEDY.replace(max_tokens=11), {}),
        (TEXT, GREEDY.replace(logprobs=0), {}),
        (TEXT, GREEDY.replace(repetition_penalty=1.1), {}),
        (TEXT, GREEDY.replace(stop=["zzzz"]), {}),
        (TEXT, SamplingParams(seed=5, max_tokens=12), {}),
        (TEXT, GREEDY, {"cache_salt": "tenant"}),
    ],
)
def test_a_request_that_differs_is_computed(thread_llm, shelf, prompt, params, options):
    once(thread_llm)
    assert not once(thread_llm, prompt, params, **options).from_response_cache
    assert once(thread_llm).from_response_cache


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=5),
        GREEDY.replace(logits_processors=[lambda token_ids, logits: logits]),
    ],
    ids=["unseeded", "callable"],
)
def test_what_may_differ_another_time_is_neither_looked_up_nor_stored(thread_llm, shelf, params):
    lookups = thread_llm.stats().response_cache.lookups
    for _ in range(2):
        assert not once(thread_llm, params=params).from_response_cache
    assert shelf.calls == []
    assert thread_llm.stats().response_cache.lookups == lookups


def test_embeddings_are_always_computed(thread_llm, shelf):
    first, second = (thread_llm.embed(TEXT, pooling="mean")[0] for _ in range(2))
    assert list(first.embedding) == list(second.embedding)
    assert shelf.calls == []


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "bfloat16"},
        {"model_impl": "generic"},
        {"attention_backend": "reference"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_another_arithmetic_is_another_key(tiny_with_text, thread_llm, shelf, setting):
    once(thread_llm)
    with LLM(str(tiny_with_text), response_cache="shelf", **setting) as other:
        assert not once(other).from_response_cache
        assert once(other).from_response_cache


def test_what_quantisation_skips_makes_another_key(tiny_with_text, shelf):
    with LLM(str(tiny_with_text), response_cache="shelf", quantization="int8") as llm:
        once(llm)
    for skip in (["*down_proj*"], ["lm_head"]):
        with LLM(
            str(tiny_with_text),
            response_cache="shelf",
            quantization="int8",
            quantization_skip=skip,
        ) as other:
            assert not once(other).from_response_cache


def test_answers_that_did_not_end_by_themselves_are_not_stored(tiny_and_long, shelf):
    params = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
    with LLM(str(tiny_and_long), response_cache="shelf") as llm:
        with llm.stream(TEXT, params) as stream:
            next(stream)
        with llm.stream(TEXT, params) as stream:
            llm.abort(stream.request_id)
            last = list(stream)[-1]
            assert last.outputs[0].finish_reason == "abort"
        stream = llm.stream(TEXT, params)
    with pytest.raises(pagedllm.EngineClosedError):
        list(stream)
    assert shelf.answers == {}


def test_other_engines_releases_do_not_share(thread_llm, shelf, tiny_with_text, monkeypatch):
    once(thread_llm)
    monkeypatch.setattr(pagedllm, "__version__", "0.0.1")
    with LLM(str(tiny_with_text), response_cache="shelf") as other:
        assert not once(other).from_response_cache


# -- stores that misbehave --------------------------------------------------------------------


def warnings_of(caplog):
    return [r for r in caplog.records if "response cache" in r.message and r.levelname == "WARNING"]


def test_a_store_that_fails_costs_one_warning_and_is_tried_again(
    thread_llm, shelf, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    first = once(thread_llm)
    shelf.fail = ConnectionError("nobody there")
    for _ in range(3):
        assert same(first, once(thread_llm, params=GREEDY.replace(max_tokens=12)))
    until(lambda: warnings_of(caplog))  # the first answer may still be on its way to the store
    [warning] = warnings_of(caplog)
    assert "'shelf'" in warning.message
    assert "nobody there" in warning.message
    assert thread_llm.stats().response_cache.down
    shelf.fail = None
    monkeypatch.setattr(bounded, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(thread_llm._entry._store, "_retry_at", 0.0)
    until(lambda: not thread_llm.stats().response_cache.down)
    assert "answers again" in caplog.text
    assert not once(thread_llm, "New words").from_response_cache
    assert once(thread_llm, "New words").from_response_cache


def test_a_store_that_hangs_holds_nobody_up_for_longer_than_its_timeout(
    tiny_with_text, shelf, caplog
):
    hung = {"name": "shelf", "timeout": 0.01}
    shelf.gate.clear()
    with LLM(str(tiny_with_text), response_cache=hung) as llm:
        outputs = llm.generate([[i, 8, 9] for i in range(5, 15)], GREEDY)
        assert once(llm).finished
    assert [o.outputs[0].finish_reason is not None for o in outputs] == [True] * 10
    [warning] = warnings_of(caplog)
    assert "no answer in 10 ms" in warning.message


def test_the_event_loop_runs_while_the_store_is_asked(tiny_with_text, shelf):
    async def main():
        async with await AsyncLLM.create(str(tiny_with_text), response_cache="shelf") as llm:
            shelf.gate.clear()
            stream = llm.generate(TEXT, GREEDY)
            await asyncio.to_thread(shelf.waiting.wait, 60)
            shelf.gate.set()  # by this very event loop
            return [output async for output in stream]

    assert asyncio.run(main())[-1].finished


def test_a_request_is_aborted_while_it_is_looked_up(thread_llm, shelf):
    shelf.gate.clear()
    stream = thread_llm.stream(TEXT, GREEDY)
    assert shelf.waiting.wait(60)
    thread_llm.abort(stream.request_id)
    last = list(stream)[-1]
    assert last.outputs[0].finish_reason == "abort"
    shelf.gate.set()
    assert once(thread_llm).finished


def test_an_id_is_not_used_twice_at_a_time(thread_llm, shelf):
    shelf.gate.clear()
    first = thread_llm.stream(TEXT, GREEDY, request_id="mine")
    with pytest.raises(pagedllm.EngineError, match="'mine' is in use"):
        thread_llm.stream(TEXT, GREEDY, request_id="mine")
    shelf.gate.set()
    assert list(first)[-1].finished


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_that_closes_meanwhile_answers_what_is_stored_and_says_so_else(
    tiny_with_text, shelf, known
):
    prompt = f"Closing, {known}:"  # of no other test, whose answers may be stored late
    llm = LLM(str(tiny_with_text), response_cache="shelf")
    if known:
        first = once(llm, prompt)
        until(lambda: llm.stats().response_cache.stored)
    shelf.gate.clear()
    stream = llm.stream(prompt, GREEDY)
    assert shelf.waiting.wait(60)
    closer = threading.Thread(target=llm.close)
    closer.start()
    until(lambda: llm.closed)
    shelf.gate.set()
    if known:
        last = list(stream)[-1]
        assert last.from_response_cache
        assert last.outputs[0].text == first.outputs[0].text
    else:
        with pytest.raises(pagedllm.EngineClosedError):
            list(stream)
    closer.join()
    with pytest.raises(pagedllm.EngineClosedError):
        once(llm, prompt)


@pytest.mark.parametrize("damage", [b"", b"\x01not deflated", b"\xffanother", bytes(40)])
def test_entries_that_cannot_be_read_are_computed_again(thread_llm, shelf, damage):
    first = once(thread_llm)
    until(lambda: shelf.answers and not thread_llm._entry._store._unstored)
    [key] = shelf.answers
    shelf.answers[key] = damage
    second = once(thread_llm)
    assert not second.from_response_cache
    assert same(first, second)
    assert once(thread_llm).from_response_cache


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("shelv", "did you mean 'shelf'"),
        ({"name": "shelf", "tll": 3}, "tll"),
        (7, "response_cache: expected a name"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_loaded(tiny_with_text, setting, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(tiny_with_text), response_cache=setting)
    assert caught.value.parameter == "response_cache"


def test_the_setting_reads_from_flags_and_files(tmp_path):
    import argparse

    parser = argparse.ArgumentParser()
    pagedllm.Config.add_cli_arguments(parser)
    flags = parser.parse_args(["--response-cache", '{"name": "redis", "ttl": 60}'])
    assert pagedllm.Config.from_cli(flags).response_cache == {"name": "redis", "ttl": 60}
    (tmp_path / "a.yaml").write_text("cache:\n  response_cache: redis\n")
    assert pagedllm.Config.from_yaml(tmp_path / "a.yaml").response_cache == "redis"
    (tmp_path / "b.yaml").write_text("cache:\n  response_cache: {name: redis, ttl: 60}\n")
    config = pagedllm.Config.from_yaml(tmp_path / "b.yaml")
    assert config.response_cache == {"name": "redis", "ttl": 60}
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert pagedllm.Config.from_yaml(tmp_path / "c.yaml") == config


def test_a_loaded_model_has_no_identity():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    )  # fmt: skip
    with pytest.raises(ConfigError, match="response_cache"):
        LLM.from_model(model, response_cache="shelf")
