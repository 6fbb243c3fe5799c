"""Paged attention and other kernels of pagedllm: tensors in, tensors out.

Owner: pagedllm_kernels. Invariant: importing this package imports neither torch nor any
compiler; :func:`select_attention` imports the implementation that it picks.
"""

from __future__ import annotations

from pagedllm_kernels.registry import attention_backends, select_attention
from pagedllm_kernels.types import AttentionBackend, AttentionMetadata, LayerCache

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "LayerCache",
    "attention_backends",
    "select_attention",
]
