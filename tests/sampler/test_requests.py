"""What a request may ask of its logits, what it gets back, and what goes wrong alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation as hf

from pagedllm import SamplingParams
from pagedllm.errors import EngineError
from pagedllm.worker.sampler import Sampled, Sampler
from pagedllm.worker.slot import TokenCounts
from sampler_oracle import EOS, make_state, random_state

VOCAB = 50


@pytest.fixture
def choose():
    seed = time.time_ns()
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture
def logits(choose):
    return torch.from_numpy(choose.normal(0, 2, (6, VOCAB)).astype(np.float32))


def sample(logits, states):
    return Sampler(logits.shape[1], "cpu").sample(logits, states)


def greedy(**params):
    return SamplingParams(temperature=0, **params)


# --- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_min_tokens_forbids_every_end(ignore_eos):
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 7, 9]] = torch.tensor([9.0, 8.0, 7.0])
    logits[0, 4] = 1.0
    params = greedy(min_tokens=2, stop_token_ids=[9], ignore_eos=ignore_eos)
    state = make_state(params, [3], eos=EOS)
    assert sample(logits, [state]) == [Sampled(4)]
    state.append(4)
    assert sample(logits, [state]) == [Sampled(4)]
    state.append(4)
    assert sample(logits, [state]) == [Sampled(1)]


def test_a_bad_word_is_forbidden_only_where_it_would_be_completed():
    logits = torch.zeros(1, VOCAB)
    logits[0, 20], logits[0, 30] = 5.0, 4.0
    params = greedy()
    after = {(): 20, (10,): 20, (11,): 20, (10, 11): 30, (10, 11, 12): 20, (8, 10, 11): 30}
    for output, token in after.items():
        state = make_state(params, [3], output, bad_words_ids=[(10, 11, 20)])
        assert sample(logits, [state]) == [Sampled(token)], output
    assert sample(logits, [make_state(params, bad_words_ids=[(20,), (1,)])]) == [Sampled(30)]


# --- logits processors ----------------------------------------------------------------------


def test_a_callable_sees_all_tokens_and_its_own_logits(logits):
    seen = []

    def force(token_ids, row):
        seen.append((token_ids, row.clone()))
        row[:] = -torch.inf
        row[len(token_ids)] = 0
        return row

    before = logits.clone()
    states = [make_state(greedy(logits_processors=[force]), [3, 4], [5] * n) for n in range(6)]
    assert [result.token_id for result in sample(logits, states)] == [2, 3, 4, 5, 6, 7]
    assert torch.equal(logits, before), "the model's logits were changed"
    for n, (token_ids, row) in enumerate(seen):
        assert token_ids == [3, 4, *[5] * n]
        assert all(type(token) is int for token in token_ids)
        assert torch.equal(row, before[n])


def test_processors_of_transformers_run_as_in_its_generate(logits):
    processors = [
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.LogitsProcessorList(
            [
                hf.SuppressTokensLogitsProcessor([4, 5]),
                hf.MinNewTokensLengthLogitsProcessor(1, 9, 6),
            ]
        ),
    ]
    tokens = [8, 9, 10, 8]
    logits[:, 9] = 50.0  # what a repeated pair would take
    states = [
        make_state(greedy(logits_processors=processors), tokens[:1], tokens[1:]) for _ in logits
    ]
    scores = logits.clone()
    for processor in processors:
        scores = processor(torch.tensor([tokens] * len(logits)), scores)
    found = [result.token_id for result in sample(logits, states)]
    assert found == scores.argmax(1).tolist()
    assert 9 not in found


def test_a_processor_of_ones_own_that_inherits_from_transformers(logits):
    class Last(hf.LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.shape == (1, 3)
            assert scores.shape == (1, VOCAB)
            return torch.nn.functional.one_hot(input_ids[:, -1], VOCAB).half()

    results = sample(logits[:1], [make_state(greedy(logits_processors=[Last()]))])
    assert results == [Sampled(5)]


def test_processors_see_penalties_before_and_temperature_follows(logits):
    params = SamplingParams(
        temperature=0.5, logit_bias={3: 2.0}, logits_processors=[record := Recorder()], top_k=2
    )
    sample(logits[:1], [make_state(params)])
    expected = logits[0].clone()
    expected[3] += 2
    assert torch.allclose(record.seen[0], expected)


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, token_ids, row):
        self.seen.append(row.clone())
        return row


def test_plus_infinity_forces_a_token(logits):
    def force(token_ids, row):
        row[[11, 12]] = torch.inf
        return row

    states = [make_state(SamplingParams(logits_processors=[force]), seed=seed) for seed in range(6)]
    assert {result.token_id for result in sample(logits, states)} <= {11, 12}


def raises(token_ids, row):
    row.zero_()
    raise KeyError("my own bug")


BROKEN = {
    "raised KeyError: 'my own bug'": raises,
    "shape (50,), the changed logits, but returned a tensor of shape (1, 50)": (
        lambda ids, row: row[None]
    ),
    "but returned NoneType": lambda ids, row: None,
    "returned NaN": lambda ids, row: row * torch.nan,
    "returned -inf for every token": lambda ids, row: row - torch.inf,
}


@pytest.mark.parametrize("says", BROKEN)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_broken_processor_fails_its_own_row_alone(logits, says, temperature):
    params = SamplingParams(temperature=temperature, top_k=10)
    healthy = [make_state(params, seed=seed) for seed in range(6)]
    expected = sample(logits, healthy)
    broken = make_state(params.replace(logits_processors=[BROKEN[says]]))
    results = sample(logits, [*healthy[:2], broken, *healthy[3:]])
    assert isinstance(results[2], EngineError)
    assert says in str(results[2])
    assert results[:2] + results[3:] == expected[:2] + expected[3:]
    if "KeyError" in says:
        assert isinstance(results[2].__cause__, KeyError)


# --- rows without a token -------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"typical_p": 0.5},
        {"temperature": 0, "allowed_token_ids": [3, 4]},
        {"repetition_penalty": 1.2, "top_k": 3},
        {"logprobs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("poison", ["one NaN", "all NaN", "all -inf", "+inf"])
def test_logits_that_are_no_numbers_fail_their_row_alone(logits, params, poison):
    states = [make_state(SamplingParams(**params), seed=seed) for seed in range(6)]
    expected = sample(logits, states)
    logits[3, slice(9, 10) if poison in ("one NaN", "+inf") else slice(None)] = {
        "one NaN": torch.nan,
        "all NaN": torch.nan,
        "all -inf": -torch.inf,
        "+inf": torch.inf,
    }[poison]
    results = sample(logits, states)
    if "allowed_token_ids" in params and poison == "+inf":
        assert isinstance(results[3], Sampled)  # the infinite logit was not allowed
    else:
        assert isinstance(results[3], EngineError)
        assert "the model's logits" in str(results[3])
    assert results[:3] + results[4:] == expected[:3] + expected[4:]


def test_parameters_that_exclude_every_token_are_told_apart_from_a_broken_model(logits):
    params = SamplingParams(allowed_token_ids=[1, 2], min_tokens=3)
    state = make_state(params, bad_words_ids=[(2,)], eos=frozenset({1}))
    (result,) = sample(logits[:1], [state])
    assert isinstance(result, EngineError)
    assert "no token is left to choose from" in str(result)


def test_tokens_that_the_model_excludes_itself_are_never_drawn(choose):
    logits = torch.full((400, VOCAB), -torch.inf)
    logits[:, [3, 20]] = 0.0
    states = [make_state(SamplingParams(), seed=seed) for seed in range(400)]
    assert {result.token_id for result in sample(logits, states)} == {3, 20}


def test_logits_of_another_shape_are_refused(logits):
    with pytest.raises(ValueError, match="vocabulary of 51"):
        Sampler(VOCAB + 1, "cpu").sample(logits, [make_state(greedy())] * 6)


def test_logits_are_never_changed(choose, logits):
    before = logits.clone()
    for _ in range(20):
        states = [random_state(choose, VOCAB, logprobs=3) for _ in range(6)]
        sample(logits, states)
        assert torch.equal(logits, before)


# --- log probabilities ----------------------------------------------------------------------


def test_log_probabilities_are_of_the_raw_logits(choose):
    vocab = 3000
    logits = torch.from_numpy(choose.normal(0, 2, (20, vocab)).astype(np.float32))
    wanted = [None, 0, 1, 5, 20] * 4
    states = [random_state(choose, vocab, logprobs=k, allowed_token_ids=None) for k in wanted]
    reference = logits.double().log_softmax(1)
    for row, (result, k) in enumerate(zip(sample(logits, states), wanted, strict=True)):
        if k is None:
            assert result.logprobs is None
            continue
        entry, expected = result.logprobs, reference[row]
        assert entry.token_id == result.token_id
        assert entry.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-4)
        assert entry.rank == int((expected > expected[result.token_id]).sum()) + 1
        best = expected.topk(k).values.tolist()
        assert expected[list(entry.top_ids)].tolist() == best
        assert len(set(entry.top_ids)) == k
        assert entry.top_logprobs == pytest.approx(best, abs=1e-4)


def test_equal_logits_are_listed_by_id_and_share_a_rank():
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 10, 20]] = 1.0
    (result,) = sample(logits, [make_state(greedy(logprobs=2))])
    assert result.token_id == 10
    assert result.logprobs.top_ids == (10, 20)
    assert result.logprobs.rank == 1


def test_the_whole_vocabulary_can_be_listed(logits):
    (result,) = sample(logits[:1], [make_state(greedy(logprobs=VOCAB))])
    assert sorted(result.logprobs.top_ids) == list(range(VOCAB))
    assert sum(np.exp(result.logprobs.top_logprobs)) == pytest.approx(1, abs=1e-5)


def test_log_probabilities_of_a_prompt(choose):
    vocab, count = 2500, 30
    logits = torch.from_numpy(choose.normal(0, 2, (count, vocab)).astype(np.float32))
    targets = torch.from_numpy(choose.integers(0, vocab, count))
    reference = logits.double().log_softmax(1)
    for k in (0, 3, vocab + 5):
        entries = Sampler(vocab, "cpu").prompt_logprobs(logits, targets, k)
        for row, entry in enumerate(entries):
            own = reference[row, targets[row]]
            assert entry.token_id == int(targets[row])
            assert entry.logprob == pytest.approx(float(own), abs=1e-4)
            assert entry.rank == int((reference[row] > own).sum()) + 1
            best = reference[row].topk(min(k, vocab)).values.tolist()
            assert reference[row][list(entry.top_ids)].tolist() == best
            assert len(set(entry.top_ids)) == len(best)
    assert Sampler(vocab, "cpu").prompt_logprobs(logits[:0], targets[:0], 3) == []


# --- the slot's own counting ----------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 200), max_size=150),
    output=st.lists(st.integers(0, 200), max_size=150),
    steps=st.lists(st.integers(0, 300), max_size=5),
)
def test_tokens_are_counted_as_they_come(prompt, output, steps):
    tokens = np.array([*prompt, *output], dtype=np.int64)
    counts = TokenCounts()
    for end in [*sorted(min(step, len(tokens)) for step in steps), len(tokens)]:
        counts.update(tokens[:end], len(prompt))
    assert sorted(counts.ids.tolist()) == sorted(set(tokens.tolist()))
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token: output.count(token) for token in set(tokens.tolist())}


def test_a_sequence_grows_beyond_the_room_it_began_with():
    state = make_state(greedy(), prompt=[1, 2, 3])
    for token in range(500):
        state.append(token)
    assert state.known.tolist() == [1, 2, 3, *range(500)]
    assert state.prompt.tolist() == [1, 2, 3]
    assert state.output.tolist() == list(range(500))
    assert state.num_output_tokens == 500
    counts = state.token_counts()
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == dict.fromkeys(range(500), 1)
