"""A tiny model of random weights behind a real tokenizer: it obeys nothing by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiny_text import save_tiny_text

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A Llama of random weights with SmolLM2's tokenizer and chat template."""
    path = tmp_path_factory.mktemp("tiny-structured")
    return save_tiny_text(path, smollm2_path, layers=1, positions=2048)
