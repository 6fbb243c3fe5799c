"""Shared by all tests: offline, few threads, and the real model.

The environment is set here, before any test module imports torch or a Hugging Face library.
"""

from __future__ import annotations

import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models lose more to starting threads than they gain from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tiny_text import save_tiny_text

# On a machine that others use any example may take long: a time-out ends a test that hangs.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# A shell that starts a job in the background makes it ignore Ctrl-C, and so would every
# process that a test starts to press Ctrl-C in.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from pathlib import Path

# What is drawn while tests are collected must be the same in all processes of a run (the
# variable is pytest-xdist's name for it), and new in the next one.
random.seed(os.environ.get("PYTEST_XDIST_TESTRUNUID"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests: a run ends when its last file does."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    # Tracing takes a fifth of a test's time, and other parameters hardly reach other lines:
    # coverage is measured in the first case of each test, and where the engine is tested.
    traced = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in traced or item.path.parent.name in ("kernels", "langchain"):
            item.add_marker("no_cover")
        traced.add(test)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16, converted on the first use on a machine."""
    import pagedllm

    return pagedllm.resolve_model("smollm2").path


@pytest.fixture(scope="session")
def tiny_with_text(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A tiny Llama of random weights that speaks in words; what it says means nothing."""
    path = tmp_path_factory.mktemp("tiny-text")
    return save_tiny_text(path, smollm2_path, layers=2, positions=512)


@pytest.fixture(scope="session")
def tiny_and_long(tmp_path_factory: pytest.TempPathFactory, tiny_with_text: Path) -> Path:
    """The same model for answers of thousands of tokens: what is asked while one runs is.

    However the machine is loaded, such an answer takes seconds.
    """
    import json
    import shutil

    path = shutil.copytree(tiny_with_text, tmp_path_factory.mktemp("long") / "tiny")
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (path / "config.json").write_text(json.dumps(config))
    return path
