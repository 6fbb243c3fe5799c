"""A tiny model of random weights behind SmolLM2's tokenizer and chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiny_text import save_tiny_text

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> str:
    """The folder of a Llama of one layer; what it says means nothing."""
    path = tmp_path_factory.mktemp("tiny-chat")
    return str(save_tiny_text(path, smollm2_path, layers=1, positions=1024))


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
