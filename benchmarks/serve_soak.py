"""``serve.py soak``: hours of everything at once, after which nothing may be left behind.

Resident memory alone does not tell a leak: it also has what allocators keep though it is free,
which depends on how full the fullest step was. So what is allocated is read from the server's
own metrics, at rest, after each of some rounds, and set in relation to the requests between:
a leak grows with every request, and everything else stops.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import urllib.request
from typing import Any

from serve_client import Client, Result, get, request, saturate, server

ROUNDS = 8
EXACT = {"allocated": 2048.0, "blocks": 16.0}
"""Growth per request that is none: bytes of allocators, and blocks of Python's objects. A hundred
requests make garbage, and caches of a few hundred entries fill; a leaked request is kilobytes."""
CACHE = ("--num-pages", "1024", "--preallocate-kv-cache")
"""A cache that is full, books and all, before the measurement begins."""
BAD = [{"prompt": ""}, {"prompt": [-1]}, {"max_tokens": 1}, {"prompt": "A", "n": 0}]
BAD += [{"prompt": "A", "unknown": 1}, {"prompt": "\ud800"}]


def resources(process):
    """Resident memory (MiB), descriptors and threads of a process and its children."""
    import psutil

    whole = psutil.Process(process.pid)
    everyone = [whole, *whole.children(recursive=True)]
    return {
        "rss_mib": round(sum(p.memory_info().rss for p in everyone) / 2**20, 1),
        "fds": sum(p.num_fds() for p in everyone),
        "threads": sum(p.num_threads() for p in everyone),
    }


def held(url):
    """What the server's process has allocated: bytes, and blocks of Python's objects."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = {"allocated": "pagedllm_allocated_bytes", "blocks": "pagedllm_python_blocks"}
    return {key: float(samples[name]) for key, name in names.items() if name in samples}


def settle(url, process):
    """Wait until nothing runs, and say what the server holds then."""
    end = time.monotonic() + 60
    while True:
        stats = get(url, "/stats")
        idle = not (stats["running"] or stats["waiting"] or stats["pages"]["used"])
        if idle or time.monotonic() > end:
            break
        time.sleep(0.2)
    time.sleep(1.0)  # connections close
    return {
        **resources(process),
        **held(url),
        "pages_used": stats["pages"]["used"],
        "running": stats["running"],
        "waiting": stats["waiting"],
    }


async def stress(client, options, rate, seconds, draw):
    """Good requests among bad ones; returns the good ones' results and how many were odd."""
    begin = time.perf_counter()
    tasks: set[asyncio.Task[Any]] = set()
    good: list[Result] = []
    odd = {"aborted": 0, "bad": 0, "slow": 0}

    async def one(kind):
        if kind == "bad":
            result = await client.complete(draw.choice(BAD))
            # 429: the queue was full, which is found out before what is wrong with a request.
            if result.status not in (422, 429):
                raise SystemExit(f"a bad request was answered with {result.status}")
            return
        body = request(options, draw)
        body["max_tokens"] = draw.randrange(1, 2 * options.output_len)
        if kind == "aborted":
            await client.complete(body, stop_after=draw.randrange(1, 10))
            return
        good.append(await client.complete(body, pause=0.05 if kind == "slow" else 0.0))

    now = 0.0
    while now < seconds:
        now += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, now - (time.perf_counter() - begin)))
        kind = draw.choices(["good", "aborted", "bad", "slow"], [70, 12, 12, 6])[0]
        if kind in odd:
            odd[kind] += 1
        task = asyncio.create_task(one(kind))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return good, odd


def growth(points):
    """Growth per request: the lower quartile of the slopes between all pairs of points.

    A leak shows between any two of them; a buffer that grew once, between fewer than half.

    Args:
        points: (requests so far, amount held), in order.
    """
    slopes = sorted(
        (after - before) / (late - early)
        for (early, before), (late, after) in itertools.combinations(points, 2)
        if late > early
    )
    return slopes[len(slopes) // 4] if slopes else 0.0


def run_soak(options):
    """Fail on a lost request or a leak."""
    import psutil  # noqa: F401 - say at once that it is missing

    flags = [*(() if any("pages" in flag for flag in options.flags) else CACHE), *options.flags]
    draw = random.Random(options.seed)
    with server(options.model, *flags) as (url, process):
        client = Client(url)
        # Full steps first: what is as large as the largest step is that large from now on.
        asyncio.run(saturate(client, options, 256, concurrency=128))
        sustainable, _ = asyncio.run(saturate(client, options, 64))
        rate = options.rate or 0.8 * sustainable
        asyncio.run(stress(client, options, rate, max(10.0, options.seconds / 4), draw))
        samples = [{"requests": 0, **settle(url, process)}]
        good: list[Result] = []
        odd = {"aborted": 0, "bad": 0, "slow": 0}
        for _ in range(ROUNDS):
            some, others = asyncio.run(
                stress(client, options, rate, options.seconds / ROUNDS, draw)
            )
            good += some
            odd = {name: count + others[name] for name, count in odd.items()}
            # Those that are slow to read are good ones, too.
            requests = len(good) + odd["aborted"] + odd["bad"]
            samples.append({"requests": requests, **settle(url, process)})
    found = {
        "bench": "soak",
        "seconds": options.seconds,
        "rate": round(rate, 3),
        "good": len(good),
        **odd,
        "before": samples[0],
        "after": samples[-1],
        "rss_mib": [sample["rss_mib"] for sample in samples],
        "memory_growth": round(samples[-1]["rss_mib"] / samples[0]["rss_mib"] - 1, 4),
        "growth_per_request": {
            name: round(growth([(s["requests"], s[name]) for s in samples]), 1)
            for name in EXACT
            if name in samples[0]
        },
    }
    found["problems"] = _problems(options, found, good)
    print(json.dumps(found))
    return 1 if found["problems"] else 0


def _problems(options, found, good):
    problems = []
    before, after = found["before"], found["after"]
    lost = [f"{r.status} {r.error}" for r in good if not r.good]
    if lost:
        problems.append(f"{len(lost)} good requests failed, such as: {lost[0]}")
    for name, amount in found["growth_per_request"].items():
        if amount > EXACT[name]:
            problems.append(f"{name}: {amount} more with every request")
    if found["memory_growth"] > options.memory_growth:
        problems.append(f"memory grew by {100 * found['memory_growth']:.1f} %")
    for name in ("fds", "threads"):
        if after[name] > before[name] + 2:
            problems.append(f"{name} grew from {before[name]} to {after[name]}")
    if after["pages_used"] or after["running"] or after["waiting"]:
        problems.append(f"pages or requests are left: {after}")
    return problems
