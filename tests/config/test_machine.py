"""How many processors a process may use, under the two versions of Linux control groups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pagedllm._machine import default_threads, usable_cpus

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="control groups are Linux's"
)


def _affinity() -> int:
    return len(os.sched_getaffinity(0))


def _proc(folder: Path, line: str) -> Path:
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(line + "\n")
    return proc


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_no_control_group_leaves_the_affinity(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path, tmp_path) == _affinity()


@pytest.mark.parametrize(("limit", "expected"), [("100000 100000", 1), ("1000 100000", 1)])
def test_version_2_quota(tmp_path: Path, limit: str, expected: int) -> None:
    _write(tmp_path / "a" / "b", cpu__max="max 100000")
    _write(tmp_path / "a", cpu__max=limit)
    assert usable_cpus(tmp_path, _proc(tmp_path, "0::/a/b")) == expected


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    _write(tmp_path / "a", cpu__max="max 100000")
    assert usable_cpus(tmp_path, _proc(tmp_path, "0::/a")) == _affinity()


def test_a_quota_above_the_affinity_adds_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "a", cpu__max=f"{100000 * (_affinity() + 5)} 100000")
    assert usable_cpus(tmp_path, _proc(tmp_path, "0::/a")) == _affinity()


def test_a_container_that_mounts_only_its_own_group(tmp_path: Path) -> None:
    _write(tmp_path, cpu__max="50000 100000")
    assert usable_cpus(tmp_path, _proc(tmp_path, "0::/host/path/not/here")) == 1


def test_version_1_quota(tmp_path: Path) -> None:
    _write(tmp_path / "cpu" / "x", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert usable_cpus(tmp_path, _proc(tmp_path, "4:cpu,cpuacct:/x")) == 1


def test_version_1_without_a_limit_and_other_controllers(tmp_path: Path) -> None:
    _write(tmp_path / "cpu" / "x", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    proc = _proc(tmp_path, "5:memory:/x\n4:cpu,cpuacct:/x")
    assert usable_cpus(tmp_path, proc) == _affinity()


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("2,1", 2), ("", None), ("many", None)])
def test_omp_num_threads_is_what_auto_takes(
    monkeypatch: pytest.MonkeyPatch, value: str, threads: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert default_threads() == (threads or usable_cpus())
