"""Servers for the tests of this folder: one process a module."""

from __future__ import annotations

import httpx
import pytest

from server_process import serving


@pytest.fixture(scope="module")
def server(tiny_with_text):
    with serving(tiny_with_text) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
