"""Blocks of memory: their sizes, copying them, and fetching them ahead of their use.

Owner: numba_cpu. Invariant: an address is an int64; nothing here allocates or raises.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from pagedllm_kernels.numba_cpu.emit import (
    I8,
    pointer,
    prefetch,
)
from pagedllm_kernels.numba_cpu.layout import LINE
from pagedllm_kernels.numba_cpu.simd import emits, jit


@jit
def round_up(value: int, step: int) -> int:
    """Return the next multiple of ``step``."""
    return (value + step - 1) // step * step


@emits
def copy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy ``size`` bytes between places that do not overlap."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        cgutils.raw_memcpy(
            builder, pointer(builder, args[0], I8), pointer(builder, args[1], I8), args[2], 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@emits
def fetch_line(typingctx: Any, address: Any) -> Any:
    """Fetch a cache line, into the second level."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        prefetch(builder, args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@jit
def fetch(address: int, size: int) -> None:
    """Fetch ``size`` bytes; more than a few lines at once are dropped by the processor."""
    for line in range(0, size, LINE):
        fetch_line(address + line)
