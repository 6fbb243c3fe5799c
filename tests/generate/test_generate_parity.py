"""Equal tokens, scores and logits to the model's own generate, over the fields of its config.

Every call here must run on the engine: a line about falling back fails the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from generate_pairs import EOS, PAD, VOCAB

if TYPE_CHECKING:
    from generate_pairs import Pair

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_length": {"max_new_tokens": None, "max_length": 17},
    "one_token": {"max_new_tokens": 1},
    "eos_list": {"eos_token_id": list(range(0, 256, 7))},
    "eos_without_pad": {"eos_token_id": list(range(0, 256, 5)), "pad_token_id": None},
    "no_eos": {"eos_token_id": None},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(0, 256, 3))},
    "min_length": {"min_length": 13, "eos_token_id": list(range(0, 256, 3))},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "repetition_reward": {"repetition_penalty": 0.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[i] for i in range(0, 256, 2)] + [[1, 3], [5, 7, 9]]},
    "sequence_bias": {"sequence_bias": [[[i], 4.0] for i in range(1, 20)] + [[[1, 2], -9.0]]},
    "forced_bos": {"forced_bos_token_id": 77},
    "forced_eos": {"forced_eos_token_id": EOS},
    "forced_eos_list": {"forced_eos_token_id": [EOS, 4]},
    "remove_invalid": {"remove_invalid_values": True},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6)},
    "suppress": {"suppress_tokens": list(range(100, 200))},
    "begin_suppress": {"begin_suppress_tokens": list(range(0, 256, 2))},
    "guidance": {"guidance_scale": 1.7},
    "renormalize": {"renormalize_logits": True},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[10, 20], ngram_len=3)},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "no_cache": {"use_cache": False},
    "static_cache": {"cache_implementation": "static"},
    "logits_to_keep": {"logits_to_keep": 1},
    "all_logits": {"logits_to_keep": 0},
    "prefill_chunks": {"prefill_chunk_size": 4},
    "all_at_once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 3,
        "suppress_tokens": [1, 2, 3],
        "bad_words_ids": [[11], [12, 13]],
        "eos_token_id": list(range(0, 256, 9)),
    },
    "config_object": {
        "generation_config": GenerationConfig(
            max_new_tokens=6, eos_token_id=list(range(0, 256, 4)), pad_token_id=PAD
        )
    },
}
WARPED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.05, "top_k": 0},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.7, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.01, "top_k": 0},
    "eta": {"eta_cutoff": 0.01, "top_k": 0},
    "together": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1},
}
BEAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"num_beams": 7},
    "early": {"early_stopping": True, "eos_token_id": list(range(0, 256, 8))},
    "never": {"early_stopping": "never", "eos_token_id": list(range(0, 256, 8))},
    "long": {"length_penalty": 2.0, "eos_token_id": list(range(0, 256, 8))},
    "short": {"length_penalty": -1.0, "eos_token_id": list(range(0, 256, 8))},
    "all_beams": {"num_return_sequences": 4},
    "ngrams": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(0, 256, 3))},
    "no_cache": {"use_cache": False},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.2},
}
FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy(pair: Pair, name: str) -> None:
    pair.compare(lambda: {**pair.prompts(), **_greedy(name)})


@pytest.mark.parametrize("name", [name for name in GREEDY if name != "static_cache"])
def test_greedy_with_scores_and_logits(llama: Pair, name: str) -> None:
    llama.compare(lambda: {**llama.prompts(), **_greedy(name), **FULL})


def _greedy(name: str) -> dict[str, Any]:
    settings = {"max_new_tokens": 10, "do_sample": False, **GREEDY[name]}
    if "generation_config" in settings:
        del settings["max_new_tokens"]
    return settings


@pytest.mark.parametrize("name", WARPED)
def test_sampling_draws_the_same_from_the_same_seed(pair: Pair, name: str) -> None:
    settings = {"max_new_tokens": 8, "do_sample": True, **WARPED[name], **FULL}
    pair.compare(lambda: {**pair.prompts(), **settings}, seed=pair.random.randrange(2**31))


@pytest.mark.parametrize("name", BEAMS)
def test_beam_search(pair: Pair, name: str) -> None:
    settings = {"max_new_tokens": 9, "num_beams": 4, **FULL, **BEAMS[name]}
    seed = pair.random.randrange(2**31)
    found = pair.compare(lambda: {**pair.prompts(), **settings}, seed=seed)
    expected = pair.reference.compute_transition_scores(
        found.sequences, found.scores, found.beam_indices
    )
    assert expected.shape[0] == found.sequences.shape[0]


def test_num_return_sequences(pair: Pair) -> None:
    settings = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, **FULL}
    found = pair.compare(lambda: {**pair.prompts(), **settings})
    assert len(found.sequences) == 9


class _Odd(LogitsProcessor):
    """Has a state, and looks at the whole batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        rolled = scores.roll(self.calls, dims=0)
        return scores + 0.5 * rolled - input_ids.float().mean(dim=1, keepdim=True) * 0.01


class _EndsAt(StoppingCriteria):
    """Ends each row at a multiple of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.number == 0


def test_processors_and_criteria_of_the_caller(pair: Pair) -> None:
    pair.compare(
        lambda: {
            **pair.prompts(),
            "max_new_tokens": 12,
            "logits_processor": LogitsProcessorList([_Odd()]),
            "stopping_criteria": StoppingCriteriaList([_EndsAt(5)]),
        }
    )


def test_prefix_allowed_tokens(pair: Pair) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return list(range(row * 50, row * 50 + 40)) if len(ids) % 2 else [3, 4, EOS]

    pair.compare(
        lambda: {**pair.prompts(), "max_new_tokens": 8, "prefix_allowed_tokens_fn": allowed}
    )
    pair.compare(
        lambda: {
            **pair.prompts(), "max_new_tokens": 8, "prefix_allowed_tokens_fn": allowed,
            "num_beams": 3,
        }
    )  # fmt: skip


def test_stop_strings(pair: Pair, tokenizer: Any) -> None:
    stops = [chr(code) for code in range(33, 100)]
    pair.compare(
        lambda: {
            **pair.prompts(), "max_new_tokens": 20, "stop_strings": stops, "tokenizer": tokenizer
        }
    )  # fmt: skip


def test_prompts_from_one_token_to_many_pages(pair: Pair) -> None:
    for length in (1, 2, 4, 5, 63, 100):
        pair.compare(
            lambda length=length: {
                "input_ids": torch.tensor([[pair.random.randrange(256) for _ in range(length)]]),
                "max_new_tokens": 9,
            }
        )


def test_padding_is_found_without_a_mask(pair: Pair) -> None:
    pair.compare(lambda: {"input_ids": pair.prompts()["input_ids"], "max_new_tokens": 8})


def test_inputs_by_position_and_by_default(pair: Pair) -> None:
    pair.compare(lambda: {"inputs": pair.prompts(rows=1)["input_ids"], "max_new_tokens": 5})
    pair.compare(lambda: {"max_new_tokens": 5})  # begins with the bos token


def test_position_ids_that_say_nothing_new(pair: Pair) -> None:
    def call() -> dict[str, Any]:
        prompts = pair.prompts()
        positions = (prompts["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return {**prompts, "position_ids": positions, "max_new_tokens": 6}

    pair.compare(call)


def test_a_batch_that_shares_a_prefix_and_one_that_was_seen_before(pair: Pair) -> None:
    prefix = [pair.random.randrange(256) for _ in range(30)]
    rows = [[*prefix, pair.random.randrange(256)] for _ in range(4)]
    for settings in ({}, {"num_beams": 3}, FULL):
        pair.compare(
            lambda settings=settings: {
                "input_ids": torch.tensor(rows), "max_new_tokens": 7, **settings
            }
        )  # fmt: skip


def test_more_rows_than_the_vocabulary_has_tokens_to_tell_apart(llama: Pair) -> None:
    assert VOCAB > 60
    llama.compare(lambda: {**llama.prompts(rows=60, length=5), "max_new_tokens": 4})
    llama.compare(lambda: {**llama.prompts(rows=60, length=5), "max_new_tokens": 4, **FULL})
