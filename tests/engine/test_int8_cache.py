"""An engine whose pages hold int8: what it takes, and that nothing else depends on it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from pagedllm import LLM, Config, SamplingParams
from pagedllm.models import load_model
from pagedllm.worker.worker import Worker
from tiny_families import build

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that is the same each time: a number in the middle of two steps may be rounded
    either way in another batch, and in some models that changes a token."""
    path = tmp_path_factory.mktemp("tiny")
    build("llama", 11).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("tier", "attention"), [("native", "numba"), ("native", "reference"), ("generic", "numba")]
)
def test_a_page_takes_what_it_is_said_to(folder: Path, tier: str, attention: str) -> None:
    model = load_model(str(folder), dtype="bfloat16", model_impl=tier, attention=attention)
    workers = [
        Worker(model, Config(kv_cache_memory="1MiB", kv_cache_dtype=kept).resolve())
        for kept in ("auto", "int8")
    ]
    for worker in workers:
        held = sum(layer.key.nbytes + layer.value.nbytes for layer in worker.layers)
        assert held == worker.info.num_pages * worker.info.bytes_per_page
        assert 0 <= 2**20 - held < worker.info.bytes_per_page
    # Heads are small here; at 64 numbers, they are 68 bytes for 128.
    assert worker.info.bytes_per_page < 0.7 * workers[0].info.bytes_per_page
    assert all(layer.key.dtype == torch.int8 for layer in worker.layers)


@pytest.mark.parametrize(
    ("tier", "attention"), [("native", "numba"), ("native", "reference"), ("generic", "numba")]
)
def test_scarce_pages_chunks_prefixes_and_forks_change_nothing(
    folder: Path, tier: str, attention: str
) -> None:
    draw = random.Random(5)
    prefix = [draw.randrange(1, 200) for _ in range(18)]
    prompts = [prefix + [draw.randrange(1, 200) for _ in range(n)] for n in (1, 9, 20, 30, 3)]
    settings = {
        "skip_tokenizer_init": True, "dtype": "float32", "kv_cache_dtype": "int8",
        "model_impl": tier, "attention_backend": attention, "page_size": 4,
    }  # fmt: skip
    seeded = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), num_pages=200, **settings) as llm:
        plain = [llm.generate(p, GREEDY, use_tqdm=False, cache_salt=str(p))[0] for p in prompts]
        forked = [llm.generate(p, seeded, use_tqdm=False, cache_salt=str(p))[0] for p in prompts]
    scarce = {"num_pages": 26, "max_model_len": 90, "max_num_batched_tokens": 17}
    with LLM(str(folder), max_batch_size=9, **scarce, **settings) as llm:
        again = llm.generate(prompts * 2, [GREEDY] * 5 + [seeded] * 5, use_tqdm=False)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.cache.pages_used == 0
    assert any(output.num_cached_tokens for output in again)
    for wanted, got in zip(plain + forked, again, strict=True):
        assert [o.token_ids for o in got.outputs] == [o.token_ids for o in wanted.outputs]
