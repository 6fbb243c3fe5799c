"""pagedllm: a paged-attention LLM inference engine in plain Python.

Owner: the public API. Invariants: everything in ``__all__`` is public and nothing else is;
importing this package loads neither torch nor transformers nor numpy, since every name is
imported when it is first used. Names that adapters register (``PagedLLM``, ``load``) can be
imported from here too, without the engine importing any adapter.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedllm.async_llm import AsyncLLM
    from pagedllm.config import Config
    from pagedllm.errors import (
        ConfigError,
        EngineClosedError,
        EngineError,
        ModelNotFoundError,
        PagedLLMError,
        RequestAbortedError,
        RequestTooLongError,
        UnsupportedModelError,
        ValidationError,
    )
    from pagedllm.hookspecs import ModelName, ResolvedModel, hookimpl
    from pagedllm.llm import LLM
    from pagedllm.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from pagedllm.plugins import list_plugins, plugin_registry, resolve_model
    from pagedllm.sampling_params import SamplingParams
    from pagedllm.structured import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Config",
    "ConfigError",
    "EmbeddingOutput",
    "EngineClosedError",
    "EngineError",
    "Logprob",
    "ModelName",
    "ModelNotFoundError",
    "PagedLLMError",
    "RequestAbortedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLongError",
    "ResolvedModel",
    "SamplingParams",
    "StructuredOutput",
    "UnsupportedModelError",
    "ValidationError",
    "__version__",
    "hookimpl",
    "list_plugins",
    "plugin_registry",
    "resolve_model",
]

_MODULES = {
    "async_llm": ("AsyncLLM",),
    "config": ("Config",),
    "errors": (
        "ConfigError",
        "EngineClosedError",
        "EngineError",
        "ModelNotFoundError",
        "PagedLLMError",
        "RequestAbortedError",
        "RequestTooLongError",
        "UnsupportedModelError",
        "ValidationError",
    ),
    "hookspecs": ("ModelName", "ResolvedModel", "hookimpl"),
    "llm": ("LLM",),
    "outputs": (
        "CompletionOutput",
        "EmbeddingOutput",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
    ),
    "plugins": ("list_plugins", "plugin_registry", "resolve_model"),
    "sampling_params": ("SamplingParams",),
    "structured": ("StructuredOutput",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name, or an adapter's, on first use."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    else:
        from pagedllm.plugins import get_manager

        adapters = get_manager().registry("pagedllm_adapters")
        if name not in adapters:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}, and no adapter registers it"
            )
        value = adapters[name].load()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
