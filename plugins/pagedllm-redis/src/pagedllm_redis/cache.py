"""A response cache in Redis: answers with an expiry, bounded one by one and together.

Owner: pagedllm-redis. Invariants: every key is in the namespace ``{prefix}:1:``; what is
stored and what is counted change in one script, so they agree whichever engines write; the
clock is the server's. Errors of the client are raised: the engine decides what they mean.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pagedllm import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm import Config

LAYOUT = 1
"""Raised when keys or values change their meaning."""
URL_VARIABLE = "PAGEDLLM_REDIS_URL"
DEFAULT_URL = "redis://127.0.0.1:6379/0"

_PUT = """
local entry, index, sizes = KEYS[1], KEYS[2], KEYS[3]
local answer, ttl, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- First, since a database that is full refuses it before anything has changed.
redis.call('SET', entry, answer, 'PX', ttl)

local function uncount(key)
  local size = redis.call('HGET', sizes, key)
  if size then
    redis.call('HINCRBY', sizes, 'sum', -size)
    redis.call('HDEL', sizes, key)
  end
  redis.call('ZREM', index, key)
end

local function forget(key)
  uncount(key)
  redis.call('DEL', key)
end

if redis.call('EXISTS', index) == 0 then
  redis.call('DEL', sizes)
end
uncount(entry)
for _, key in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, 100)) do
  forget(key)
end
while (tonumber(redis.call('HGET', sizes, 'sum')) or 0) + #answer > most do
  local first = redis.call('ZRANGE', index, 0, 0)[1]
  if not first then
    redis.call('DEL', sizes)
    break
  end
  forget(first)
end
redis.call('ZADD', index, now + ttl, entry)
redis.call('HSET', sizes, entry, #answer)
redis.call('HINCRBY', sizes, 'sum', #answer)
"""
"""Stores an answer and forgets those that have expired, or that it leaves no room for."""


class RedisResponseCache:
    """Answers by key in one Redis database; satisfies ``pagedllm.hookspecs.ResponseCache``.

    Args:
        config: not needed.
        url: of the database; None: the environment's ``PAGEDLLM_REDIS_URL``, or the local one.
        ttl: seconds that an answer is kept.
        max_entry_bytes: larger answers are not stored.
        max_bytes: of all answers of this prefix together.
        prefix: namespace of the keys.
        timeout: seconds to connect, and to wait for a reply.

    Raises:
        ConfigError: an option has a wrong value.
    """

    def __init__(
        self,
        config: Config,
        *,
        url: str | None = None,
        ttl: float = 86_400,
        max_entry_bytes: int = 1_000_000,
        max_bytes: int = 1_000_000_000,
        prefix: str = "pagedllm",
        timeout: float = 0.05,
    ) -> None:
        numbers = {"ttl": ttl, "timeout": timeout}
        numbers |= {"max_entry_bytes": max_entry_bytes, "max_bytes": max_bytes}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0.001:
                raise ConfigError(f"{name} must be a number of at least 0.001, not {value!r}")
        if not isinstance(prefix, str) or not prefix or set(prefix) & set("{} *?[]\\\n"):
            raise ConfigError(f"prefix must be a word without braces or wildcards, not {prefix!r}")
        if url is not None and not isinstance(url, str):
            raise ConfigError(f"url must be text such as '{DEFAULT_URL}', not {url!r}")
        self.timeout = timeout
        self._ttl = max(1, round(1000 * ttl))
        self._max_entry_bytes = min(max_entry_bytes, max_bytes)
        self._max_bytes = max_bytes
        self._namespace = f"{{{prefix}}}:{LAYOUT}:"
        # A connection that the server has closed meanwhile is made again; nothing else is.
        again = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        options: dict[str, Any] = {"socket_timeout": timeout, "retry": again}
        url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        if not url.startswith("unix:"):
            options["socket_connect_timeout"] = timeout
        try:
            self._client = redis.Redis.from_url(url, **options)
        except ValueError as error:
            raise ConfigError(
                f"url is not one of Redis's ({error}); give redis://HOST:PORT/DATABASE"
            ) from None
        self._put = self._client.register_script(_PUT)

    def get(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the answer of each key, in one round trip."""
        found = self._client.mget([self._namespace + key for key in keys])
        return cast("Sequence[bytes | None]", found)

    def put(self, key: str, answer: bytes) -> None:
        """Store an answer, unless it is too large, and make room for it."""
        if len(answer) > self._max_entry_bytes:
            return
        keys = [self._namespace + name for name in (key, "index", "sizes")]
        # A database that is full and does not evict still has what it has.
        with contextlib.suppress(redis.OutOfMemoryError):
            self._put(keys=keys, args=[answer, self._ttl, int(self._max_bytes)])

    def close(self) -> None:
        """Give up the connections."""
        self._client.close()
