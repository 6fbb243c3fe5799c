"""pagedllm as a LangChain LLM and chat model, in the caller's process.

Owner: the LangChain integration. Invariant: uses pagedllm's public API alone.

Import the classes from here or from ``pagedllm`` itself. ``init_chat_model`` has a fixed list
of providers and takes no registration: construct :class:`ChatPagedLLM` directly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_pagedllm.chat_models import ChatPagedLLM
    from langchain_pagedllm.llms import PagedLLM

__all__ = ["ChatPagedLLM", "PagedLLM"]
_MODULES = {"ChatPagedLLM": "chat_models", "PagedLLM": "llms"}


def __getattr__(name: str) -> Any:
    """Import a class when it is asked for: every engine loads the plugin in this package."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
