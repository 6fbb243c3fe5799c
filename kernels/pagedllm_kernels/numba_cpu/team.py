"""Threads: how many there may be, and how to run a compiled function on all of them.

Owner: numba_cpu. A function runs in the OpenMP threads that torch's own operations run in
where torch has them, so the two never compete for cores; elsewhere, in Python threads that
hold no lock.
"""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def available_threads(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may use at once: by affinity and by cgroup quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for quota_file, period_file in (
        ("cpu.max", None),
        ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"),
    ):
        try:
            words = (cgroup / quota_file).read_text().split()
            if period_file is not None:
                words += (cgroup / period_file).read_text().split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # no such group, or "max"
            continue
        if quota > 0 and period > 0:
            cores = min(cores, max(1, round(quota / period)))
    return cores


class Team:
    """Runs a ``void (int64)`` on several threads at once, the caller's among them.

    Args:
        threads: at most this many; None takes the smaller of :func:`available_threads` and
            torch's own setting.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            import torch

            threads = min(available_threads(), torch.get_num_threads())
        if threads < 1:
            raise ValueError(f"threads={threads}: give 1 or more")
        self.threads = threads
        self._parallel = _gomp_parallel()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, function: int, argument: int) -> None:
        """Call the function at an address on every thread and return when all are done."""
        if self.threads > 1 and self._parallel is not None:
            self._parallel(function, argument, self.threads, 0)
            return
        call = _CALL(function)
        if self.threads == 1:
            call(argument)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, "pagedllm-kernels")
        others = [self._pool.submit(call, argument) for _ in range(self.threads - 1)]
        call(argument)
        for other in others:
            other.result()


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    """Return libgomp's entry point of a parallel region, from the library that torch uses."""
    import torch

    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function  # type: ignore[no-any-return]
    return None
