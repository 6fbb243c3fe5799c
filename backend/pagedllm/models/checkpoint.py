"""Finds a checkpoint's folder, its weights and its configuration.

Owner: models. Invariants: nothing is unpickled and no code of a checkpoint runs without
``trust_remote_code``; whatever is missing or broken is one clear error before any weights
are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pagedllm.errors import ModelNotFoundError, UnsupportedModelError

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model in it."""

    folder: Path
    raw: dict[str, Any]
    """What config.json says."""
    files: tuple[Path, ...]
    """Shards, in safetensors."""
    trust_remote_code: bool = False

    @cached_property
    def config(self) -> Any:
        """Of transformers, read when it is first wanted.

        Raises:
            UnsupportedModelError: transformers does not know what it describes.
        """
        return _config(self.folder, self.raw, self.trust_remote_code)


def open_checkpoint(path: str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Check that a folder and its weights are whole.

    Raises:
        ModelNotFoundError: there is none, or a file of it is missing.
    """
    folder = _folder(path)
    raw = _read_json(folder / "config.json")
    files = _weight_files(folder)
    for file in files:
        _check_header(file)
    return Checkpoint(folder, raw, files, trust_remote_code)


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelNotFoundError(f"{path} is a file; give the folder that holds config.json")
    raise ModelNotFoundError(
        f"there is no folder {path}; pagedllm.resolve_model() fetches models by name"
    )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / _INDEX).is_file():
        index = _read_json(folder / _INDEX)
        names = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ModelNotFoundError(
                f"{folder} lacks {len(missing)} of the {len(names)} weight files in its index: "
                f"{', '.join(missing[:3])}; download them again"
            )
        return tuple(folder / name for name in names)
    if (folder / _WEIGHTS).is_file():
        return (folder / _WEIGHTS,)
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        raise ModelNotFoundError(
            f"the weights of {folder} are pickled ({pickled[0]}), which can run code when "
            "loaded; convert them with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(...)"
        )
    raise ModelNotFoundError(f"{folder} has no weights: no {_WEIGHTS} and no {_INDEX}")


def _check_header(path: Path) -> None:
    """Read a file's table of contents, which tells whether the file is whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelNotFoundError(
            f"{path} is damaged or no safetensors file ({error}); download it again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"{path.parent} is no model folder: it has no {path.name}"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotFoundError(f"{path} holds no JSON object")
    return value


def _config(folder: Path, raw: dict[str, Any], trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING and not (trust_remote_code and "auto_map" in raw):
        named = f"the model type {kind!r}" if kind else "no model_type"
        hint = "a newer transformers may"
        if "auto_map" in raw:
            hint = "trust_remote_code=True would run the code that comes with the model"
        raise UnsupportedModelError(
            f"{folder} has {named}, which transformers {__version__} does not know; {hint}"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UnsupportedModelError(f"{folder / 'config.json'} is not valid: {error}") from error


def eos_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the end tokens of a checkpoint's generation configuration, else of its own."""
    path = checkpoint.folder / "generation_config.json"
    named = _read_json(path).get("eos_token_id") if path.is_file() else None
    return token_set(named) or token_set(getattr(checkpoint.config, "eos_token_id", None))


def token_set(value: Any) -> frozenset[int]:
    """Return an ``eos_token_id`` as a set: it may be a number, a list or None."""
    return frozenset([value] if isinstance(value, int) else map(int, value or ()))
