"""Keeps what transformers made of a folder's small files, so that it is not imported again.

Importing transformers and asking it for a configuration and a tokenizer takes two fifths of a
start. What it said depends on the folder's files and on versions alone, so it is kept under
``pagedllm/loads`` in the user's cache, named by a hash of both.

Owner: the loading of models and tokenizers. Invariants: what cannot be read, kept or trusted
to be the same is asked of transformers again; nothing here raises for a cache's sake. A kept
tokenizer has given the same token ids as the one that it stands for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}
)
_MOST_BYTES = 64 << 20
"""Of one file that is hashed at each start: larger ones cost more than they save."""
_MOST_KEPT = 128
"""Folders; those used longest ago go first."""
_PROBES = (
    "The quick brown fox,  it's 1,234.5 times\n\tquicker! ",
    " Grüße, \u4f60\u597d, \u0645\u0631\u062d\u0628\u0627 \U0001f600 <s></s> [INST]",
)
"""Texts that a kept tokenizer must read as its original does."""


class Recall:
    """What is known of one folder, in one file of the user's cache."""

    def __init__(self, folder: str | Path) -> None:
        self._file = _file_of(Path(folder).expanduser())

    def __bool__(self) -> bool:
        """Whether anything can be kept."""
        return self._file is not None

    def get(self, kind: str) -> Any:
        """Return what was kept under a name, None for nothing."""
        if self._file is None:
            return None
        path = self._file.with_suffix(f".{kind}.json")
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def keep(self, kind: str, value: Any) -> None:
        """Keep a JSON value under a name."""
        if self._file is None:
            return
        path = self._file.with_suffix(f".{kind}.json")
        # A name of its own: several processes may keep the same thing at once.
        new = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(value), "utf-8")
            new.replace(path)
            files = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
            for old in files[: -2 * _MOST_KEPT]:
                old.unlink()
        except OSError as error:
            logger.debug("%s cannot be kept: %s", path, error)
            with contextlib.suppress(OSError):
                new.unlink()


class RecalledTokenizer:
    """Stands for a tokenizer of transformers until more than its vocabulary is asked for."""

    def __init__(
        self, kept: dict[str, Any], path: str, load: Callable[[], PreTrainedTokenizerBase]
    ) -> None:
        from tokenizers import Tokenizer

        self.name_or_path = path
        self.backend_tokenizer = Tokenizer.from_str(kept["tokenizer"])
        self.eos_token_id = kept["eos_token_id"]
        self._load = load
        self._lock = threading.Lock()
        self._whole: PreTrainedTokenizerBase | None = None

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, Any]:
        """Turn a text into token ids, as the original does."""
        ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return {"input_ids": ids}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def whole(self) -> PreTrainedTokenizerBase:
        """Return the original, loaded when it is first wanted."""
        with self._lock:
            if self._whole is None:
                self._whole = self._load()
            return self._whole


def recalled_tokenizer(
    path: str, load: Callable[[], PreTrainedTokenizerBase], *, fresh: bool
) -> PreTrainedTokenizerBase | RecalledTokenizer:
    """Return a stand-in for a folder's tokenizer if it was loaded before, else load it.

    Args:
        path: the folder; anything else is loaded.
        load: loads it.
        fresh: load it in any case, since code that comes with it may run.
    """
    if fresh:
        return load()
    recall = Recall(path)
    kept = recall.get("tokenizer")
    if kept is not None:
        try:
            return RecalledTokenizer(kept, path, load)
        except Exception as error:  # noqa: BLE001 - tokenizers raises plain ones
            logger.debug("the kept tokenizer of %s is of no use: %s", path, error)
    tokenizer = load()
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if recall and backend is not None:
        clean = type(backend).from_str(backend.to_str())
        clean.no_truncation()
        clean.no_padding()
        kept = {"tokenizer": clean.to_str(), "eos_token_id": tokenizer.eos_token_id}
        stand_in = RecalledTokenizer(kept, path, load)
        if all(_same(tokenizer, stand_in, special) for special in (False, True)):
            recall.keep("tokenizer", kept)
    return tokenizer


def whole_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase:
    """Return a tokenizer of transformers for what may be its stand-in."""
    whole: PreTrainedTokenizerBase = (
        tokenizer.whole() if isinstance(tokenizer, RecalledTokenizer) else tokenizer
    )
    return whole


def _same(tokenizer: Any, stand_in: RecalledTokenizer, special: bool) -> bool:
    options = {"add_special_tokens": special, "verbose": False}
    return all(
        list(tokenizer(text, **options)["input_ids"]) == stand_in(text, **options)["input_ids"]
        for text in _PROBES
    )


def _file_of(folder: Path) -> Path | None:
    """Return where a folder's answers are kept; None when they cannot be."""
    digest = hashlib.sha256(_makers())
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in _WEIGHTS or not path.is_file():
                continue
            if path.suffix == ".py" or path.stat().st_size > _MOST_BYTES:
                return None
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(json.dumps([path.name, content]).encode())
        home = os.environ.get("XDG_CACHE_HOME")
        base = Path(home) if home else Path.home() / ".cache"
    except (OSError, RuntimeError):  # no folder, or nobody's home
        return None
    return base / "pagedllm" / "loads" / digest.hexdigest()[:32]


@functools.cache
def _makers() -> bytes:
    """What else decides the answers: the libraries' versions and our own reading of them."""
    digest = hashlib.sha256()
    for library in ("transformers", "tokenizers", "pagedllm"):
        with contextlib.suppress(PackageNotFoundError):  # run from its source
            digest.update(version(library).encode() + b"\0")
    here = Path(__file__).parent
    for path in (Path(__file__), *sorted((here / "models").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.digest()
