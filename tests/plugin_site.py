"""Distributions with plugins in them, on sys.path of this process and of those it starts."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import pagedllm.plugins

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def written(folder: Path, **plugins: str) -> dict[str, str]:
    """Write those distributions, and return what a process's environment needs to have them."""
    for name, code in plugins.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        info = folder / f"{name}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
        (info / "entry_points.txt").write_text(f"[pagedllm]\n{name} = {name}\n")
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def installed(folder: Path, **plugins: str) -> Iterator[Path]:
    """Install a distribution per keyword, named so, with the code as its plugin."""
    environment = written(folder, **plugins)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        importlib.invalidate_caches()
        pagedllm.plugins._manager.cache_clear()
        try:
            yield folder
        finally:
            pagedllm.plugins._manager.cache_clear()
            for name in plugins:
                sys.modules.pop(name, None)
