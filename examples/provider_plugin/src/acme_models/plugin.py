"""The hooks of acme-models. Import what is heavy inside functions: listing plugins loads this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedllm import ModelName, ModelNotFoundError, ResolvedModel, hookimpl

if TYPE_CHECKING:
    from pagedllm import Config

PAGEDLLM_API_VERSION = 1

NAME = "acme-models-model"
ALIASES = ("acme-models-model-tiny",)
REVISION = "1"


@hookimpl
def pagedllm_model_names() -> list[ModelName]:
    """List the names that are resolved below."""
    return [ModelName(NAME, "a tiny model that writes noise", ALIASES)]


@hookimpl
def pagedllm_resolve_model(
    name: str, revision: str | None, config: Config | None
) -> ResolvedModel | None:
    """Return the model's folder; None for names that are not ours."""
    if name not in (NAME, *ALIASES):
        return None
    if revision not in (None, REVISION):
        raise ModelNotFoundError(f"{name} has no revision {revision!r}, only {REVISION!r}.")
    from acme_models.fetch import model_folder

    return ResolvedModel(model_folder(config and config.download_dir), name, REVISION)
