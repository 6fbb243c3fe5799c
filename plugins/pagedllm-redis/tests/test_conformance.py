"""The store passes pagedllm's own checks of response caches."""

import pytest

from pagedllm.testing import ResponseCacheSuite


class TestRedis(ResponseCacheSuite):
    cache = "redis"

    @pytest.fixture
    def options(self, server):
        return {"url": server.url, "timeout": 60.0}
