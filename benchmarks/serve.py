"""Load on a server, from a process of its own: latencies, goodput, and what leaks.

    python benchmarks/serve.py load --url http://127.0.0.1:8000 --rate 4 --requests 200
    python benchmarks/serve.py load --url ... --arrivals bursty --plot latencies.png
    python benchmarks/serve.py compare --model smollm2
    python benchmarks/serve.py soak --model smollm2 --seconds 1800
    python benchmarks/serve.py overhead --model smollm2

Each prints a line of JSON (``compare`` one per policy). ``load`` measures a server that runs;
the others start their own. ``compare`` offers 1.5 times what the server sustains, under ``fcfs``
and under ``deadline``, and reports goodput: answers whose first token and end came within the
targets; without any those are :data:`PATIENCE` times the medians at the load that it sustains.
``soak`` offers 0.8 times that, with aborts, bad requests and slow readers among the
good ones, fails on any that is lost, and watches memory, descriptors, threads and pages.
``overhead`` runs the same requests through ``LLM.generate`` and through 64 streaming clients,
and fails below :data:`LEAST_SHARE` of its throughput or at :data:`MOST_TTFT` times its time to
the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time

from serve_client import Client, get, offer, percentiles, request, saturate, server
from serve_soak import run_soak

PATIENCE = 1.5
LEAST_SHARE, MOST_TTFT = 0.9, 1.2


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
            aimless = options.ttft_target is None and options.e2e_target is None
            if rate is None or aimless:
                most, usual = asyncio.run(saturate(client, options, max(1, options.requests // 2)))
                rate = 1.5 * most if rate is None else rate
            if aimless:
                options.ttft_target, options.e2e_target = (
                    round(PATIENCE * statistics.median(times), 4)
                    for times in ([r.ttft for r in usual], [r.e2e for r in usual])
                )
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
    found["ttft_ratio"] = round(found["ttft_alone_ms"]["p50"] / reference["ttft_ms"]["p50"], 4)
    found["bars"] = {"share_of_offline": LEAST_SHARE, "ttft_ratio": MOST_TTFT}
    print(json.dumps(found))
    met = found["share_of_offline"] >= LEAST_SHARE and found["ttft_ratio"] < MOST_TTFT
    return 0 if met and not found["failed"] else 1


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
    parser.add_argument(
        "--memory-growth", type=float, default=0.02, help="for soak: of resident memory, allowed"
    )
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--plot", metavar="PNG", help="draw the latencies")
    options, options.flags = parser.parse_known_args()
    if options.mode == "load" and options.rate is None:
        options.rate = 1.0
    modes = {
        "load": run_load,
        "compare": run_compare,
        "overhead": run_overhead,
        "soak": run_soak,
        "offline": run_offline,
    }
    return modes[options.mode](options)


if __name__ == "__main__":
    sys.exit(main())
