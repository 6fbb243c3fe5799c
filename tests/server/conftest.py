"""Servers for the tests of this folder: one process a module."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest

from server_process import serving


@pytest.fixture(scope="session")
def tiny_and_long(tiny_with_text, tmp_path_factory):
    """The same model for answers of thousands of tokens: what is asked while one runs is.

    However the machine is loaded, such an answer takes seconds.
    """
    path = shutil.copytree(tiny_with_text, tmp_path_factory.mktemp("long") / "tiny")
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def server(tiny_with_text):
    with serving(tiny_with_text) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
