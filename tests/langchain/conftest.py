"""A tiny model of random weights behind SmolLM2's tokenizer and chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> str:
    """The folder of a Llama of one layer; what it says means nothing."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    seed = int(torch.randint(2**31, ()))
    print(f"tiny_chat seed: {seed}")
    torch.manual_seed(seed)
    path = tmp_path_factory.mktemp("tiny-chat")
    LlamaForCausalLM(config).eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def settings(tiny_chat: str) -> dict[str, object]:
    """What makes an LLM or a chat model on the tiny model; all of them share its engine."""
    return {
        "model_id": tiny_chat,
        "dtype": "float32",
        "engine_config": {"num_pages": 2048, "max_batch_size": 64},
        "max_tokens": 12,
    }


@pytest.fixture(scope="session", autouse=True)
def _engine_stays(settings: dict[str, object]) -> object:
    """Keep the shared engine from being closed between two tests."""
    from pagedllm import PagedLLM

    with PagedLLM(**settings) as llm:
        yield llm.engine
