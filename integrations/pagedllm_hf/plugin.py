"""Registers the Hugging Face integration with pagedllm, as any plugin does.

Owner: the Hugging Face integration. Invariant: importing this module loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedllm.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagedllm import Config
    from pagedllm.hookspecs import ResolvedModel

PAGEDLLM_API_VERSION = 1


@hookimpl(trylast=True)
def pagedllm_resolve_model(
    name: str, revision: str | None, config: Config | None
) -> ResolvedModel | None:
    """Look on the Hub for what no other plugin knows and no folder has."""
    from pagedllm_hf import hub

    return hub.download(
        name,
        revision,
        token=config.token if config else None,
        cache_dir=config.download_dir if config else None,
        with_code=config.trust_remote_code if config else False,
        device=config.device if config else "cpu",
    )


@hookimpl
def pagedllm_adapters() -> Mapping[str, str]:
    """``pagedllm.load``, ``pagedllm.accelerate`` and ``pagedllm.generate``."""
    return {
        "load": "pagedllm_hf.hub:load",
        "accelerate": "pagedllm_hf.accelerate:accelerate",
        "generate": "pagedllm_hf.accelerate:generate",
    }
