"""Draws follow the distribution, and depend on nothing but the sequence's seed and place."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from pagedllm import SamplingParams
from pagedllm.worker.rng import uniforms
from pagedllm.worker.sampler import Sampler
from sampler_oracle import make_state, random_state, uniform

VOCAB = 24


@pytest.fixture
def choose():
    seed = time.time_ns()
    print("seed", seed)
    return np.random.default_rng(seed)


def tokens_of(logits, states):
    return [result.token_id for result in Sampler(logits.shape[1], "cpu").sample(logits, states)]


def chi_square_bound(freedom):
    """Chi-square passes it once in about ten million times (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 5.2 * np.sqrt(2 / (9 * freedom))) ** 3


def chi_square(observed, probabilities):
    """Statistic and degrees of freedom; outcomes that hardly ever happen are counted together."""
    expected = probabilities * observed.sum()
    rare = expected < 20
    if rare.any():
        # With the least of the others, lest they be too few even together.
        rare |= expected == expected[~rare].min()
        observed, expected = (
            np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)
        )
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def series(kind, start, count):
    """(seed, position) pairs that a user would think of."""
    if kind == "neighbouring seeds":
        return start + np.arange(count, dtype=np.uint64), np.full(count, 17)
    if kind == "positions of one sequence":
        return np.full(count, start, dtype=np.uint64), np.arange(count)
    # The sequences of one request, at the step each of them has reached.
    return start + np.arange(count, dtype=np.uint64) // 64, 100 + np.arange(count) % 64


KINDS = ["neighbouring seeds", "positions of one sequence", "seeds and positions"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 1, 2**63 - 7])
def test_numbers_are_uniform_and_independent(kind, start):
    count = 1 << 15
    seeds, positions = series(kind, start, count)
    numbers = uniforms(seeds.tolist(), positions.tolist())
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # Kolmogorov and Smirnov: larger than 2.9 once in ten million times.
    ordered = np.sort(numbers)
    distance = np.abs(ordered - (np.arange(count) + 0.5) / count).max()
    assert distance * np.sqrt(count) < 2.9
    # Serial test: neighbours in the series fall on all of a grid alike.
    for lag in (1, 2, 63, 64):
        cells = (numbers[:-lag] * 16).astype(int) * 16 + (numbers[lag:] * 16).astype(int)
        observed = np.bincount(cells, minlength=256)
        statistic, freedom = chi_square(observed, np.full(256, 1 / 256))
        assert statistic < chi_square_bound(freedom)


def test_numbers_are_those_of_the_published_function():
    seeds = [0, 1, 2**63, 2**64 - 1, -1, -5, 123456789]
    positions = [0, 1, 5, 100_000, 3, 3, 2**31]
    expected = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_tokens_have_their_probabilities(choose, kind, temperature):
    count = 20_000
    row = torch.from_numpy(choose.normal(0, 1.2, VOCAB).astype(np.float32))
    params = SamplingParams(temperature=temperature)
    seeds, positions = series(kind, int(choose.integers(0, 2**40)), count)
    counts = np.zeros(VOCAB)
    base = make_state(params, prompt=[1])
    base.tokens = np.zeros(count + 200, np.int64)
    for part in range(0, count, 1000):
        states = []
        for seed, position in zip(
            seeds[part : part + 1000].tolist(), positions[part : part + 1000].tolist(), strict=True
        ):
            state = make_state(params, prompt=[1], seed=seed)
            state.tokens, state.num_tokens = base.tokens, position
            states.append(state)
        drawn = tokens_of(row.expand(len(states), -1).contiguous(), states)
        counts += np.bincount(drawn, minlength=VOCAB)
    probabilities = (row.double() / temperature).softmax(0).numpy()
    statistic, freedom = chi_square(counts, probabilities)
    assert statistic < chi_square_bound(freedom)


@pytest.mark.parametrize("vocab", [9000, 49_152 + 17])
def test_a_large_vocabulary_is_drawn_from_evenly_to_its_last_token(choose, vocab):
    """Equal logits: each of 16 parts of the vocabulary is as likely as it is wide."""
    count, logits = 3000, torch.zeros(1, vocab)
    start = int(choose.integers(0, 2**40))
    drawn = []
    for part in range(0, count, 100):
        states = [make_state(SamplingParams(), seed=start + part + i) for i in range(100)]
        drawn += tokens_of(logits.expand(100, -1), states)
    ends = np.linspace(0, vocab, 17).astype(int)
    observed = np.histogram(drawn, ends)[0]
    statistic, freedom = chi_square(observed, np.diff(ends) / vocab)
    assert statistic < chi_square_bound(freedom)


@pytest.mark.parametrize("vocab", [60, 5000])
def test_a_token_does_not_depend_on_the_batch(choose, vocab):
    """Alone, in any company, at any place in it: the same token, also among equal logits."""
    rows = 40
    spread = choose.normal(0, 3, (rows, vocab)).astype(np.float32)
    spread[::2] = np.round(spread[::2] * 4) / 4
    logits = torch.from_numpy(spread)
    states = [random_state(choose, vocab, allowed_token_ids=None) for _ in range(rows)]
    together = tokens_of(logits, states)
    alone = [tokens_of(logits[i : i + 1], [states[i]])[0] for i in range(rows)]
    assert alone == together
    for _ in range(4):
        some = choose.permutation(rows)[: int(choose.integers(2, rows))].tolist()
        assert tokens_of(logits[some], [states[i] for i in some]) == [together[i] for i in some]


def test_a_token_does_not_depend_on_a_preemption(choose):
    """A sequence that comes back has a new slot state, made of its known tokens."""
    vocab = 300
    params = SamplingParams(
        temperature=1.2, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=4
    )
    logits = torch.from_numpy(choose.normal(0, 2, (30, vocab)).astype(np.float32))
    whole = make_state(params, prompt=[5, 6, 7], seed=99)
    for row in logits:
        whole.append(tokens_of(row[None], [whole])[0])
    for cut in (1, 7, 20):
        again = make_state(params, [5, 6, 7], whole.output[:cut].tolist(), 99, generation=3)
        for row in logits[cut:]:
            again.append(tokens_of(row[None], [again])[0])
        assert again.known.tolist() == whole.known.tolist()


def test_seeds_and_positions_give_different_tokens(choose):
    """Two requests that differ in their seed alone must not run in step."""
    logits = torch.zeros(200, 10_000)
    same_place = tokens_of(logits, [make_state(SamplingParams(), seed=s) for s in range(200)])
    places = [make_state(SamplingParams(), prompt=[1] * (n + 1), seed=0) for n in range(200)]
    assert len(set(same_place)) > 180
    assert len(set(tokens_of(logits, places))) > 180
