"""The store itself, against a real Redis: what is kept, for how long, and how much of it."""

from __future__ import annotations

import pytest
import redis

from pagedllm import Config, ConfigError
from pagedllm_redis.cache import RedisResponseCache

KEYS = "{pagedllm}:1:*"


@pytest.fixture
def make(server):
    made = []

    def make(**options):
        made.append(RedisResponseCache(Config(), **{"url": server.url, "timeout": 60, **options}))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def test_what_is_put_is_got_by_anyone_with_the_same_prefix(make):
    ours, theirs, others = make(), make(), make(prefix="other")
    answer = bytes(range(256))
    ours.put("a:1", answer)
    ours.put("a:2", b"")
    assert theirs.get(["a:2", "b:1", "a:1"]) == [b"", None, answer]
    assert others.get(["a:1"]) == [None]
    theirs.put("a:1", b"newer")
    assert ours.get(["a:1"]) == [b"newer"]


def test_an_answer_expires(make, client):
    cache = make(ttl=3600)
    cache.put("a:1", b"x")
    assert 3_000_000 < client.pttl("{pagedllm}:1:a:1") <= 3_600_000


def test_an_answer_that_is_too_large_is_not_stored(make, client):
    cache = make(max_entry_bytes=100)
    cache.put("a:1", bytes(101))
    cache.put("a:2", bytes(100))
    assert cache.get(["a:1", "a:2"]) == [None, bytes(100)]
    assert client.hget("{pagedllm}:1:sizes", "sum") == b"100"


def test_all_answers_together_stay_within_the_bound(make, client):
    cache = make(max_bytes=1000)
    for number in range(30):
        cache.put(f"a:{number}", bytes(90 + number))
        stored = [cache.get([f"a:{i}"])[0] for i in range(30)]
        total = sum(len(each) for each in stored if each is not None)
        assert total <= 1000
        assert int(client.hget("{pagedllm}:1:sizes", "sum")) == total
        assert stored[number] is not None
    assert stored[:20] == [None] * 20  # the oldest went
    assert stored[23:] == [bytes(90 + number) for number in range(23, 30)]
    assert client.zcard("{pagedllm}:1:index") == sum(each is not None for each in stored)


def test_an_answer_that_is_replaced_counts_once(make, client):
    cache = make(max_bytes=1000)
    for size in (400, 500, 300):
        cache.put("a:1", bytes(size))
    cache.put("a:2", bytes(700))
    assert cache.get(["a:1", "a:2"]) == [bytes(300), bytes(700)]
    assert client.hget("{pagedllm}:1:sizes", "sum") == b"1000"


def test_what_has_expired_no_longer_counts(make, client):
    cache = make(max_bytes=1000)
    cache.put("a:1", bytes(900))
    # As after its time: the entry is gone, and the index says since when.
    client.delete("{pagedllm}:1:a:1")
    client.zadd("{pagedllm}:1:index", {"{pagedllm}:1:a:1": 1})
    cache.put("a:2", bytes(600))
    assert client.hgetall("{pagedllm}:1:sizes") == {b"{pagedllm}:1:a:2": b"600", b"sum": b"600"}
    assert client.zrange("{pagedllm}:1:index", 0, -1) == [b"{pagedllm}:1:a:2"]


def test_the_bound_starts_anew_when_redis_evicts_its_books(make, client):
    cache = make(max_bytes=1000)
    cache.put("a:1", bytes(900))
    client.delete("{pagedllm}:1:index")
    for number in range(2, 6):
        cache.put(f"a:{number}", bytes(240))
    assert cache.get(["a:5", "a:2"]) == [bytes(240), bytes(240)]
    assert client.hget("{pagedllm}:1:sizes", "sum") == b"960"
    client.delete("{pagedllm}:1:sizes")
    cache.put("a:6", bytes(1000))
    assert cache.get(["a:6"]) == [bytes(1000)]
    assert client.hget("{pagedllm}:1:sizes", "sum") == b"1000"


def test_nothing_outside_the_namespace_is_touched(make, client):
    client.set("precious", "yes")
    cache = make(max_bytes=100)
    for number in range(5):
        cache.put(f"a:{number}", bytes(60))
    assert client.get("precious") == b"yes"
    assert {key for key in client.scan_iter() if key != b"precious"} == set(client.scan_iter(KEYS))


def test_a_full_database_keeps_what_it_has(make, client):
    cache = make()
    cache.put("a:1", b"x")
    client.config_set("maxmemory", 1)
    cache.put("a:2", b"y")
    assert cache.get(["a:1", "a:2"]) == [b"x", None]


def test_a_server_that_came_back_is_used_again(make, server):
    cache = make()
    cache.put("a:1", b"x")
    server.stop()
    with pytest.raises(redis.ConnectionError):
        cache.get(["a:1"])
    server.start()
    assert cache.get(["a:1"]) == [None]
    cache.put("a:1", b"y")
    assert cache.get(["a:1"]) == [b"y"]


def test_the_environment_names_the_database(server, client, monkeypatch):
    monkeypatch.setenv("PAGEDLLM_REDIS_URL", server.url)
    cache = RedisResponseCache(Config(), timeout=60)
    cache.put("a:1", b"x")
    assert client.get("{pagedllm}:1:a:1") == b"x"
    cache.close()


def test_a_unix_socket_will_do(start_redis, tmp_path):
    start_redis("--unixsocket", str(tmp_path / "redis.sock"))
    cache = RedisResponseCache(Config(), url=f"unix://{tmp_path}/redis.sock", timeout=60)
    cache.put("a:1", b"x")
    assert cache.get(["a:1"]) == [b"x"]
    cache.close()


def test_making_one_connects_to_nothing():
    cache = RedisResponseCache(Config(), url="redis://127.0.0.1:1/0")
    with pytest.raises(redis.ConnectionError):
        cache.get(["a:1"])
    cache.close()
    cache.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://127.0.0.1"}, "url is not one of Redis's"),
        ({"url": 5}, "url must be text"),
        ({"ttl": 0}, "ttl must be"),
        ({"ttl": "1h"}, "ttl must be"),
        ({"timeout": True}, "timeout must be"),
        ({"max_bytes": -1}, "max_bytes must be"),
        ({"max_entry_bytes": None}, "max_entry_bytes must be"),
        ({"prefix": "a{b}"}, "prefix must be"),
        ({"prefix": ""}, "prefix must be"),
    ],
)
def test_wrong_options_are_one_clear_error(options, message):
    with pytest.raises(ConfigError, match=message):
        RedisResponseCache(Config(), **options)
