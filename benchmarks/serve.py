"""Load on a server, from a process of its own: latencies, goodput, and what leaks.

    python benchmarks/serve.py load --url http://127.0.0.1:8000 --rate 4 --requests 200
    python benchmarks/serve.py load --url ... --arrivals bursty --plot latencies.png
    python benchmarks/serve.py compare --model smollm2
    python benchmarks/serve.py soak --model smollm2 --seconds 1800
    python benchmarks/serve.py overhead --model smollm2

Each prints a line of JSON (``compare`` one per policy). ``load`` measures a server that runs;
the others start their own. ``compare`` offers 1.5 times what the server sustains, under ``fcfs``
and under ``deadline``, and reports goodput: answers whose first token and end came within the
targets. ``soak`` offers 0.8 times that, with aborts, bad requests and slow readers among the
good ones, fails on any that is lost, and watches memory, descriptors, threads and pages.
``overhead`` runs the same requests through ``LLM.generate`` and through 64 streaming clients.

The client is a few lines of asyncio rather than a library: it shares the machine with the
server, and must cost little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

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
        content = json.dumps({**body, "stream": True}).encode()
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
    """Requests per second that the server sustains: a closed loop."""
    draw = random.Random(f"{options.seed} saturate")
    left = iter(range(number))

    async def worker():
        for _ in left:
            result = await client.complete(request(options, draw))
            if not result.good:
                raise SystemExit(f"a request failed: {result.status} {result.error}")

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(min(concurrency, number))))
    return number / (time.perf_counter() - begin)


def percentiles(values):
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        f"p{p}": round(1000 * ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))], 2)
        for p in (50, 90, 99)
    }


def report(options, results, wall, **more):
    good = [r for r in results if r.good]
    within = [
        r
        for r in good
        if (options.ttft_target is None or r.ttft <= options.ttft_target)
        and (options.e2e_target is None or r.e2e <= options.e2e_target)
    ]
    return {
        "bench": options.mode,
        **more,
        "requests": len(results),
        "completed": len(good),
        "refused": sum(r.status == 429 for r in results),
        "failed": sum(not r.good and r.status != 429 for r in results),
        "wall_s": round(wall, 2),
        "output_tok_s": round(sum(r.tokens for r in results) / wall, 1),
        "ttft_ms": percentiles([r.ttft for r in good]),
        "itl_ms": percentiles([gap for r in good for gap in r.gaps]),
        "e2e_ms": percentiles([r.e2e for r in good]),
        "goodput": round(len(within) / len(results), 4),
        "goodput_req_s": round(len(within) / wall, 3),
        "targets_s": {"ttft": options.ttft_target, "e2e": options.e2e_target},
        "input_len": options.input_len,
        "output_len": options.output_len,
    }


def plot(path, results):
    """Distributions of the three latencies, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [r for r in results if r.good]
    parts = {
        "time to first token": [r.ttft for r in good],
        "between tokens": [gap for r in good for gap in r.gaps],
        "end to end": [r.e2e for r in good],
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (title, values) in zip(axes, parts.items(), strict=True):
        ordered = sorted(1000 * value for value in values)
        axis.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))])
        axis.set(title=title, xlabel="ms", ylabel="% of requests or gaps", ylim=(0, 100))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def run_load(options):
    client = Client(options.url)
    sent = {}
    if options.send_targets:
        sent = {"ttft_target": options.ttft_target, "e2e_target": options.e2e_target}
    results, wall = asyncio.run(
        offer(client, options, options.rate, options.requests, options.seed, **sent)
    )
    found = report(options, results, wall, rate=options.rate, arrivals=options.arrivals)
    print(json.dumps(found))
    if options.plot:
        plot(options.plot, results)
    return 1 if found["failed"] else 0


def run_compare(options):
    """Goodput of both policies at 1.5 times the sustainable load, with the same arrivals."""
    rate, found = options.rate, {}
    for policy in ("fcfs", "deadline"):
        flags = ["--scheduling-policy", policy, "--max-concurrent-requests", "100000"]
        with server(options.model, *flags, *options.flags) as (url, _):
            client = Client(url)
            asyncio.run(saturate(client, options, 16))  # warm
            if rate is None:
                rate = 1.5 * asyncio.run(saturate(client, options, options.requests // 2))
            sent = {}
            if policy == "deadline":
                sent = {"ttft_target": options.ttft_target, "e2e_target": options.e2e_target}
            sent = {k: v for k, v in sent.items() if v is not None}
            results, wall = asyncio.run(
                offer(client, options, rate, options.requests, options.seed, **sent)
            )
            found[policy] = report(options, results, wall, policy=policy, rate=round(rate, 3))
            stats = get(url, "/stats")
            found[policy] |= {k: stats[k] for k in ("preemptions", "steps", "computed_tokens")}
            print(json.dumps(found[policy]), flush=True)
    return 0


def run_overhead(options):
    """Throughput of 64 streaming clients, against ``LLM.generate`` on the same requests."""
    draw = random.Random(options.seed)
    bodies = [request(options, draw) for _ in range(options.requests)]
    offline = subprocess.run(
        [sys.executable, __file__, "offline", "--model", options.model, *options.flags],
        input=json.dumps(bodies),
        capture_output=True,
        text=True,
        check=True,
    )
    reference = json.loads(offline.stdout.splitlines()[-1])
    with server(options.model, *options.flags) as (url, _):
        client = Client(url)

        async def all_of_them(some, width):
            left = iter(some)

            async def worker():
                return [await client.complete(body) for body in left]

            begin = time.perf_counter()
            groups = await asyncio.gather(*(worker() for _ in range(width)))
            return [r for group in groups for r in group], time.perf_counter() - begin

        backwards = [{**body, "prompt": body["prompt"][::-1]} for body in bodies]
        asyncio.run(all_of_them(backwards[:64], 64))  # warm, with other tokens
        alone = [asyncio.run(client.complete(body)).ttft for body in backwards[64:80]]
        results, wall = asyncio.run(all_of_them(bodies, 64))
    found = report(options, results, wall)
    found["offline_output_tok_s"] = reference["tok_s"]
    found["share_of_offline"] = round(found["output_tok_s"] / reference["tok_s"], 4)
    found["ttft_alone_ms"] = percentiles(alone)
    found["offline_ttft_alone_ms"] = reference["ttft_ms"]
    print(json.dumps(found))
    return 1 if found["failed"] else 0


def run_offline(options):
    from pagedllm import LLM, SamplingParams
    from pagedllm.config import Config

    bodies = json.load(sys.stdin)
    parser = argparse.ArgumentParser()
    Config.add_cli_arguments(parser)
    config = Config.from_cli(parser.parse_args(["--model", options.model, *options.flags]))
    with LLM(config) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=bodies[0]["max_tokens"])
        backwards = [body["prompt"][::-1] for body in bodies]
        llm.generate(backwards[:64], params, use_tqdm=False)
        alone = []
        for prompt in backwards[64:80]:
            begin = time.perf_counter()
            with llm.stream(prompt, params) as stream:
                next(stream)
                alone.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
        wall = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"tok_s": round(tokens / wall, 1), "ttft_ms": percentiles(alone)}))
    return 0


# -- soak ----------------------------------------------------------------------------------


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


async def stress(client, options, rate, seconds, seed, process):
    """Good requests among bad ones; returns the good ones' results and samples of the server."""
    draw = random.Random(seed)
    begin = time.perf_counter()
    tasks: set[asyncio.Task[Any]] = set()
    good: list[Result] = []
    odd = {"aborted": 0, "bad": 0, "slow": 0}
    samples = []
    bad = [{"prompt": ""}, {"prompt": [-1]}, {"max_tokens": 1}, {"prompt": "A", "n": 0}]
    bad += [{"prompt": "A", "unknown": 1}, {"prompt": "\ud800"}]

    async def one(kind):
        if kind == "bad":
            result = await client.complete(draw.choice(bad))
            # 429: the queue was full, which is found out before what is wrong with a request.
            if result.status not in (422, 429):
                raise SystemExit(f"a bad request was answered with {result.status}")
            return
        body = request(options, draw)
        body["max_tokens"] = draw.randrange(1, 2 * options.output_len)
        if kind == "aborted":
            await client.complete(body, stop_after=draw.randrange(1, 10))
            return
        result = await client.complete(body, pause=0.05 if kind == "slow" else 0.0)
        good.append(result)

    async def sample():
        while True:
            samples.append({"at": round(time.perf_counter() - begin, 1), **resources(process)})
            await asyncio.sleep(max(0.5, seconds / 120))

    watcher = asyncio.create_task(sample())
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
    watcher.cancel()
    return good, odd, samples


def run_soak(options):
    """Fail on a lost request or a leak."""
    import psutil  # noqa: F401 - say at once that it is missing

    with server(options.model, *options.flags) as (url, process):
        client = Client(url)
        asyncio.run(saturate(client, options, 32))
        sustainable = asyncio.run(saturate(client, options, 64))
        rate = options.rate or 0.8 * sustainable
        warm_up = max(10.0, options.seconds / 4)
        asyncio.run(stress(client, options, rate, warm_up, f"{options.seed} w", process))
        before = settle(url, process)
        good, odd, samples = asyncio.run(
            stress(client, options, rate, options.seconds, options.seed, process)
        )
        after = settle(url, process)
    growth = after["rss_mib"] / before["rss_mib"] - 1
    lost = [f"{r.status} {r.error}" for r in good if not r.good]
    problems = []
    if lost:
        problems.append(f"{len(lost)} good requests failed, such as: {lost[0]}")
    if growth > options.memory_growth:
        problems.append(f"memory grew by {100 * growth:.1f} %")
    for name in ("fds", "threads"):
        if after[name] > before[name] + 2:
            problems.append(f"{name} grew from {before[name]} to {after[name]}")
    if after["pages_used"] or after["running"] or after["waiting"]:
        problems.append(f"pages or requests are left: {after}")
    print(
        json.dumps(
            {
                "bench": "soak",
                "seconds": options.seconds,
                "rate": round(rate, 3),
                "good": len(good),
                **odd,
                "before": before,
                "after": after,
                "peak_rss_mib": max(s["rss_mib"] for s in samples),
                "memory_growth": round(growth, 4),
                "problems": problems,
            }
        )
    )
    return 1 if problems else 0


def settle(url, process):
    """Wait until nothing runs, and say what the server holds then."""
    end = time.monotonic() + 30
    while True:
        stats = get(url, "/stats")
        idle = not (stats["running"] or stats["waiting"] or stats["pages"]["used"])
        if idle or time.monotonic() > end:
            break
        time.sleep(0.2)
    time.sleep(1.0)  # connections close
    return {
        **resources(process),
        "pages_used": stats["pages"]["used"],
        "running": stats["running"],
        "waiting": stats["waiting"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=["load", "compare", "overhead", "soak", "offline"])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="for load")
    parser.add_argument("--model", default="smollm2", help="for the modes that start a server")
    parser.add_argument("--rate", type=float, help="requests a second; none: measured (load: 1)")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--arrivals", choices=["poisson", "bursty"], default="poisson")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate")
    parser.add_argument("--ttft-target", type=float, help="seconds; for goodput")
    parser.add_argument("--e2e-target", type=float, help="seconds; for goodput")
    parser.add_argument("--send-targets", action="store_true", help="tell the server of them")
    parser.add_argument("--seconds", type=float, default=60, help="for soak; in full 1800")
    parser.add_argument("--memory-growth", type=float, default=0.02, help="for soak: allowed")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--plot", metavar="PNG", help="draw the latencies")
    options, options.flags = parser.parse_known_args()
    if options.mode == "load" and options.rate is None:
        options.rate = 1.0
    return globals()[f"run_{options.mode}"](options)


if __name__ == "__main__":
    sys.exit(main())
