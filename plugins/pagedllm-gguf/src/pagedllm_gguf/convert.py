"""Converts a GGUF file into a Hugging Face folder, once per file and dtype.

Owner: pagedllm-gguf. Invariants: a folder under its final name is complete, since it is built
beside it and renamed; whoever holds the lock is the only one building it, so what lies
half-built was left by a process that died; what cannot be converted is refused before anything
is written, where that can be told.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Raised when a folder's content changes, so that caches of older releases are not used."""
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TOKENIZER_BYTES = 50_000_000
"""Room for the tokenizer and the configuration, generously."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a file says about itself."""

    architecture: str
    dtype: str
    """The one that keeps most of its weights as they are."""
    num_weights: int
    end_tokens: tuple[int, ...]


def cache_root(download_dir: str | None = None) -> Path:
    """Return the folder for conversions: in the engine's download_dir, else in the XDG cache."""
    if download_dir is not None:
        return Path(download_dir).expanduser() / "gguf"
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path("~/.cache").expanduser()
    return base / "pagedllm" / "gguf"


def converted_folder(path: Path, dtype: str = "auto", download_dir: str | None = None) -> Path:
    """Return the converted model's folder, converting first if it is not there.

    Args:
        path: the GGUF file.
        dtype: of the weights; ``auto``: by what the file has.
        download_dir: where to keep the folder; None: the user's cache.

    Raises:
        ModelNotFoundError: the file is no GGUF or damaged, or the folder cannot be written.
        UnsupportedModelError: nothing here can run what is in it.
    """
    from filelock import FileLock

    root = cache_root(download_dir)
    try:
        final = root / _folder_name(path, dtype)
        if final.is_dir():
            return final
        facts = inspect(path)
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{final.name}.lock"):
            if not final.is_dir():
                _convert_into(path, facts, facts.dtype if dtype == "auto" else dtype, final)
    except OSError as error:
        raise ModelNotFoundError(
            f"{path.name!r} cannot be converted into {str(root)!r} ({error}): make room or give "
            "access, or name another folder with download_dir or XDG_CACHE_HOME."
        ) from error
    return final


def _folder_name(path: Path, dtype: str) -> str:
    real = path.resolve()
    stat = real.stat()
    key = f"{real}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    return f"{stem}-{digest}-{dtype}-{CONVERTER_VERSION}"


def inspect(path: Path) -> Facts:
    """Read a file's metadata and check that all of its tensors are there.

    Raises:
        ModelNotFoundError, UnsupportedModelError: as :func:`converted_folder`.
    """
    from gguf import GGMLQuantizationType, GGUFReader

    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelNotFoundError(
            f"{str(path)!r} is no GGUF file: it begins with {magic!r}, not with b'GGUF'."
        )
    try:
        reader = GGUFReader(path)
        architecture = _value(reader, "general.architecture")
        counts = {"float32": 0, "float16": 0, "bfloat16": 0}
        own = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}
        for tensor in reader.tensors:
            counts[own.get(tensor.tensor_type, "bfloat16")] += int(tensor.n_elements)
    except Exception as error:
        raise ModelNotFoundError(
            f"{str(path)!r} is damaged or ends too early, at {path.stat().st_size:,} bytes "
            f"({type(error).__name__}: {' '.join(str(error).split())}). Download it again."
        ) from error
    if (parts := _value(reader, "split.count") or 1) > 1:
        raise UnsupportedModelError(
            f"{str(path)!r} is one of {parts} parts of a model. Merge them first, with "
            "llama.cpp's `llama-gguf-split --merge`."
        )
    if not isinstance(architecture, str) or not any(counts.values()):
        raise UnsupportedModelError(f"{str(path)!r} holds no model: it names no architecture.")
    ends = (_value(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    return Facts(
        architecture=architecture,
        dtype=max(counts, key=lambda name: counts[name]),
        num_weights=sum(counts.values()),
        end_tokens=tuple(dict.fromkeys(int(token) for token in ends if token is not None)),
    )


def _value(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _convert_into(path: Path, facts: Facts, dtype: str, final: Path) -> None:
    """Build the folder under a temporary name and rename it. The caller holds the lock."""
    prefix = f".{final.name}.partial-"
    for left in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    needed = facts.num_weights * _BYTES[dtype] + _TOKENIZER_BYTES
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise OSError(f"it takes {needed // 10**6:,} MB in {dtype}, {free // 10**6:,} MB are free")
    print(f"Converting {path.name} to {dtype} in {final} (once)", file=sys.stderr, flush=True)  # noqa: T201 - a notice, not a log record
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        with _progress_on_terminals_only():
            problem = convert(path, facts, dtype, partial)
        if problem is not None:
            logger.warning(
                "%s has no tokenizer that transformers can read (%s); name one with tokenizer=...",
                path.name,
                problem,
            )
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def convert(path: Path, facts: Facts, dtype: str, folder: Path) -> str | None:
    """Write weights, configuration, tokenizer and chat template.

    Returns:
        why there is no tokenizer among them; None when there is one.

    Raises:
        UnsupportedModelError: transformers cannot read such a model from GGUF.
        OSError: the folder cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
    }
    try:
        # Packed weights, which is how they load by default, cannot be saved.
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers cannot read {path.name!r}, a GGUF file of the architecture "
            f"{facts.architecture!r} ({type(error).__name__}: {' '.join(str(error).split())})."
        ) from error
    if facts.end_tokens:
        model.config.eos_token_id = facts.end_tokens[0]
        model.generation_config = GenerationConfig(
            bos_token_id=model.config.bos_token_id, eos_token_id=list(facts.end_tokens)
        )
    model.config._name_or_path = path.stem
    model.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - the model is of use without
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def _progress_on_terminals_only() -> contextlib.AbstractContextManager[object]:
    """Swallow the bars that transformers draws whether or not someone is looking."""
    if sys.stderr is not None and sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())
