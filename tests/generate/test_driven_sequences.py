"""``LLM.drive``: rows whose tokens the caller chooses, forked at will, among other requests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pagedllm
from generate_pairs import build

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", random.SystemRandom().randrange(2**31))


@pytest.fixture
def llm(model: Any, kept: str) -> Iterator[pagedllm.LLM]:
    with pagedllm.LLM.from_model(
        model, num_pages=60, page_size=4, max_model_len=64, threads=1, kv_cache_dtype=kept
    ) as made:
        yield made


@pytest.fixture
def kept() -> str:
    """How keys and values are kept."""
    return "auto"


def _expected(model: Any, rows: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([row])).logits[0, -1] for row in rows])


# In int8 it is as far off as rounding takes it, and right after pages are copied.
@pytest.mark.parametrize(("kept", "far"), [("auto", 2e-3), ("int8", 0.08)])
def test_any_fork_gives_the_logits_of_its_own_tokens(
    llm: pagedllm.LLM, model: Any, far: float
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    # Requests that take pages away: rows are preempted and computed again, unnoticed.
    others = [llm.stream([rng.randrange(256) for _ in range(20)],
                         pagedllm.SamplingParams(max_tokens=30, ignore_eos=True))
              for _ in range(5)]  # fmt: skip
    same = [rng.randrange(256) for _ in range(7)]
    rows = [same, same, [rng.randrange(256) for _ in range(3)], same]
    with llm.drive(rows, 24) as driven:
        for _ in range(24):
            torch.testing.assert_close(driven.logits, _expected(model, rows), rtol=0, atol=far)
            parents = [rng.randrange(len(rows)) for _ in rows]
            tokens = [rng.randrange(256) for _ in rows]
            rows = [[*rows[p], t] for p, t in zip(parents, tokens, strict=True)]
            driven.advance(tokens, parents)
    for other in others:
        assert len(list(other)[-1].outputs[0].token_ids) == 30
    assert llm.stats().cache.pages_used == 0


def test_rows_that_nobody_continues_free_their_pages(llm: pagedllm.LLM) -> None:
    prompts = [[row, *range(1, 20)] for row in range(4)]
    with llm.drive(prompts, 8) as driven:
        assert llm.stats().cache.pages_used == 4 * 5
        driven.advance([1, 2, 3, 4], [0, 0, 0, 0])
        assert llm.stats().cache.pages_used == 5 + 4  # what they share, and a new one each
    assert llm.stats().cache.pages_used == 0


def test_what_never_fits_is_refused_with_what_to_change(llm: pagedllm.LLM) -> None:
    with pytest.raises(pagedllm.ValidationError, match="max_batch_size"):
        llm.drive([[1]] * 65, 1)
    with pytest.raises(pagedllm.RequestTooLongError, match="kv_cache_memory"):
        llm.drive([[1, 2, 3]] * 30, 20)
    with pytest.raises(pagedllm.RequestTooLongError, match="max_model_len"):
        llm.drive([[1, 2, 3]], 70)
    with pytest.raises(pagedllm.ValidationError, match="empty"):
        llm.drive([[]], 3)


def test_a_closed_engine_ends_the_rows(model: Any) -> None:
    llm = pagedllm.LLM.from_model(model, num_pages=16, threads=1)
    driven = llm.drive([[1, 2, 3]], 8)
    llm.close()
    with pytest.raises(pagedllm.EngineClosedError):
        driven.advance([1])
    driven.close()
