"""Batches that the engine draws by itself: the same distribution as the original's."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pagedllm
from generate_pairs import PAD, build

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 2000


def _probabilities(model: PreTrainedModel, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What the original draws the next token from: float64 [vocab]."""
    out = type(model).generate(
        model, ids, max_new_tokens=1, do_sample=True, output_scores=True,
        return_dict_in_generate=True, **settings,
    )  # fmt: skip
    return out.scores[0][0].double().softmax(dim=-1)


def _chi_square(drawn: list[int], p: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; rare tokens are counted together."""
    counts = Counter(drawn)
    expected = (p * len(drawn)).tolist()
    assert all(expected[token] > 0 for token in counts), "a token that was filtered out was drawn"
    common = [token for token, number in enumerate(expected) if number >= 5]
    cells = [(counts[token], expected[token]) for token in common]
    rest = len(drawn) - sum(count for count, _ in cells), sum(expected) - sum(e for _, e in cells)
    if rest[1] >= 5:
        cells.append(rest)
    return sum((count - e) ** 2 / e for count, e in cells), len(cells) - 1


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 0},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.85, "top_k": 0},
        {"min_p": 0.1, "top_k": 0, "temperature": 1.5},
        {"typical_p": 0.8, "top_k": 0},
        {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_draws_have_the_distribution_of_the_original(settings: dict[str, Any]) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    model = build("llama", seed)
    ids = torch.tensor([[PAD, PAD, 5, 6, 7]])
    p = _probabilities(model, ids, **settings)
    with pagedllm.accelerate(model, strict=True, num_pages=4096) as handle:
        torch.manual_seed(seed)
        before = handle.llm.stats().requests
        out = model.generate(
            ids, max_new_tokens=1, do_sample=True, num_return_sequences=ROWS, **settings
        )
        assert handle.llm.stats().requests == before + ROWS  # the engine drew them
    statistic, freedom = _chi_square(out[:, -1].tolist(), p)
    # Mean and standard deviation of chi-square; six sigma: once in far more than 10**6 runs.
    assert statistic < freedom + 6 * (2 * max(freedom, 1)) ** 0.5 + 20


def test_a_seed_repeats_and_another_differs() -> None:
    model = build("llama", 7)
    ids = torch.tensor([[5, 6, 7]] * 4)
    with pagedllm.accelerate(model, num_pages=256):
        answers = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            answers.append(model.generate(ids, max_new_tokens=12, do_sample=True, top_k=0))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
    assert len({tuple(row) for row in answers[0].tolist()}) == 4


def test_plain_batches_are_the_engines_and_others_are_driven() -> None:
    """A greedy batch without processors must not pay for what it does not use."""
    model = build("llama", 8)
    ids = torch.tensor([[5, 6, 7]] * 4)
    own = [
        {}, {"min_new_tokens": 3}, {"repetition_penalty": 1.2}, {"eos_token_id": [3, 4]},
        {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"return_dict_in_generate": True}, {"num_return_sequences": 2, "do_sample": True},
    ]  # fmt: skip
    driven = [
        {"no_repeat_ngram_size": 2}, {"num_beams": 2}, {"max_time": 60.0},
        {"return_dict_in_generate": True, "output_scores": True},
        {"do_sample": True, "eta_cutoff": 0.1},
    ]  # fmt: skip
    with pagedllm.accelerate(model, strict=True, num_pages=256) as handle:
        for expected, calls in ((True, own), (False, driven)):
            for settings in calls:
                before = handle.llm.stats().requests
                model.generate(ids, max_new_tokens=6, **settings)
                assert (handle.llm.stats().requests > before) == expected, settings
