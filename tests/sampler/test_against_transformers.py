"""Each row's token is what transformers' own processors, in its own order, would give."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from pagedllm import SamplingParams
from pagedllm.worker.sampler import Sampler
from sampler_oracle import check_token, make_state, processed, random_state

FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"temperature": 1e-3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_k": 100_000},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"top_k": 40, "top_p": 0.9, "temperature": 0.8},
    {"top_k": 500, "top_p": 0.7, "min_p": 0.05},
    {"top_p": 0.95, "typical_p": 0.5},
    {"top_k": 30, "typical_p": 0.5, "temperature": 1.3},
    {"min_p": 0.1, "typical_p": 0.9},
]


@pytest.fixture
def choose():
    seed = time.time_ns()
    print("seed", seed)
    return np.random.default_rng(seed)


def random_logits(choose, rows, vocab, spread=3.0):
    return torch.from_numpy(choose.normal(0, spread, (rows, vocab)).astype(np.float32))


def sample(logits, states):
    return [
        result.token_id if hasattr(result, "token_id") else result
        for result in Sampler(logits.shape[1], "cpu").sample(logits, states)
    ]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [13, 700, 5003])
def test_each_filter(choose, params, vocab):
    rows = 200
    logits = random_logits(choose, 1, vocab, choose.uniform(0.5, 4)).expand(rows, -1).contiguous()
    seed = int(choose.integers(0, 2**63))
    states = [
        make_state(SamplingParams(**params), prompt=[2] * (row + 1), seed=seed)
        for row in range(rows)
    ]
    for token, row, state in zip(sample(logits, states), logits, states, strict=True):
        check_token(token, row, state)


@pytest.mark.parametrize("vocab", [40, 3001])
def test_every_combination_in_one_batch(choose, vocab):
    for _ in range(6):
        rows = int(choose.integers(1, 50))
        logits = random_logits(choose, rows, vocab)
        states = [random_state(choose, vocab) for _ in range(rows)]
        for token, row, state in zip(sample(logits, states), logits, states, strict=True):
            if isinstance(token, Exception):
                assert processed(row, state).max() == -torch.inf
                assert "no token is left" in str(token)
            else:
                check_token(token, row, state)


def test_a_real_vocabulary(choose):
    vocab = 49_152
    logits = random_logits(choose, 24, vocab, 2.5)
    states = [random_state(choose, vocab, typical_p=1.0) for _ in range(24)]
    for token, row, state in zip(sample(logits, states), logits, states, strict=True):
        check_token(token, row, state)


@pytest.mark.parametrize("params", [{"top_k": 20}, {"top_k": 300}, {"top_k": 64, "min_p": 0.05}])
def test_tokens_as_likely_as_the_last_of_top_k_stay_as_in_transformers(choose, params):
    """Logits of a bf16 model are equal by the dozen."""
    logits = random_logits(choose, 1, 2000).mul(2).round().div(2).expand(300, -1).contiguous()
    states = [make_state(SamplingParams(**params), seed=row) for row in range(300)]
    for token, row, state in zip(sample(logits, states), logits, states, strict=True):
        check_token(token, row, state)


def test_tokens_as_likely_as_the_last_of_top_p_stay(choose):
    """transformers cuts through a group of equals as its sort left them; here none is
    preferred, so the nucleus is transformers' and the rest of that group."""
    logits = random_logits(choose, 1, 3000).round()
    states = [make_state(SamplingParams(top_p=0.8), seed=row) for row in range(2000)]
    kept = processed(logits[0], states[0]) > -torch.inf
    lowest = logits[0][kept].min()
    nucleus = set(torch.nonzero(logits[0] >= lowest)[:, 0].tolist())
    drawn = set(sample(logits.expand(2000, -1).contiguous(), states))
    assert drawn <= nucleus
    lowest_ones = set(torch.nonzero(logits[0] == lowest)[:, 0].tolist())
    assert drawn & lowest_ones
    assert max(lowest_ones) > 100  # or the test would show nothing


def test_greedy_takes_the_lowest_of_equals_and_ignores_filters(choose):
    logits = random_logits(choose, 30, 500).round()
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, typical_p=0.2)
    tokens = sample(logits, [make_state(params) for _ in range(30)])
    assert tokens == [int(row.argmax()) for row in logits.numpy()]


def test_a_temperature_close_to_zero_is_greedy(choose):
    logits = random_logits(choose, 20, 500) * 1000
    states = [make_state(SamplingParams(temperature=1e-40), seed=row) for row in range(20)]
    assert sample(logits, states) == logits.argmax(1).tolist()


def test_penalties_ignore_tokens_beyond_the_logits(choose):
    """An embedding may have more rows than there are logits; bad and allowed words likewise."""
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.5,
        frequency_penalty=1,
        logit_bias={90: 100.0, 2: 3.0},
        allowed_token_ids=[95, 2, 3],
    )
    logits = random_logits(choose, 1, 50)
    state = make_state(params, [2, 99, 3], [77], bad_words_ids=[[60], [77, 61]])
    scores = logits[0].clone()
    for token in (2, 3):
        scores[token] = scores[token] / 1.5 if scores[token] > 0 else scores[token] * 1.5
    scores[2] += 3
    assert sample(logits, [state]) == [2 if scores[2] >= scores[3] else 3]
