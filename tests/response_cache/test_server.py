"""A server whose answers come from a response cache, whole and streamed, and its metrics."""

from __future__ import annotations

import json

import httpx
import pytest

from plugin_site import installed
from server_process import serving

PLUGIN = """
    from pagedllm import hookimpl

    class Shelf(dict):
        timeout = 60.0
        def __init__(self, config):
            super().__init__()
        def get(self, keys):
            return [dict.get(self, key) for key in keys]
        def put(self, key, answer):
            self[key] = answer
        def close(self):
            pass

    @hookimpl
    def pagedllm_response_caches():
        return {"shelf": "servershelf:Shelf"}
"""
BODY = {"model": "any", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def http(tiny_with_text, tmp_path_factory):
    with (
        installed(tmp_path_factory.mktemp("site"), servershelf=PLUGIN),
        serving(tiny_with_text, "--response-cache", "shelf") as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def test_equal_requests_get_the_stored_answer_whole_or_streamed(http):
    first = http.post("/v1/completions", json=BODY).raise_for_status().json()
    second = http.post("/v1/completions", json=BODY).raise_for_status().json()
    assert second["choices"] == first["choices"]
    assert second["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
    streamed = http.post("/v1/completions", json={**BODY, "stream": True}).raise_for_status()
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == first["choices"][0]["text"]
    assert len(events) > 1
    metrics = http.get("/metrics").text
    assert "pagedllm_response_cache_lookups_total 3.0" in metrics
    assert "pagedllm_response_cache_hits_total 2.0" in metrics
    assert "pagedllm_response_cache_down 0.0" in metrics
    tokens = first["usage"]["completion_tokens"]
    assert f"pagedllm_generated_tokens_total {float(tokens)}" in metrics
