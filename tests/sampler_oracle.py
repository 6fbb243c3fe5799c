"""What transformers' processors make of a row, and the draw from it, for the sampler's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import generation as hf

from pagedllm.sampling_params import SamplingParams
from pagedllm.types import SlotInit
from pagedllm.worker.slot import SlotState

if TYPE_CHECKING:
    import numpy as np

MASK = (1 << 64) - 1
EOS = frozenset({1, 7})


def make_state(
    params: SamplingParams,
    prompt=(3, 4, 5),
    output=(),
    seed: int = 0,
    bad_words_ids=(),
    eos=EOS,
    generation: int = 0,
) -> SlotState:
    init = SlotInit(
        slot=0,
        generation=generation,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        params=params,
        seed=seed,
        eos_token_ids=eos,
    )
    return SlotState.from_init(init, bad_words_ids)


def splitmix64(z: int) -> int:
    """The published mixing function, in plain integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    gamma = 0x9E3779B97F4A7C15
    key = splitmix64((seed + gamma) & MASK)
    return (splitmix64((key + (position + 1) * gamma) & MASK) >> 12) / 2**52


def processed(logits: torch.Tensor, state: SlotState) -> torch.Tensor:
    """One row [V] after transformers' processors, in the order its generate applies them."""
    params, known = state.params, torch.from_numpy(state.known.copy())[None]
    prompt_length, scores = state.num_prompt_tokens, logits.clone()[None]
    steps = []
    if params.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(_Counted(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias.items()}
        steps.append(hf.SequenceBiasLogitsProcessor(bias))
    if state.bad_words_ids:
        words = [list(word) for word in state.bad_words_ids]
        steps.append(hf.NoBadWordsLogitsProcessor(words, sorted(state.eos_token_ids)))
    if params.min_tokens:
        ends = sorted(state.eos_token_ids | set(params.stop_token_ids))
        steps.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, ends))
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        steps.append(hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    if not params.greedy:
        if params.temperature != 1:
            steps.append(hf.TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            steps.append(hf.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            steps.append(hf.TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            steps.append(hf.MinPLogitsWarper(params.min_p))
        if params.typical_p < 1:
            steps.append(hf.TypicalLogitsWarper(params.typical_p))
    for step in steps:
        scores = step(known, scores)
    return scores[0]


class _Counted:
    """Presence and frequency penalties by the formula in OpenAI's documentation."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.start = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[0, self.start :]
        counts = torch.bincount(output[output < scores.shape[1]], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def check_token(token: int, logits: torch.Tensor, state: SlotState) -> None:
    """The token is the one that transformers' distribution gives for this row's number."""
    scores = processed(logits, state)
    if state.params.greedy:
        assert scores[token] == scores.max()
        return
    probabilities = scores.double().softmax(0).numpy()
    assert probabilities[token] > 0, f"token {token} is filtered out by transformers"
    end = probabilities.cumsum()
    number = uniform(state.seed, state.num_tokens)
    # Rounding moves the ends of the intervals a little.
    assert end[token] - probabilities[token] - 2e-6 <= number <= end[token] + 2e-6


def random_params(choose: np.random.Generator, vocab: int, **fixed) -> SamplingParams:
    """Every parameter present in about a third of the requests."""

    def maybe(value, other):
        return value if choose.random() < 0.35 else other

    def ids(count):
        return tuple(int(i) for i in choose.integers(0, vocab, count))

    values = {
        "temperature": float(maybe(0.0, choose.uniform(0.3, 2.0))),
        "top_k": int(maybe(choose.integers(1, vocab + 20), 0)),
        "top_p": float(maybe(choose.uniform(0.05, 1.0), 1.0)),
        "min_p": float(maybe(choose.uniform(0.0, 0.5), 0.0)),
        "typical_p": float(maybe(choose.uniform(0.05, 0.99), 1.0)),
        "repetition_penalty": float(maybe(choose.uniform(0.5, 2.0), 1.0)),
        "presence_penalty": float(maybe(choose.uniform(-2, 2), 0.0)),
        "frequency_penalty": float(maybe(choose.uniform(-2, 2), 0.0)),
        "logit_bias": maybe({i: float(choose.uniform(-5, 5)) for i in set(ids(5))}, None),
        "min_tokens": int(maybe(choose.integers(1, 12), 0)),
        "stop_token_ids": maybe(ids(3), ()),
        "allowed_token_ids": maybe(ids(max(20, vocab // 4)), None),
        "max_tokens": 100,
    }
    return SamplingParams(**(values | fixed))


def random_state(choose: np.random.Generator, vocab: int, **fixed) -> SlotState:
    """A sequence with a short history of few distinct tokens, so that penalties bite."""
    few = choose.integers(0, vocab, 12)
    prompt, output = (choose.choice(few, choose.integers(1, 20)).tolist() for _ in range(2))
    words = []
    if choose.random() < 0.35:
        words = [few[:1].tolist(), [output[-1], int(few[1])], [int(few[2]), int(few[3])]]
        words += [[*output[-2:], int(few[4])], [*([5] * 60), 6], [1]]
    return make_state(
        random_params(choose, vocab, **fixed),
        prompt,
        output,
        seed=int(choose.integers(0, 2**63)),
        bad_words_ids=words,
    )
