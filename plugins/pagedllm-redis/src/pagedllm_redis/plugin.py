"""Registers the response cache ``redis``.

Owner: pagedllm-redis. Invariant: nothing is imported that commands without a cache do not need.
"""

from __future__ import annotations

from pagedllm.hookspecs import hookimpl

PAGEDLLM_API_VERSION = 1


@hookimpl
def pagedllm_response_caches() -> dict[str, str]:
    """Offer ``redis``."""
    return {"redis": "pagedllm_redis.cache:RedisResponseCache"}
