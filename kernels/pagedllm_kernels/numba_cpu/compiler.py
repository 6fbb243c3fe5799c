"""Compiles the interpreter, once per storage type, and keeps the result on disk.

Owner: numba_cpu. Numba's cache of a function does not notice a change in a function that it
calls, so the folder is named after the source of this whole package; it also holds one
entry per processor, which Numba tells apart itself.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import config

from pagedllm_kernels.numba_cpu import interpreter, native
from pagedllm_kernels.numba_cpu.tiles import attention_tiles, linear_tiles

logger = logging.getLogger(__name__)

_LOCK = threading.Lock()


def compiled(name: str) -> int:
    """Return the address of a compiled function of :mod:`interpreter`, ``void (int64)``.

    The first call of a process takes 0.1 s when the disk cache has it and some seconds when
    not; a thread may make it while weights load.
    """
    with _LOCK:
        return _compile(name).address  # type: ignore[no-any-return]


@functools.cache
def _compile(name: str) -> Any:
    function = getattr(interpreter, name)
    signature = types.void(types.int64)
    started = time.perf_counter()
    outer = config.CACHE_DIR
    folder = cache_folder(outer)
    purpose, tag = name.split("_")
    native.define(tuple(attention_tiles(tag)), folder)
    if purpose == "model":
        native.define(tuple(linear_tiles(tag)), folder)
    config.CACHE_DIR = str(folder)
    try:
        result = numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        logger.warning(
            "compiled kernels cannot be kept in %s, so every start compiles them anew; set "
            "XDG_CACHE_HOME or NUMBA_CACHE_DIR to a folder that can be written",
            config.CACHE_DIR,
        )
        result = numba.cfunc(signature, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = outer
    seconds = time.perf_counter() - started
    logger.info("kernel %s: %.1f s (%s)", name, seconds, "cached" if result.cache_hits else "new")
    return result


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
