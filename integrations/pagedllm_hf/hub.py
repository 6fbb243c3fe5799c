"""Downloads models from the Hugging Face Hub: safetensors, configuration and tokenizer only.

Owner: the Hugging Face integration. Invariants: nothing that would be unpickled is ever
downloaded; a model that is in the cache works without a network; every failure is a
:class:`ModelNotFoundError` that says what to do. Environment variables of huggingface_hub
(``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``) hold here as everywhere.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm import ModelNotFoundError, ResolvedModel

if TYPE_CHECKING:
    from collections.abc import Collection

    from pagedllm import LLM

logger = logging.getLogger(__name__)

ALLOWED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
"""Weights, configuration, chat templates and the vocabularies of every kind of tokenizer."""
ALLOWED_CODE = ("*.py",)
IGNORED = ("*/*", "consolidated*", "original*")
"""Second copies of the weights in other layouts, and folders for other frameworks."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TIMEOUT = 10.0
"""Seconds to wait for the Hub's first answer."""


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
) -> ResolvedModel:
    """Bring a repository's model into the cache, or find it there.

    Args:
        repo_id: ``organisation/model``.
        revision: branch, tag or commit; the main branch by default.
        token: access token; by default the one that is logged in.
        cache_dir: the cache's folder; by default huggingface_hub's.
        with_code: also take Python files, for ``trust_remote_code``.

    Returns:
        The snapshot's folder, its revision the commit's hash.

    Raises:
        ModelNotFoundError: see the module's invariants.
    """
    from huggingface_hub import snapshot_download

    fetch = functools.partial(
        snapshot_download,
        repo_id,
        revision=revision,
        cache_dir=cache_dir,
        token=token,
        allow_patterns=[*ALLOWED, *(ALLOWED_CODE if with_code else ())],
        ignore_patterns=list(IGNORED),
    )
    try:
        _check_files(repo_id, _list_files(repo_id, revision, token))
        folder = Path(fetch())
    except ModelNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 - the HTTP client's own exceptions vary by release
        reason, may_use_cache = _explain(repo_id, revision, error)
        try:
            if not may_use_cache:
                raise ModelNotFoundError(reason) from error
            folder = Path(fetch(local_files_only=True))
        except (OSError, ValueError):
            raise ModelNotFoundError(reason) from error
        if not _offline():
            logger.warning("Using the copy of %s in the cache. %s", repo_id, reason)
    _check_complete(repo_id, folder)
    return ResolvedModel(path=folder, name=repo_id, revision=folder.name)


def _list_files(repo_id: str, revision: str | None, token: str | None) -> list[str]:
    from huggingface_hub import HfApi

    info = HfApi(token=token).model_info(repo_id, revision=revision, timeout=TIMEOUT)
    return [file.rfilename for file in info.siblings or ()]


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
    gguf = (
        " It has GGUF files, which need a plugin."
        if any(name.endswith(".gguf") for name in top)
        else ""
    )
    raise ModelNotFoundError(f"{repo_id!r} on the Hub has no safetensors weights.{gguf}")


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
