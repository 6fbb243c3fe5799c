"""Embeddings, against the states of transformers' own models in fp32."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
import torch

from pagedllm import LLM, AsyncLLM, RequestTooLongError, SamplingParams, ValidationError
from tiny_families import FAMILIES, build, build_clear

NAMES = ("llama", "gemma2", "olmo2", "granite", "qwen3-moe", "gpt2", "opt", "starcoder2")
CASES = [
    (name, tier, attention)
    for name in NAMES
    for tier, attention in (("native", "auto"), ("native", "reference"), ("generic", "auto"))
    if FAMILIES[name].native or tier == "generic"
]
POOLINGS = ("mean", "last")


def _expected(model, prompt, pooling):
    with torch.no_grad():
        states = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    return states.mean(0) if pooling == "mean" else states[-1]


def _check(outputs, model, prompts, pooling):
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.prompt_token_ids) == list(prompt)
        found = torch.tensor(output.embedding)
        torch.testing.assert_close(found, _expected(model, prompt, pooling), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def seed():
    found = random.SystemRandom().randrange(2**31)
    print("seed", found)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, seed):
    path = tmp_path_factory.mktemp("llama")
    build("llama", seed).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(("name", "tier", "attention"), CASES)
def test_they_are_the_states_of_transformers(name, tier, attention, seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 320) for _ in range(n)] for n in (1, 2, 5, 22, 90)]
    model = build_clear(name, seed, prompts)
    with LLM.from_model(
        model, model_impl=tier, attention_backend=attention, page_size=4, num_pages=200,
        max_num_batched_tokens=32, max_batch_size=8, threads=1,
    ) as llm:  # fmt: skip
        for pooling in POOLINGS * 2:  # the second time the prompts are in the prefix cache
            outputs = llm.embed(prompts, pooling=pooling, normalize=False)
            _check(outputs, model, prompts, pooling)
        assert outputs[-1].num_cached_tokens == 88
        assert llm.stats().cache.pages_used == 0


def test_among_other_requests_and_without_enough_pages(seed):
    """Long answers take the pages away, so that prompts are computed twice, in pieces."""
    model = build("llama", seed)
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 320) for _ in range(rng.randrange(1, 60))] for _ in range(24)]
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM.from_model(
        model, page_size=4, num_pages=40, max_model_len=128, max_batch_size=8,
        max_num_batched_tokens=16, threads=1,
    ) as llm:  # fmt: skip
        streams = [llm.stream([7, index], long) for index in range(6)]
        for pooling in POOLINGS:
            outputs = llm.embed(prompts, pooling=pooling, normalize=False)
            _check(outputs, model, prompts, pooling)
        for stream in streams:
            assert len(list(stream)[-1].outputs[0].token_ids) == 60
        stats = llm.stats()
        assert stats.preemptions > 0
        assert (stats.running, stats.waiting, stats.cache.pages_used) == (0, 0, 0)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_asyncio_and_an_engine_in_another_process(folder, seed, engine):
    model, prompts = build("llama", seed), [[3, 4, 5], [9, 8, 7, 6], [1]]

    async def ask():
        llm = await AsyncLLM.create(
            folder, engine=engine, skip_tokenizer_init=True, num_pages=50, threads=1
        )
        async with llm:
            return [await llm.embed(prompts, pooling=p, normalize=False) for p in POOLINGS]

    for pooling, outputs in zip(POOLINGS, asyncio.run(ask()), strict=True):
        _check(outputs, model, prompts, pooling)


def test_length_dimensions_and_what_is_refused(folder, seed):
    with LLM(folder, skip_tokenizer_init=True, max_model_len=20, num_pages=50, threads=1) as llm:
        whole = list(range(1, 21))  # all that fits: there need be no room for an answer
        [plain] = llm.embed(whole, pooling="mean", normalize=False)
        _check([plain], build("llama", seed), [whole], "mean")
        [unit] = llm.embed(whole, pooling="mean")
        assert math.hypot(*unit.embedding) == pytest.approx(1.0)
        scale = plain.embedding[0] / unit.embedding[0]
        assert [value * scale for value in unit.embedding] == pytest.approx(plain.embedding)
        [short] = llm.embed(whole, pooling="mean", dimensions=7)
        length = math.hypot(*plain.embedding[:7])
        assert short.embedding == pytest.approx([value / length for value in plain.embedding[:7]])
        for wrong in (0, 65):
            with pytest.raises(ValidationError, match="from 1 to 64"):
                llm.embed(whole, pooling="mean", dimensions=wrong)
        with pytest.raises(RequestTooLongError, match="21 tokens and max_model_len is 20"):
            llm.embed([*whole, 21], pooling="last")
        with pytest.raises(ValidationError, match="pooling must be 'mean' or 'last', not 'max'"):
            llm.embed(whole, pooling="max")
        with pytest.raises(ValidationError, match="empty"):
            llm.embed([[]], pooling="last")
