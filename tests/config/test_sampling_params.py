"""SamplingParams: complete validation at construction, and normal forms of what is accepted."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from pagedllm import SamplingParams, ValidationError

NUMBERS = {
    "temperature": (0, math.inf),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "typical_p": (1e-9, 1),
    "repetition_penalty": (1e-9, math.inf),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
INTEGERS = {
    "n": 1,
    "top_k": -1,
    "max_tokens": 1,
    "min_tokens": 0,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "truncate_prompt_tokens": 1,
}
FLAGS = [
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
]


@pytest.mark.parametrize("name", NUMBERS)
@given(value=st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5))
def test_numbers_are_taken_exactly_within_their_range(name: str, value: float) -> None:
    low, high = NUMBERS[name]
    if low == 1e-9:
        valid = math.isfinite(value) and 0 < value <= high
    else:
        valid = math.isfinite(value) and low <= value <= high
    if valid:
        stored = getattr(SamplingParams(**{name: value}), name)
        assert stored == value
        assert type(stored) is float
    else:
        with pytest.raises(ValidationError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.parameter == name
        assert name in str(caught.value)


@pytest.mark.parametrize("name", INTEGERS)
@given(value=st.integers(-100, 10**6))
def test_integers_are_taken_exactly_within_their_range(name: str, value: int) -> None:
    more = {"max_tokens": None} if name == "min_tokens" else {}
    if value >= INTEGERS[name]:
        for given_value in (value, np.int64(value)):
            stored = getattr(SamplingParams(**{name: given_value}, **more), name)
            assert stored == (0 if name == "top_k" and value == -1 else value)
            assert type(stored) is int
    else:
        with pytest.raises(ValidationError, match=name):
            SamplingParams(**{name: value}, **more)


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, "seed"])
@pytest.mark.parametrize("value", [True, np.True_, "1", [1], object(), 1j])
def test_what_is_no_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", [*INTEGERS, "seed"])
def test_fractions_are_no_integers(name: str) -> None:
    with pytest.raises(ValidationError, match="whole number"):
        SamplingParams(**{name: 1.0})


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    assert getattr(SamplingParams(**{name: np.True_}), name) is True
    for wrong in (1, 0, "yes", None):
        with pytest.raises(ValidationError, match=name):
            SamplingParams(**{name: wrong})


def test_defaults_are_plain_sampling() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy


def test_stop_takes_a_string_or_several() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "\n"]).stop == ("a", "\n")
    assert SamplingParams(stop=None).stop == ()
    for wrong in ("", ["a", ""], [1], 1, b"a", [None]):
        with pytest.raises(ValidationError, match="stop"):
            SamplingParams(stop=wrong)


def test_token_lists() -> None:
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    assert SamplingParams(allowed_token_ids=[7]).allowed_token_ids == (7,)
    assert SamplingParams().allowed_token_ids is None
    for wrong in ([-1], [1.5], [True], "12", {1: 2}, 5):
        with pytest.raises(ValidationError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=wrong)
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[])


def test_logit_bias_takes_json_keys_and_refuses_the_rest() -> None:
    assert SamplingParams(logit_bias={"50256": -100, 3: 1}).logit_bias == {50256: -100.0, 3: 1.0}
    given_map = {1: 2.0}
    params = SamplingParams(logit_bias=given_map)
    given_map[1] = 5.0
    assert params.logit_bias == {1: 2.0}
    for wrong in ({"x": 1}, {-1: 1}, {1: math.nan}, {1: "2"}, [1], {1: 1, "1": 2}, {1.5: 1}):
        with pytest.raises(ValidationError, match="logit_bias"):
            SamplingParams(logit_bias=wrong)


def test_logits_processors_are_callables_in_a_sequence() -> None:
    warper = TemperatureLogitsWarper(2.0)

    def plain(token_ids, logits):
        return logits

    params = SamplingParams(logits_processors=[warper, plain])
    assert params.logits_processors == (warper, plain)
    assert SamplingParams(logits_processors=LogitsProcessorList([warper])).logits_processors
    for wrong in (plain, [None], [""], [{}], [{"token": 1}], [{"name": 5}], [{"name": "x", 1: 2}]):
        with pytest.raises(ValidationError, match="logits_processors"):
            SamplingParams(logits_processors=wrong)


def test_logits_processors_may_be_names_with_options() -> None:
    options = {"name": "forbid", "token_ids": [1]}
    params = SamplingParams(logits_processors=["plain", options, {"name": "bare"}])
    assert params.logits_processors == ("plain", {"name": "forbid", "token_ids": [1]}, "bare")
    options["token_ids"] = [2]
    assert params.logits_processors[1] == {"name": "forbid", "token_ids": [1]}
    assert SamplingParams(logits_processors="plain").logits_processors == ("plain",)
    copied = pickle.loads(pickle.dumps(params))
    assert copied == params
    assert hash(copied) == hash(params)


def test_more_tokens_at_least_than_at_most() -> None:
    with pytest.raises(ValidationError, match=r"min_tokens.*17.*max_tokens.*16"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_seeds_of_64_bits(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed
    with pytest.raises(ValidationError, match="seed"):
        SamplingParams(seed=2**64)


@pytest.mark.parametrize(
    "build",
    [
        lambda values: SamplingParams(**values),
        SamplingParams.from_dict,
        lambda values: SamplingParams().replace(**values),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(build) -> None:
    with pytest.raises(ValidationError) as caught:
        build({"temprature": 0.123})
    for word in ("temprature", "0.123", "temperature"):
        assert word in str(caught.value)


def test_from_json_and_replace_and_copies() -> None:
    text = '{"temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}, "max_tokens": 3}'
    params = SamplingParams.from_dict(json.loads(text))
    assert params.replace(temperature=0) == SamplingParams(
        temperature=0, stop="x", logit_bias={5: 1}, max_tokens=3
    )
    with pytest.raises(ValidationError):
        params.replace(top_p=2)
    with pytest.raises(ValidationError):
        params.replace(min_tokens=4)
    for copied in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), params.replace()):
        assert copied == params
        assert hash(copied) == hash(params)


def test_frozen_and_keyword_only() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    with pytest.raises(TypeError):
        SamplingParams(2)


def test_help_and_signature_list_every_parameter() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names
    assert all(f"    {name}: " in SamplingParams.__doc__ for name in names)


def test_messages_stay_short_for_long_values() -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(n="x" * 10_000)
    assert len(str(caught.value)) < 200
