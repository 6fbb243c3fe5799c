"""What this machine offers: its device and the processors that this process may use.

Owner: ``config``. Invariant: torch is imported only where a CUDA device may be present.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import secrets
import sys
from pathlib import Path

from pagedllm.errors import ConfigError

_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


def resolve_device(device: str) -> str:
    """Return ``cpu``, ``cuda`` or ``cuda:N`` for what was asked, ``auto`` included.

    Raises:
        ConfigError: torch cannot see the CUDA device that was asked for.
    """
    if device == "cpu" or (device == "auto" and not _may_have_gpu()):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count else "cpu"
    if count == 0:
        raise ConfigError(
            f"device: '{device}' was asked for, but torch {torch.__version__} sees no CUDA "
            f"device; use 'cpu', or install a driver and torch's CUDA build",
            "device",
        )
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError(
            f"device: '{device}' was asked for, but there are {count} CUDA devices; "
            f"use 'cuda:0' to 'cuda:{count - 1}'",
            "device",
        )
    return device


def _may_have_gpu() -> bool:
    """Whether it is worth the seconds of importing torch to look."""
    if sys.platform == "darwin":
        return False
    if sys.platform == "linux" and not any(map(os.path.exists, _GPU_NODES)):
        return False
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def default_threads() -> int:
    """CPU threads to compute with: OMP_NUM_THREADS, else all that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) > 0 else usable_cpus()


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self")) -> int:
    """Processors that this process may use: its affinity, within its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cgroup_quota(cgroup, proc)
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _cgroup_quota(cgroup: Path, proc: Path) -> float | None:
    """The least quota, in processors, of this process's control group and those above it."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = cgroup / "cpu" if controllers else cgroup
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == base.parent:
                break
            quotas += _quota_of(folder)
        # In a container the path may be the host's, while only its own group is mounted.
        quotas += _quota_of(base)
    return min(quotas, default=None)


def _quota_of(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").exists():  # version 2: "max 100000" or "50000 100000"
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return [] if limit in ("max", "-1") else [int(limit) / int(period)]
    except (OSError, ValueError):
        return []


def random_seed() -> int:
    """A fresh seed of 63 bits."""
    return secrets.randbits(63)
