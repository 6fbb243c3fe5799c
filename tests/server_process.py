"""A real ``pagedllm serve`` in a process of its own, and what tests ask of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import psutil

from preloaded import Process

BANNER = re.compile(r"^pagedllm serves .* at (https?://\S+) on .*tokens$")


class ServerProcess:
    """A server that is up; ``url`` is where."""

    def __init__(self, *arguments, env=None, wait=True, preloaded=False):
        self.lines, self.errors = [], []
        command = ["-m", "pagedllm.cli.main", "serve", *map(str, arguments)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
        if preloaded:
            self.process = Process(command, env=env)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
        self.ready = threading.Event()
        self.url = None
        self.threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors)),
        ]
        for thread in self.threads:
            thread.start()
        if wait:
            assert self.ready.wait(240), self.output
            assert self.url is not None, self.output

    def _read(self, stream, lines):
        for line in stream:
            lines.append(line)
            if found := BANNER.match(line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    @property
    def output(self):
        return "".join(self.lines) + "".join(self.errors)

    def stop(self, how=signal.SIGTERM, timeout=120):
        """Send a signal, or none when it was sent, and return the exit status."""
        if how is not None and self.process.poll() is None:
            self.process.send_signal(how)
        try:
            status = self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for thread in self.threads:
                thread.join(10)
        return status

    def logged(self, **wanted):
        """Of a log in JSON, the lines with these entries."""
        found = [json.loads(line) for line in list(self.errors) if line.endswith("}\n")]
        return [line for line in found if wanted.items() <= line.items()]

    def connect(self, path, body, length=None, headers="", buffer=None):
        """Send a request by hand, or the part of it that is given; return the connection."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(120)
        connection.connect((host, int(port)))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {length or len(content)}\r\n\r\n".encode()
            + content
        )
        return connection

    def stats(self):
        return httpx.get(f"{self.url}/stats", timeout=60).json()

    def is_idle(self):
        stats = self.stats()
        return not stats["running"] and not stats["waiting"] and not stats["pages"]["used"]


@contextmanager
def serving(model, *arguments, **options):
    """A server for as long as the block runs; it must end with status 0."""
    flags = ("--port", "0", "--threads", "1", *arguments)
    server = ServerProcess(model, *flags, preloaded=True, **options)
    try:
        yield server
        assert server.process.poll() is None, server.output
    finally:
        status = server.stop()
    assert status == 0, server.output


def wait_until(condition, seconds=120.0):
    """Poll until something holds; fail when it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def kill_engine(server):
    """End a server's engine process, as running out of memory does."""
    [engine] = psutil.Process(server.process.pid).children()
    engine.kill()


def events(response):
    """The events of a streamed response, parsed; ``[DONE]`` as it is."""
    found = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
    return found
