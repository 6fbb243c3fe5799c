"""What the processor that Numba compiles for can do.

Owner: numba_cpu. Invariant: an instruction is used only if this says that it is there; when
``NUMBA_CPU_NAME`` or ``NUMBA_CPU_FEATURES`` asks for another processor than this one, only
what ``NUMBA_CPU_FEATURES`` names is believed.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm
from numba.core import config


@dataclass(frozen=True, slots=True)
class Features:
    """Instruction sets that the kernels use when they are there."""

    x86: bool
    wide: bool
    """32 vector registers of 16 floats (AVX-512): decides how large register tiles are."""
    bf16_dot: bool
    """``vdpbf16ps``: 32 bf16 products into 16 fp32 sums."""
    bf16_fast: bool
    """Whether that is faster than twice the products in fp32. On Zen it is; an Emerald Rapids
    core does 90 GFLOP/s with it and 140 in fp32."""
    int8_dot: bool
    """``vpdpbusd``: 64 products of a uint8 and an int8 into 16 int32 sums."""
    byte_shuffle: bool
    """``vpshufb`` of 64 bytes: looks up 16 values."""
    yield_symbol: str | None
    """C function that gives the core to another thread."""

    def widens(self, tag: str) -> bool:
        """Whether products of many rows stored as ``tag`` are faster in fp32."""
        return tag == "f16" or (tag == "bf16" and not (self.bf16_dot and self.bf16_fast))


def detect() -> Features:
    """Look at the processor and at Numba's configuration."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    host = {name for name, has in llvm.get_host_cpu_features().items() if has}
    if config.CPU_FEATURES is not None:
        asked = {f[1:] for f in config.CPU_FEATURES.split(",") if f.startswith("+")}
        host &= asked
    elif config.CPU_NAME is not None and llvm.get_host_cpu_name() != config.CPU_NAME:
        host = set()
    name = config.CPU_NAME or llvm.get_host_cpu_name()
    return Features(
        x86=x86,
        wide=x86 and "avx512f" in host,
        bf16_dot=x86 and {"avx512f", "avx512bf16", "avx512vl"} <= host,
        bf16_fast=name.startswith("znver"),
        int8_dot=x86 and {"avx512f", "avx512vnni"} <= host,
        byte_shuffle=x86 and {"avx512f", "avx512bw"} <= host,
        yield_symbol="sched_yield" if os.name == "posix" and sys.platform != "win32" else None,
    )


FEATURES = detect()
