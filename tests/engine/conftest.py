"""Tiny random models on disk, and transformers' own opinion of their answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from greedy import is_greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 320 tokens and random weights in fp32, without a tokenizer or an end token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    seed = int(torch.randint(2**31, ()))
    print(f"tiny_model seed: {seed}")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.25)
    path = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Callable[[Sequence[int], Sequence[int]], bool]:
    """Whether tokens after a prompt of ``tiny_model`` are greedy, by transformers in fp32."""
    return _oracle(tiny_model)


@pytest.fixture(scope="session")
def text_oracle(tiny_and_long: Path) -> Callable[[Sequence[int], Sequence[int]], bool]:
    """The same for the tiny model with text."""
    return _oracle(tiny_and_long)


def _oracle(path: Path) -> Callable[[Sequence[int], Sequence[int]], bool]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return partial(is_greedy, model)
