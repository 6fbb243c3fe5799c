"""Tiny models with fresh weights, accelerated and not."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from generate_pairs import FAMILIES, Pair, build, byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A model of each family, accelerated; ``reference`` has the same weights and is not."""
    yield from _pair(request.param)


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    yield from _pair("llama")


def _pair(family: str) -> Iterator[Pair]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"{family} with seed {seed}")
    with Pair.of(build(family, seed), random.Random(seed)) as made:
        yield made
