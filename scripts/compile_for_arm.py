"""Compile the CPU kernels for 64-bit Arm, and check that nothing in them is of x86 alone.

Run as ``python scripts/compile_for_arm.py``, on any processor. Numba's output for a plain
processor is given another target and compiled once more; so are the register tiles. What Arm
computes is not seen here, only that there is code for it, and from plain loops.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import TYPE_CHECKING, Any

# Before the kernels look up what the processor can do. Half precision is converted in a library
# function where neither processor has an instruction for it, and Arm has one.
os.environ |= {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+f16c,+avx"}
platform.machine = lambda: "aarch64"

import llvmlite.binding as llvm  # noqa: E402
import numba  # noqa: E402

from pagedllm_kernels.numba_cpu import compiler, native, simd  # noqa: E402
from pagedllm_kernels.numba_cpu.features import FEATURES  # noqa: E402
from pagedllm_kernels.numba_cpu.tiles import (  # noqa: E402
    attention_tiles,
    grouped_tiles,
    linear_tiles,
)

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = ("quantized_bf16", "model_f32", "attention_f16", "attention_f32_i8")
ARM_64 = 183
"""What ELF calls it."""
ONE_OF_X86 = re.compile(r".*(?:llvm\.x86\.| asm ).*")


def main() -> int:
    """Compile everything; return the exit status."""
    if FEATURES.x86 or FEATURES.wide or FEATURES.bf16_dot or FEATURES.int8_dot:
        raise SystemExit(f"the kernels take this for an x86 processor: {FEATURES}")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="neoverse-n1", opt=2, reloc="pic")
    tiles = dict(grouped_tiles())
    for tag in simd.TAGS.values():
        tiles |= attention_tiles(tag) | (linear_tiles(tag) if tag != "i8" else {})
        for_arm(str(native._module([*tiles.values()], machine)), machine)
        print(f"{len(tiles)} tiles of {tag}")

    class Compiled:
        address, cache_hits = 1, False

    def compile_anew(function: Any, signature: Any, folder: Path) -> type[Compiled]:
        for_arm(numba.cfunc(signature, **simd.OPTIONS)(function).inspect_llvm(), machine)
        print(f"{function.__name__} {signature}")
        return Compiled

    compiler._cached = compile_anew
    native.addresses = lambda tiles, folder: [1] * len(tiles)
    for program in PROGRAMS:
        compiler.compiled(program)
    return 0


def for_arm(text: str, machine: Any) -> None:
    """Compile a module in LLVM's language for Arm. Raises SystemExit: it is for x86 alone."""
    if found := ONE_OF_X86.search(text):
        raise SystemExit(f"only an x86 processor has this: {found[0].strip()}")
    text = re.sub("target triple = .*", f'target triple = "{machine.triple}"', text)
    text = re.sub("target datalayout = .*", f'target datalayout = "{machine.target_data}"', text)
    text = re.sub('"target-(cpu|features)"="[^"]*"', "", text)
    code = machine.emit_object(llvm.parse_assembly(text))
    if code[:4] != b"\x7fELF" or int.from_bytes(code[18:20], "little") != ARM_64:
        raise SystemExit("what came out is no code for 64-bit Arm")


if __name__ == "__main__":
    sys.exit(main())
