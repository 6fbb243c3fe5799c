"""Compiles the interpreter and what it calls, once per storage type, by way of the disk.

Owner: numba_cpu. Numba's cache of a function does not notice a change in a function that it
calls, so the folder is named after the source of all kernels; within it, Numba and :mod:`native`
tell processors apart.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types
from numba.core import config

from pagedllm_kernels.numba_cpu import int8_programs, interpreter, layout, native
from pagedllm_kernels.numba_cpu.int8_pages import INT8_UNITS
from pagedllm_kernels.numba_cpu.simd import OPTIONS, TAGS, UNITS, unit_symbol
from pagedllm_kernels.numba_cpu.tiles import attention_tiles, grouped_tiles, linear_tiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A function of :mod:`interpreter` in machine code, ``void (int64)``."""

    address: int
    tiles: NDArray[np.int64]
    """Addresses of tiles by number."""


def compiled(name: str) -> Compiled:
    """Return a compiled function of :mod:`interpreter`.

    The first call of a process takes 0.2 s when the disk cache has it and some seconds when
    not.
    """
    with _LOCK:
        return _compile(name)


def compile_soon(name: str) -> None:
    """Compile in a thread of its own, while something else is done.

    The thread is no daemon: a process that ends in the middle of LLVM's work would crash.
    What goes wrong in it goes wrong again, and is told, where the code is needed.
    """

    def compile_it() -> None:
        with contextlib.suppress(Exception):
            compiled(name)

    threading.Thread(target=compile_it, name="pagedllm-compile").start()


@functools.cache
def _compile(name: str) -> Compiled:
    started = time.perf_counter()
    folder = cache_folder(config.CACHE_DIR)
    purpose, tag, *other = name.split("_")
    pages = other[0] if other else tag
    tiles = linear_tiles(tag) | attention_tiles(pages)
    units = [*(INT8_UNITS if other else ()), *interpreter.ATTENTION_UNITS]
    if purpose != "attention":
        units += interpreter.MODEL_UNITS
    if purpose == "quantized":
        units += interpreter.QUANTIZED_UNITS
        tiles |= grouped_tiles()
    table = np.zeros(layout.NUM_TILES, dtype=np.int64)
    table[list(tiles)] = native.addresses(list(tiles.values()), folder)
    for unit in units:
        _define(unit, tag, pages, folder)
    function = getattr(int8_programs if other else interpreter, name)
    result = _cached(function, types.void(types.int64), folder)
    seconds = time.perf_counter() - started
    logger.info("kernel %s: %.1f s (%s)", name, seconds, "cached" if result.cache_hits else "new")
    return Compiled(result.address, table)


@functools.cache
def _define(unit: str, tag: str, pages: str, folder: Path) -> Any:
    """Compile a unit, make its symbol known, and return what keeps it in memory."""
    function = UNITS[unit]
    tags = {"atag": tag, "ptag": pages, "wtag": "f32" if pages == "i8" else pages}
    kinds = {name: kind for kind, name in TAGS.items()}
    parameters = [*inspect.signature(function).parameters]
    signature = [kinds[tags[p]] if p in tags else types.int64 for p in parameters]
    result = _cached(function, types.void(*signature), folder)
    symbol = unit_symbol(function, [tags[p] for p in parameters if p in tags])
    llvm.add_symbol(symbol, result.address)
    return result


def _cached(function: Any, signature: Any, folder: Path) -> Any:
    """Compile a function to machine code, by way of the disk where it can be written."""
    outer = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        return numba.cfunc(signature, cache=True, **OPTIONS)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _warn_uncached(folder)
        return numba.cfunc(signature, **OPTIONS)(function)
    finally:
        config.CACHE_DIR = outer


@functools.cache
def _warn_uncached(folder: Path) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s, so every start compiles them anew; set "
        "XDG_CACHE_HOME or NUMBA_CACHE_DIR to a folder that can be written",
        folder,
    )


def cache_folder(numba_cache: str) -> Path:
    """Return where compiled kernels are kept: beside Numba's own, or in the user's cache."""
    if numba_cache:
        base = Path(numba_cache)
    else:
        home = os.environ.get("XDG_CACHE_HOME")
        base = Path(home) if home else Path.home() / ".cache"
    return base / "pagedllm" / f"kernels-{_source_hash()}"


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
