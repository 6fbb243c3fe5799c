"""examples/redis_cache.py shows what it says, with a Redis and without."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "redis_cache.py"


def test_the_example_answers_from_redis(server, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    main({"name": "redis", "url": server.url, "timeout": 60})
    first, second, third, answer, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("from the model")
    assert second.endswith("from Redis")
    assert third.endswith("from Redis")
    main({"name": "redis", "url": server.url, "timeout": 60})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("from Redis")
    assert lines[3] == answer
    main({"name": "redis", "url": "redis://127.0.0.1:1/0"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("from the model") for line in lines[:3]] == [True] * 3
    assert lines[3] == answer
