"""How keys and values are kept in pages.

Owner: the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedllm.errors import ConfigError

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
