"""Gets the model's files, once, whatever else starts or is killed meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from pagedllm.testing import tiny_model


def model_folder(download_dir: str | None) -> Path:
    """Return a folder with config.json, safetensors and a tokenizer's files, filled if need be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(download_dir or cache, "acme-models", "1").absolute()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole, so that nobody finds half a model.
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        download(partial)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def download(folder: Path) -> None:
    """Put the model's files there. This makes a tiny one up: put your own way here."""
    tiny_model(folder)
