"""How keys and values are kept in pages, and what that takes.

Owner: the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedllm.errors import ConfigError
from pagedllm_kernels.int8_pages import SCALE_BYTES

if TYPE_CHECKING:
    from pagedllm.config import Config
    from pagedllm.models.base import PagedModel


def cache_dtype(config: Config, model: PagedModel) -> torch.dtype:
    """Return the dtype of keys and values in pages.

    Raises:
        ConfigError: the model's attention does not keep them so.
    """
    if config.kv_cache_dtype == "auto":
        return model.dtype
    if not getattr(model.attention, "int8_pages", False):
        raise ConfigError(
            f"kv_cache_dtype: the attention backend '{model.attention.name}' keeps no pages in "
            f"{config.kv_cache_dtype}; use 'auto', or another attention_backend",
            "kv_cache_dtype",
        )
    return torch.int8


def bytes_per_token(config: Config, model: PagedModel) -> int:
    """Return what one token's keys and values, and their scales, take over all layers."""
    dtype = cache_dtype(config, model)
    scales = 2 * SCALE_BYTES if dtype == torch.int8 else 0
    return sum(
        s.num_kv_heads * ((s.head_dim + s.value_dim) * dtype.itemsize + scales)
        for s in model.layers
    )
