"""A real redis-server on a free port for each test that asks for one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time

import pytest
import redis

import pagedllm
from tiny_text import save_tiny_text

BINARY = shutil.which("redis-server")


class RedisServer:
    """One server without persistence; can be stopped, started again and frozen."""

    def __init__(self, folder, *options):
        self.folder, self.options = folder, options
        # Bound here and listened on by the server, so that nobody else is given it, not even
        # while the server is stopped.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("127.0.0.1", 0))
        self.port = self.held.getsockname()[1]
        self.process = None

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        """Start it; return when it answers."""
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self.folder), "--daemonize", "no", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with redis.Redis(port=self.port, socket_timeout=5) as client:
            while self.process.poll() is None:
                try:
                    client.ping()
                except redis.AuthenticationError:
                    return self
                except redis.RedisError:
                    time.sleep(0.02)
                else:
                    return self
        raise RuntimeError("redis-server does not start")

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def start_redis(tmp_path_factory):
    """Starts servers, given options of redis-server; all are stopped at the end."""
    if BINARY is None:
        pytest.skip("redis-server is not installed (Debian's package redis-server has it)")
    servers = []

    def start(*options):
        server = RedisServer(tmp_path_factory.mktemp("redis"), *options).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()
        server.held.close()


@pytest.fixture(scope="session")
def shared_server(start_redis):
    return start_redis()


@pytest.fixture
def server(shared_server):
    """A server that runs and is empty."""
    if shared_server.process is None:
        shared_server.start()
    with redis.Redis.from_url(shared_server.url) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
    return shared_server


@pytest.fixture
def client(server):
    """A client of it that waits as long as it takes."""
    with redis.Redis.from_url(server.url, socket_timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def tiny_with_text(tmp_path_factory):
    """A tiny Llama of random weights behind SmolLM2's real tokenizer."""
    path = tmp_path_factory.mktemp("tiny-text")
    return save_tiny_text(path, pagedllm.resolve_model("smollm2").path, layers=2, positions=512)
