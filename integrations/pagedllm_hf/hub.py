"""Downloads models from the Hugging Face Hub: safetensors, configuration and tokenizer only.

Owner: the Hugging Face integration. Invariants: nothing that would be unpickled is ever
downloaded, and code only from a commit that the user named; what cannot fit is refused before
the first byte; new weights have the hash that the Hub names; a model that is in the cache works
without a network; every failure says what to do. Environment variables of huggingface_hub
(``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``) hold here as everywhere.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm import ConfigError, ModelNotFoundError, PagedLLMError, ResolvedModel

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from huggingface_hub.hf_api import ModelInfo, RepoSibling

    from pagedllm import LLM

logger = logging.getLogger(__name__)

ALLOWED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
"""Weights, configuration, chat templates and the vocabularies of every kind of tokenizer."""
ALLOWED_CODE = ("*.py",)
IGNORED = ("*/*", "consolidated*", "original*")
"""Second copies of the weights in other layouts, and folders for other frameworks."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COMMIT = re.compile(r"[0-9a-f]{40}")


def load(
    model: str, *, revision: str | None = None, token: str | None = None, **config: Any
) -> LLM:
    """Load a model from the Hub, a folder or a plugin into an engine of its own.

    Args:
        model: ``organisation/model``, a path, or a plugin's short name.
        revision: branch, tag or commit.
        token: Hugging Face access token; by default the one that is logged in.
        config: any field of :class:`pagedllm.Config`.

    Raises:
        ModelNotFoundError: the model cannot be had; says why and what to do.
    """
    from pagedllm import LLM

    return LLM(model, revision=revision, token=token, **config)


def download(
    repo_id: str,
    revision: str | None = None,
    *,
    token: str | None = None,
    cache_dir: str | None = None,
    with_code: bool = False,
    device: str = "cpu",
) -> ResolvedModel:
    """Bring a repository's model into the cache, or find it there.

    Args:
        repo_id: ``organisation/model``.
        revision: branch, tag or commit; the main branch by default.
        token: access token; by default the one that is logged in.
        cache_dir: the cache's folder; by default huggingface_hub's.
        with_code: also take Python files, for ``trust_remote_code``; the revision must then
            be a commit, where there are any.
        device: whose memory the weights have to fit; ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        The snapshot's folder, its revision the commit's hash.

    Raises:
        ModelNotFoundError: see the module's invariants.
        ConfigError: code was asked for without a commit.
    """
    from huggingface_hub import snapshot_download

    patterns = [*ALLOWED, *(ALLOWED_CODE if with_code else ())]
    fetch = functools.partial(
        snapshot_download,
        repo_id,
        revision=revision,
        cache_dir=cache_dir,
        token=token,
        allow_patterns=patterns,
        ignore_patterns=list(IGNORED),
    )
    try:
        info = _ask(repo_id, revision, token)
        _check_files(repo_id, [file.rfilename for file in info.siblings or ()])
        if with_code:
            _check_code(repo_id, revision, info)
        files = _wanted(info, patterns)
        new = _not_cached(repo_id, info, files, cache_dir)
        _check_room(repo_id, files, new, cache_dir, device)
        folder = Path(fetch())
        _check_hashes(repo_id, folder, new)
    except PagedLLMError:
        raise
    except Exception as error:  # the HTTP client's own vary by release
        reason, may_use_cache = _explain(repo_id, revision, error)
        try:
            if not may_use_cache:
                raise ModelNotFoundError(reason) from error
            folder = Path(fetch(local_files_only=True))
        except (OSError, ValueError):
            raise ModelNotFoundError(reason) from error
        if with_code and any(folder.glob("*.py")) and not COMMIT.fullmatch(revision or ""):
            raise _unpinned(repo_id, revision, folder.name) from error
        if not _offline():
            logger.warning("Using the copy of %s in the cache. %s", repo_id, reason)
    _check_complete(repo_id, folder)
    return ResolvedModel(path=folder, name=repo_id, revision=folder.name)


def _ask(repo_id: str, revision: str | None, token: str | None) -> ModelInfo:
    from huggingface_hub import HfApi, constants

    api = HfApi(token=token)
    return api.model_info(
        repo_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True
    )


def _wanted(info: ModelInfo, patterns: Sequence[str]) -> list[RepoSibling]:
    """Return the files that snapshot_download takes for these patterns."""

    def matches(file: RepoSibling, globs: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(file.rfilename, glob) for glob in globs)

    return [
        file
        for file in info.siblings or ()
        if matches(file, patterns) and not matches(file, IGNORED)
    ]


def _not_cached(
    repo_id: str, info: ModelInfo, files: Sequence[RepoSibling], cache_dir: str | None
) -> list[RepoSibling]:
    from huggingface_hub import try_to_load_from_cache

    return [
        file
        for file in files
        if not isinstance(try_to_load_from_cache(repo_id, file.rfilename, cache_dir, info.sha), str)
    ]


def _check_files(repo_id: str, names: Collection[str]) -> None:
    """Refuse a repository without a model that can be read safely, before any download."""
    top = [name for name in names if "/" not in name]
    if any(name.endswith(".safetensors") for name in top):
        return
    pickled = sorted(name for name in top if name.endswith(PICKLED))
    if pickled:
        raise ModelNotFoundError(
            f"{repo_id!r} on the Hub has its weights in {pickled[0]!r} only. Such files are "
            "pickled, and unpickling runs code of whoever wrote them, so they are not read. "
            "Look for a revision or a repository with safetensors files."
        )
    has_gguf = any(name.endswith(".gguf") for name in top)
    hint = " It has GGUF files, which need a plugin." if has_gguf else ""
    raise ModelNotFoundError(f"{repo_id!r} on the Hub has no safetensors weights.{hint}")


def _check_code(repo_id: str, revision: str | None, info: ModelInfo) -> None:
    """Take code from a commit alone: a branch may hold other code tomorrow."""
    has_code = any(file.rfilename.endswith(".py") for file in info.siblings or ())
    if has_code and not COMMIT.fullmatch(revision or ""):
        raise _unpinned(repo_id, revision, info.sha)


def _unpinned(repo_id: str, revision: str | None, commit: str | None) -> ConfigError:
    return ConfigError(
        f"trust_remote_code runs what {repo_id!r} has in it, so name the commit that you have "
        f"read: revision={commit!r} is the one that {revision or 'main'!r} stands for now.",
        "revision",
    )


def _check_room(
    repo_id: str,
    files: Sequence[RepoSibling],
    new: Sequence[RepoSibling],
    cache_dir: str | None,
    device: str,
) -> None:
    """Refuse what fits neither the disk nor the device, before any download."""
    if not new:
        return
    from huggingface_hub import constants

    weights = sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
    memory = _memory(device)
    if memory is not None and weights > memory:
        raise ModelNotFoundError(
            f"{repo_id!r} has {_gigabytes(weights)} of weights and {device} has "
            f"{_gigabytes(memory)} of memory: take a smaller model or a quantised one."
        )
    folder = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    needed = sum(file.size or 0 for file in new)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelNotFoundError(
            f"{repo_id!r} takes {_gigabytes(needed)} to download and {str(folder)!r} has "
            f"{_gigabytes(free)} left: make room, or name another folder with download_dir."
        )


def _memory(device: str) -> int | None:
    """Return a device's memory in bytes; None when it cannot be told."""
    if not device.startswith("cuda"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    if not torch.cuda.is_available():
        return None  # choosing the device says so, with its own error
    return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _check_hashes(repo_id: str, folder: Path, new: Sequence[RepoSibling]) -> None:
    """Compare what has just been downloaded with the Hub's own hashes; delete what differs."""
    for file in new:
        path = folder / file.rfilename
        if file.lfs is None or not path.is_file():
            continue
        with path.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
        if actual != file.lfs.sha256:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise ModelNotFoundError(
                f"{file.rfilename!r} of {repo_id!r} arrived with other content than the Hub says "
                "(its SHA-256 differs), and was deleted. Try again; if it stays so, something "
                "between here and the Hub changes what it carries."
            )


def _check_complete(repo_id: str, folder: Path) -> None:
    """Refuse a snapshot that an interrupted download left without some of its shards."""
    index = folder / "model.safetensors.index.json"
    wanted = {"config.json"}
    if index.is_file():
        wanted |= set(json.loads(index.read_text())["weight_map"].values())
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise ModelNotFoundError(
            f"The copy of {repo_id!r} in the cache is incomplete: {missing[0]!r} is missing. "
            f"Connect to the network and run `hf download {repo_id}`."
        )


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _explain(repo_id: str, revision: str | None, error: Exception) -> tuple[str, bool]:
    """Return (what went wrong and what to do, whether a copy in the cache will do)."""
    from huggingface_hub import errors

    log_in = "log in with `hf auth login`, set HF_TOKEN or pass token=..."
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        reason = f"{repo_id!r} is no folder here, and no name for the Hub (organisation/model)."
        return reason, False
    if _offline():
        reason = (
            f"{repo_id!r} is not in the cache and HF_HUB_OFFLINE is set. Unset it, or run "
            f"`hf download {repo_id}` where there is a network."
        )
        return reason, True
    if isinstance(error, errors.GatedRepoError):
        terms = f"https://huggingface.co/{repo_id}"
        reason = f"{repo_id!r} is gated. Accept its terms at {terms} and {log_in}."
        return reason, True
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id!r} on the Hub has no revision {revision!r}.", False
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        reason = (
            f"The Hub has no model {repo_id!r} that you may see. Check the name; "
            f"if it is private, {log_in}."
        )
        return reason, True
    if status == 403:
        return f"The Hub refuses access to {repo_id!r}: {log_in}.", True
    if status == 429:
        return f"The Hub takes no more requests for now (429). Wait a while, or {log_in}.", True
    if status is not None:
        return f"The Hub answered {status} for {repo_id!r}. Try again later.", True
    return (
        f"{repo_id!r} is not in the cache and the Hub cannot be reached "
        f"({type(error).__name__}: {' '.join(str(error).split()) or 'no answer'}).",
        True,
    )
