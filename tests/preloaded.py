"""Processes that have torch and transformers loaded from the start, for tests that need many.

Loading them is most of what a short script does. A process of multiprocessing's fork server loads
them, and computes nothing; what it forks has its own arguments, environment, pipes and signals.
Tests of starting, ending, memory and Ctrl-C start an interpreter of their own instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from multiprocessing import reduction

MODULES = [
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "pagedllm.cli.main",
    "pagedllm.client",
    "pagedllm.executors.inline",
    "pagedllm.models.registry",
    "pagedllm_kernels.numba_cpu.decoder",
    "pagedllm_server.cli",
    "pagedllm_server.app",
    "pagedllm_server.service",
    "uvicorn",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(MODULES)


class Process:
    """``python ARGUMENTS`` with pipes, as :class:`subprocess.Popen` has it."""

    def __init__(self, arguments, *, env=None, cwd=None, text=""):
        self.args = list(map(str, arguments))
        env = dict(os.environ if env is None else env)
        (read, out), (read_errors, errors) = os.pipe(), os.pipe()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as given:
            given.write(text)
            given.seek(0)
            pipes = [_Descriptor(fd) for fd in (given.fileno(), out, errors)]
            passed = (self.args, env, str(cwd or os.getcwd()), pipes)  # noqa: PTH109
            self._process = _context.Process(target=_become, args=passed, daemon=True)
            self._process.start()
        os.close(out)
        os.close(errors)
        self.stdout, self.stderr = (_opened(fd, "r") for fd in (read, read_errors))
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self._process.kill()


def run(arguments, *, env=None, cwd=None, text="", timeout=280):
    """Run ``python ARGUMENTS`` to its end, as :func:`subprocess.run` does; ``text`` goes in."""
    process = Process(arguments, env=env, cwd=cwd, text=text)
    found = {}

    def read(name):
        with getattr(process, name) as pipe:
            found[name] = pipe.read()

    readers = [threading.Thread(target=read, args=(name,)) for name in ("stdout", "stderr")]
    for reader in readers:
        reader.start()
    try:
        process.wait(timeout)
    finally:
        process.kill()
        for reader in readers:
            reader.join()
    return subprocess.CompletedProcess(process.args, process.poll(), **found)


def _opened(fd, mode, **options):
    return open(fd, mode, encoding="utf-8", **options)  # noqa: PTH123


class _Descriptor:
    """A file descriptor on its way to another process."""

    def __init__(self, fd):
        self.fd = fd

    def __reduce__(self):
        return _received, (reduction.DupFd(self.fd),)


def _received(descriptor):
    return descriptor.detach()


def _become(arguments, env, folder, descriptors):
    """In the new process: be what the arguments say."""
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (_opened(fd, "rww"[fd], closefd=False) for fd in range(3))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    first, *rest = arguments
    try:
        if first == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)  # it was imported, and is to run
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(first))  # noqa: PTH120
            runpy.run_path(first, run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
