"""How much memory there is, and how many pages to make of it.

Owner: the worker. Invariant: sizes are bytes throughout; the plan always holds at least
one sequence of the planned length.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagedllm.errors import ConfigError
from pagedllm.worker.cache_dtype import cache_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.config import Config
    from pagedllm.models.base import PagedModel
    from pagedllm_kernels.types import LayerCache

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_CPU_DEFAULT = 4 * _GIB
"""On a CPU the cache shares memory with everything else, so it stays modest unless asked."""
_CPU_FRACTION = 0.25
_UNLIMITED_LEN = 8192
"""Sequence length for models that state none."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The page cache that a worker makes."""

    num_pages: int
    max_model_len: int
    bytes_per_page: int


def allocate_pages(config: Config, model: PagedModel, num_pages: int) -> Sequence[LayerCache]:
    """Return the memory of so many pages, a cache per layer.

    Raises:
        ConfigError: the model's attention does not keep pages as configured.
    """
    dtype = cache_dtype(config, model)
    layers = tuple(
        model.attention.allocate(
            num_pages,
            config.page_size,
            shape.num_kv_heads,
            shape.head_dim,
            shape.value_dim,
            dtype,
            model.device,
        )
        for shape in model.layers
    )
    if config.preallocate_kv_cache:
        # An operating system hands out host memory when it is first written.
        for layer in layers:
            layer.key.zero_()
            layer.value.zero_()
    return layers


def bytes_per_page(config: Config, model: PagedModel) -> int:
    """Return what a page takes over all layers: weighed, since layouts differ in padding."""
    return sum(c.key.nbytes + c.value.nbytes for c in allocate_pages(config, model, 1))


def plan_cache(config: Config, model: PagedModel) -> CachePlan:
    """Choose the number of pages and the longest sequence.

    An explicit ``max_model_len`` that does not fit is an error; one taken from the model
    is lowered to what fits, with a warning.

    Raises:
        ConfigError: the settings contradict the model or the memory.
    """
    limit = model.max_positions
    asked = config.max_model_len
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is more than the {limit} positions that "
            f"{model.architecture} was made for; give {limit} or less",
            "max_model_len",
        )
    max_len = asked or limit or _UNLIMITED_LEN
    page_bytes = bytes_per_page(config, model)
    most = config.max_batch_size * -(-max_len // config.page_size)
    if config.num_pages is not None:
        num_pages, source = config.num_pages, "num_pages"
    elif config.kv_cache_bytes is not None:
        num_pages, source = config.kv_cache_bytes // page_bytes, "kv_cache_memory"
    else:
        num_pages = min(most, _memory_for_cache(config, model) // page_bytes)
        source = "the memory that is free"
    if num_pages < 1:
        raise ConfigError(
            f"{source} gives no room for one page of {config.page_size} tokens "
            f"({page_bytes:,} bytes); set kv_cache_memory to more",
            "kv_cache_memory",
        )
    room = num_pages * config.page_size
    if room < max_len:
        if asked is not None:
            raise ConfigError(
                f"max_model_len={asked} needs {-(-asked // config.page_size)} pages "
                f"({-(-asked // config.page_size) * page_bytes:,} bytes) and {source} gives "
                f"{num_pages} ({room} tokens); raise kv_cache_memory or lower max_model_len",
                "max_model_len",
            )
        logger.warning(
            "max_model_len is %d and not the model's %d: %s holds no more tokens",
            room, max_len, source,
        )  # fmt: skip
        max_len = room
    return CachePlan(num_pages, max_len, page_bytes)


def _memory_for_cache(config: Config, model: PagedModel) -> int:
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        # Activations of the largest step are small beside the pages; leave them a tenth of
        # what the weights left over.
        allowed = total * config.gpu_memory_utilization - (total - free)
        return int(allowed * 0.9)
    return min(_CPU_DEFAULT, int(_CPU_FRACTION * available_memory()))


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the host memory, in bytes, that this process could still take."""
    available = 8 * _GIB
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:  # not Linux
        import os

        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            room = int((cgroup / limit).read_text()) - int((cgroup / used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        available = min(available, max(0, room))
    return available
