"""Brings one file from the Hugging Face Hub into its cache, or finds it there.

Owner: pagedllm-gguf. Invariants: huggingface_hub's environment variables hold; a file in the
cache works without a network; every failure is one line that says what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagedllm import ModelNotFoundError

if TYPE_CHECKING:
    from pagedllm import Config


def download(repository: str, file: str, revision: str | None, config: Config | None) -> Path:
    """Return the file's path in the cache.

    Raises:
        ModelNotFoundError: it cannot be had.
    """
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(
            repository,
            file,
            revision=revision,
            cache_dir=config.download_dir if config else None,
            token=config.token if config else None,
        )
    except Exception as error:
        raise ModelNotFoundError(_reason(repository, file, revision, error)) from error
    return Path(found)


def _reason(repository: str, file: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    log_in = "log in with `hf auth login`, set HF_TOKEN or pass token=..."
    name = f"{file!r} of {repository!r}"
    # The cache's own error wraps what the Hub said; that is the one to explain.
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(each, kinds) for each in causes)

    if isinstance(error, errors.HFValidationError):
        return f"{repository!r} is no repository's name (organisation/repository)."
    if constants.HF_HUB_OFFLINE:
        return (
            f"{name} is not in the cache and HF_HUB_OFFLINE is set. Unset it, or run "
            f"`hf download {repository} {file}` where there is a network."
        )
    if is_any(errors.GatedRepoError):
        terms = f"https://huggingface.co/{repository}"
        return f"{repository!r} is gated. Accept its terms at {terms} and {log_in}."
    if is_any(errors.RevisionNotFoundError):
        return f"{repository!r} on the Hub has no revision {revision!r}."
    if is_any(errors.RemoteEntryNotFoundError):
        return f"{repository!r} on the Hub has no file {file!r}; look at its list of files."
    if is_any(errors.RepositoryNotFoundError):
        return f"The Hub has no {repository!r} that you may see. Check the name, or {log_in}."
    if isinstance(error, OSError) and "space" in str(error).lower():
        return f"{name} does not fit on the disk: make room, or name a folder with download_dir."
    said = " ".join(str(error).split())
    return f"{name} cannot be downloaded and is not in the cache ({type(error).__name__}: {said})."
