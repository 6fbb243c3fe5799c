"""What the modes of ``serve.py`` share: a client, a server to start, and requests to send.

The client is a few lines of asyncio rather than a library: it shares the machine with the
server, and must cost little.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field

BANNER = re.compile(r"^pagedllm serves .* at (http://\S+) on ")
QUIET = ("--port", "0", "--no-access-log", "--log-level", "warning")


@dataclass
class Result:
    """What became of a request; times in seconds."""

    status: int = 0
    ttft: float | None = None
    e2e: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    """As the server counts them; while they come, the events, which may hold several."""
    error: str | None = None

    @property
    def good(self):
        """Whether it was answered whole."""
        return self.status == 200 and self.error is None and self.e2e is not None


class Client:
    """Streams completions from a server."""

    def __init__(self, url):
        self.url = url
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)

    async def complete(self, body, *, stop_after=None, pause=0.0):
        """Run one request; ``stop_after`` tokens hang up, ``pause`` seconds before each read."""
        result, begin = Result(), time.perf_counter()
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps({**body, **counted}).encode()
        writer = None
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, limit=2**20)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % (self.host.encode(), len(content))
                + content
            )
            await self._read(reader, result, begin, stop_after, pause)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        return result

    async def _read(self, reader, result, begin, stop_after, pause):
        result.status = int((await reader.readline()).split()[1])
        last, done = begin, False
        while line := await reader.readline():
            if result.status != 200 or not line.startswith(b"data: "):
                continue
            if pause:
                await asyncio.sleep(pause)
            if line.startswith(b"data: [DONE]"):
                done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                result.error = event["error"]["message"]
                continue
            if event.get("usage"):
                result.tokens = event["usage"]["completion_tokens"]
                continue
            now = time.perf_counter()
            if result.ttft is None:
                result.ttft = now - begin
            else:
                result.gaps.append(now - last)
            last = now
            result.tokens += 1
            if stop_after is not None and result.tokens >= stop_after:
                return
        if done:
            result.e2e = last - begin
        elif result.status == 200:
            result.error = "the stream ended early"


@contextlib.contextmanager
def server(model, *flags):
    """A server in a process of its own; yields its URL and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedllm.cli.main", "serve", model, *QUIET, *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if found := BANNER.match(line):
                yield found[1], process
                return
        raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        if process.wait(120) != 0:
            raise SystemExit(f"the server ended with status {process.returncode}")


def get(url, path):
    with urllib.request.urlopen(f"{url}{path}", timeout=30) as answer:
        return json.loads(answer.read())


def request(options, draw, **more):
    """Random token ids, so that no two requests share a prefix."""
    prompt = [draw.randrange(1000, 20000) for _ in range(options.input_len)]
    body = {"prompt": prompt, "max_tokens": options.output_len, "temperature": 0}
    return {**body, "ignore_eos": True, **more}


def arrivals(options, draw, rate, number):
    """Seconds of each request's arrival."""
    moments, now = [], 0.0
    while len(moments) < number:
        if options.arrivals == "poisson":
            now += draw.expovariate(rate)
            moments.append(now)
        else:  # bursts of eight at once, as often as the rate asks for
            now += draw.expovariate(rate / 8)
            moments += [now] * 8
    return moments[:number]


async def offer(client, options, rate, number, seed, **more):
    """Send requests at their times, however the server fares: an open loop."""
    draw = random.Random(seed)
    begin = time.perf_counter()

    async def one(at):
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - begin)))
        return await client.complete(request(options, draw, **more))

    results = await asyncio.gather(*(one(at) for at in arrivals(options, draw, rate, number)))
    return results, time.perf_counter() - begin


async def saturate(client, options, number, concurrency=32):
    """Requests per second that the server sustains, and their results: a closed loop."""
    draw = random.Random(f"{options.seed} saturate")
    left, results = iter(range(number)), []

    async def worker():
        for _ in left:
            result = await client.complete(request(options, draw))
            if not result.good:
                raise SystemExit(f"a request failed: {result.status} {result.error}")
            results.append(result)

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(min(concurrency, number))))
    return number / (time.perf_counter() - begin), results


def percentiles(values):
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        f"p{p}": round(1000 * ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))], 2)
        for p in (50, 90, 99)
    }
