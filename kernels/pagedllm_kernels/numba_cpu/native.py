"""Compiles the register tiles with LLVM and gives Numba their symbols.

Owner: numba_cpu. Invariants: a tile's symbol is known to the process before any function
that calls it is compiled or loaded from Numba's cache; the compiled module lives as long as
the process, as Numba's own do.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config

from pagedllm_kernels.numba_cpu.tiles import Tile, emit

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


@functools.cache
def define(tiles: tuple[Tile, ...], folder: Path) -> Any:
    """Compile tiles, or load them from ``folder``, and make their symbols known.

    Returns:
        What keeps the code in memory.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    features = config.CPU_FEATURES
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=cpu,
        features=features,
        opt=3,
        jit=True,
        codemodel="jitdefault",
        reloc="static" if target.name.startswith("x86") else "default",
    )
    # The folder is named after the source of the tiles, so names say all that is left.
    names = " ".join(tile.symbol for tile in tiles)
    key = hashlib.sha256(f"{cpu} {features} {llvm.llvm_version_info} {names}".encode())
    path = folder / f"tiles-{key.hexdigest()[:16]}.o"
    code = _read(path)
    if code is None:
        module = llvm.parse_assembly(str(_module(tiles, machine)))
        module.verify()
        code = machine.emit_object(module)
        _write(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    for tile in tiles:
        llvm.add_symbol(tile.symbol, engine.get_function_address(tile.symbol))
    return engine


def _module(tiles: tuple[Tile, ...], machine: Any) -> Any:
    module = ir.Module("pagedllm_tiles")
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    for tile in tiles:
        emit(module, tile)
    return module


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _write(path: Path, code: bytes) -> None:
    """Keep compiled code, whole or not at all: another process may be reading."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(code)
        part.replace(path)
    except OSError as error:
        logger.info("compiled tiles are not kept: %s", error)
