"""Compiles the interpreter, once per storage type, and keeps the result on disk.

Owner: numba_cpu. Numba's cache of a function does not notice a change in a function that it
calls, so the folder is named after the source of this whole package; it also holds one
entry per processor, which Numba tells apart itself.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core import config

from pagedllm_kernels.numba_cpu import interpreter, native
from pagedllm_kernels.numba_cpu.simd import OPTIONS, UNITS, unit_symbol
from pagedllm_kernels.numba_cpu.tiles import TAGS, attention_tiles, linear_tiles

logger = logging.getLogger(__name__)

_LOCK = threading.Lock()


def compiled(name: str) -> int:
    """Return the address of a compiled function of :mod:`interpreter`, ``void (int64)``.

    The first call of a process takes 0.2 s when the disk cache has it and some seconds when
    not; a thread may make it while weights load.
    """
    with _LOCK:
        return _compile(name).address  # type: ignore[no-any-return]


@functools.cache
def _compile(name: str) -> Any:
    """Compile tiles, units and the function around them, in this order."""
    started = time.perf_counter()
    folder = cache_folder(config.CACHE_DIR)
    purpose, tag = name.split("_")
    native.define(tuple(attention_tiles(tag)), folder)
    units: tuple[str, ...] = interpreter.ATTENTION_UNITS
    if purpose == "model":
        native.define(tuple(linear_tiles(tag)), folder)
        units += interpreter.MODEL_UNITS
    for unit in units:
        _define(unit, tag, folder)
    result = _cached(getattr(interpreter, name), types.void(types.int64), folder)
    seconds = time.perf_counter() - started
    logger.info("kernel %s: %.1f s (%s)", name, seconds, "cached" if result.cache_hits else "new")
    return result


@functools.cache
def _define(unit: str, tag: str, folder: Path) -> Any:
    """Compile a unit and make its symbol known."""
    function = UNITS[unit]
    parameters = list(inspect.signature(function).parameters)
    stored = {name: kind for kind, name in TAGS.items()}[tag]
    kinds = [stored if p in ("wtag", "atag") else types.int64 for p in parameters]
    result = _cached(function, types.void(*kinds), folder)
    tags = [tag for p in parameters if p in ("wtag", "atag")]
    llvm.add_symbol(unit_symbol(function, tags), result.address)
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
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
