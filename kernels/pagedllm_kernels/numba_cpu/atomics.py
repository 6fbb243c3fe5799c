"""What threads share by address: atomic counters, and how to wait for one.

Owner: numba_cpu. Invariant: an address is an int64; nothing here allocates or raises.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from pagedllm_kernels.numba_cpu.emit import I32, I64, call, pointer
from pagedllm_kernels.numba_cpu.features import FEATURES
from pagedllm_kernels.numba_cpu.simd import emits


@emits
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 that other threads use and return what it was."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@emits
def load_acquire(typingctx: Any, address: Any) -> Any:
    """Load an int64 that another thread writes, and see all it wrote before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], I64), "acquire", 8)

    return types.int64(types.int64), codegen


@emits
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a waiting loop."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if FEATURES.x86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@emits
def give_way(typingctx: Any) -> Any:
    """Let another thread of this machine run on this core."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if FEATURES.yield_symbol:
            call(builder, FEATURES.yield_symbol, I32, [])
        return context.get_dummy_value()

    return types.void(), codegen
