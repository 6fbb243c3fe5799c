"""Servers for the tests of this folder.

Starting one takes seconds, so those that nothing is left in are shared by all files: one with
its engine in a thread, one with its engine in a process.
"""

from __future__ import annotations

import shutil
import socket
from contextlib import contextmanager

import httpx
import pytest

from plugin_site import written
from server_process import ServerProcess, serving, wait_until

HOUSE = """
    import logging
    import time
    from pagedllm import hookimpl

    @hookimpl
    def pagedllm_logits_processors():
        return {"only": "house:only", "secret": "house:only"}

    @hookimpl
    def pagedllm_server_routes():
        return {"house": "house:add"}

    def only(token_ids, seconds=0, say=None):
        def process(generated, logits):
            time.sleep(seconds)
            if say is not None:
                logging.getLogger("house").warning("asked to say %s", say)
            kept = logits[list(token_ids)].clone()
            logits[:] = float("-inf")
            logits[list(token_ids)] = kept
            return logits
        return process

    def add(app, service):
        @app.get("/house")
        async def house() -> dict[str, str]:
            return {"device": service.llm.model_info.device}
"""
"""A plugin that the servers have."""


@pytest.fixture(scope="session")
def house(tmp_path_factory):
    """What a server's environment needs to have that plugin."""
    return written(tmp_path_factory.mktemp("house"), house=HOUSE)


@pytest.fixture(scope="session")
def shared_server(tiny_with_text, house):
    with serving(tiny_with_text, "--logits-processors", "only", env=house) as running:
        yield running


SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="session")
def process_server(tiny_and_long, house, tmp_path_factory):
    """One with its engine in another process; what its start looked like is in ``seen``.

    Its model is one of the Hub's, as the Hub's own library keeps them on a disk.
    """
    cache = tmp_path_factory.mktemp("cache")
    model = cache / "models--org--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(SHA)
    shutil.copytree(tiny_and_long, model / "snapshots" / SHA)
    with reserved_port() as port:
        running = ServerProcess(
            "org/tiny", "--download-dir", cache, "--port", port, "--threads", "1",
            "--engine", "process", "--num-pages", "400", "--served-model-name", "tiny",
            "--logits-processors", "only", "--client-timeout", "1.5", "--json-logs",
            wait=False, env=house,
        )  # fmt: skip
        running.sha = SHA
        running.seen = []

        def health():
            try:
                running.seen.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=120))
            except httpx.TransportError:
                return False
            return running.seen[-1].status_code == 200

        try:
            wait_until(health, 240)
            assert running.ready.wait(120)
            yield running
        finally:
            status = running.stop()
    assert status == 0, running.output


@contextmanager
def reserved_port():
    """A port that nobody else is given meanwhile: bound here, and listened on by the server."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="module")
def server(shared_server):
    """The one that a file's tests ask; some files have their own."""
    return shared_server


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
