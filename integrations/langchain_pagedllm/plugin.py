"""Registers the LangChain classes with pagedllm, as any plugin does.

Owner: the LangChain integration. Invariant: importing this module loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedllm.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGEDLLM_API_VERSION = 1


@hookimpl
def pagedllm_adapters() -> Mapping[str, str]:
    """``from pagedllm import PagedLLM, ChatPagedLLM``."""
    return {
        "PagedLLM": "langchain_pagedllm.llms:PagedLLM",
        "ChatPagedLLM": "langchain_pagedllm.chat_models:ChatPagedLLM",
    }
