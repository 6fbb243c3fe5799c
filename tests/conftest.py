"""Shared by all tests: offline, few threads, and the real model.

The environment is set here, before any test module imports torch or a Hugging Face library.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models lose more to starting threads than they gain from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16, converted on the first use on a machine."""
    import pagedllm

    return pagedllm.resolve_model("smollm2").path
