"""Compiles the register tiles with LLVM, by way of the disk.

Owner: numba_cpu. Invariant: compiled code lives as long as the process, as Numba's does.
"""

from __future__ import annotations

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


_ENGINES: list[Any] = []  # what keeps compiled code in memory


def addresses(tiles: list[Tile], folder: Path) -> list[int]:
    """Compile tiles, or load them from ``folder``; return the addresses of their functions."""
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
    _ENGINES.append(engine)
    return [engine.get_function_address(tile.symbol) for tile in tiles]


def _module(tiles: list[Tile], machine: Any) -> Any:
    module = ir.Module("pagedllm_tiles")
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    for tile in dict.fromkeys(tiles):  # small tiles of two purposes may be one and the same
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
