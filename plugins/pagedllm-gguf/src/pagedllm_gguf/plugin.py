"""Resolves ``path/to/FILE.gguf`` and ``organisation/repository:FILE.gguf``.

Owner: pagedllm-gguf. Invariants: other names are nobody's business here; a file that exists
is that file, whatever else its name could mean.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pagedllm import ConfigError, ModelNotFoundError
from pagedllm.hookspecs import ResolvedModel, hookimpl

if TYPE_CHECKING:
    from pagedllm import Config

PAGEDLLM_API_VERSION = 1

_ON_THE_HUB = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<file>[^:]+)")


@hookimpl
def pagedllm_resolve_model(
    name: str, revision: str | None, config: Config | None
) -> ResolvedModel | None:
    """Convert a GGUF file, downloading it first if need be; None for other names."""
    if not name.lower().endswith(".gguf"):
        return None
    path = Path(name).expanduser()
    on_the_hub = _ON_THE_HUB.fullmatch(name)
    commit = None
    if path.is_file():
        if revision is not None:
            raise ConfigError(f"revision: the file {name!r} has none; leave it out", "revision")
    elif on_the_hub is not None:
        from pagedllm_gguf.hub import download

        path = download(on_the_hub["repository"], on_the_hub["file"], revision, config)
        commit = _commit(path)
    else:
        raise ModelNotFoundError(
            f"There is no file {name!r}. For one on the Hub give organisation/repository:FILE.gguf."
        )
    from pagedllm_gguf.convert import CONVERTER_VERSION, converted_folder

    dtype = "auto" if config is None else config.dtype
    folder = converted_folder(path, dtype, None if config is None else config.download_dir)
    known = None if commit is None else f"{commit}-{CONVERTER_VERSION}"
    return ResolvedModel(path=folder, name=name, revision=known)


def _commit(path: Path) -> str | None:
    """Return the commit that a file of the Hub's cache belongs to."""
    found = re.search(r"/snapshots/([0-9a-f]{40})/", path.as_posix())
    return None if found is None else found[1]
