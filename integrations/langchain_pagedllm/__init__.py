"""pagedllm as a LangChain LLM and chat model, in the caller's process.

Owner: the LangChain integration. Invariant: uses pagedllm's public API alone.

Import the classes from here or from ``pagedllm`` itself. ``init_chat_model`` has a fixed list
of providers and takes no registration: construct :class:`ChatPagedLLM` directly.
"""

from __future__ import annotations

from langchain_pagedllm.chat_models import ChatPagedLLM
from langchain_pagedllm.llms import PagedLLM

__all__ = ["ChatPagedLLM", "PagedLLM"]
