"""What the C library's allocator holds, and how it treats large blocks.

Owner: the server integration. Invariant: nothing here fails; what another C library than
glibc does not offer is left out.

A step's large temporary arrays differ in size from step to step. glibc learns from the first
that is freed to take such blocks from its heap instead of from the system, and a heap that
they are cut from in ever other sizes grows for hours, by a quarter or more, though nothing is
leaked. Taken from the system one by one they leave nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import sys

LARGE = 1 << 20
"""Bytes from which on a block comes from the system, and goes back to it when it is freed."""
_M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
_VARIABLE = "MALLOC_MMAP_THRESHOLD_"


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


def return_large_blocks() -> None:
    """Have large blocks returned, in this process and those it starts; a user's setting wins."""
    mallopt = _glibc("mallopt")
    if mallopt is None or _VARIABLE in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt(_M_MMAP_THRESHOLD, LARGE)
    os.environ[_VARIABLE] = str(LARGE)


def allocated_bytes() -> int | None:
    """Bytes that are allocated and not freed, beside small Python objects; None: unknown."""
    mallinfo2 = _glibc("mallinfo2")
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), name, None)
