"""``pagedllm bench``: throughput of a batch, or latency of one request after the other.

Owner: the command line. Invariants: standard output is one line of JSON; every request
generates exactly the tokens it was asked for (greedy, past the end token), or the command
fails; the warm-up's prompts are not the measured ones, so no prefix is cached before.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm.cli.common import (
    UsageError,
    load_llm,
    median_and_p99,
    quiet_downloads,
    read_file,
)
from pagedllm.config import Config
from pagedllm.errors import EngineError
from pagedllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.async_llm import AsyncLLM
    from pagedllm.llm import LLM
    from pagedllm.outputs import RequestOutput

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt's token ids, how many tokens to generate, and when it arrives."""

    prompt: tuple[int, ...]
    out: int
    at: float = 0.0
    """Seconds after the start."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run. Raises ValueError."""
        if not self.prompt or min(self.prompt) < 0 or self.out < 1 or self.at < 0:
            raise ValueError("a request needs token ids, an 'out' of at least 1 and an 'at' from 0")

    @property
    def params(self) -> SamplingParams:
        """Greedy and of exactly ``out`` tokens."""
        return SamplingParams(temperature=0, max_tokens=self.out, ignore_eos=True)


@dataclass(slots=True)
class Run:
    """One repetition's figures; times in seconds, a list entry per request or per gap."""

    requests: Sequence[BenchRequest]
    wall: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    """Time per output token after the first: a request's mean."""
    itl: list[float] = field(default_factory=list)
    """Inter-token latency: every gap by itself, where tokens were watched one by one."""
    e2e: list[float] = field(default_factory=list)

    def add_times(self, start: float, times: Sequence[float]) -> None:
        """Count a request whose tokens came at ``times``."""
        self.ttft.append(times[0] - start)
        self.e2e.append(times[-1] - start)
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        self.itl += gaps
        if gaps:
            self.tpot.append(sum(gaps) / len(gaps))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("mode", choices=["throughput", "latency"], help="what to measure")
    number = _at_least(1)
    parser.add_argument("--input-len", type=number, default=128, help="prompt tokens (128)")
    parser.add_argument("--output-len", type=number, default=128, help="tokens to generate (128)")
    parser.add_argument("--num-prompts", type=number, default=16, help="requests (16)")
    parser.add_argument(
        "--workload",
        metavar="FILE",
        help='JSON instead of random tokens: [{"prompt": [ids], "out": N, "at": S}, ...], or '
        '{"variants": [such lists]}; "at" is the arrival in seconds',
    )
    parser.add_argument("--variant", type=_at_least(0), default=0, help="first variant to run (0)")
    parser.add_argument(
        "--repeat", type=number, default=1, help="repetitions, each with other tokens (1)"
    )
    parser.add_argument(
        "--warm-up", type=_at_least(0), default=8, help="requests to run before, unmeasured (8)"
    )
    Config.add_cli_arguments(parser)


def _at_least(low: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {low}, got {text}"
            )
        return value

    return number


def run(options: argparse.Namespace) -> int:
    """Measure, print a line of JSON and return the exit status."""
    config = Config.from_cli(options, seed=0)  # the prompts follow from it
    variants = None if options.workload is None else read_workload(Path(options.workload))
    if variants is not None:
        usable = max(1, len(variants) - 1)
        if options.variant + options.repeat > usable:
            raise UsageError(
                f"--variant {options.variant} --repeat {options.repeat} is more than "
                f"{options.workload} has: {usable} to measure; add variants or lower them"
            )
    online = options.mode == "throughput" and variants is not None and _arrivals(variants)
    started = time.perf_counter()
    if online:
        report = asyncio.run(_online(config, options, variants or [], started))
    else:
        report = _offline(config, options, variants, started)
    print(json.dumps(report))
    return 0


def _arrivals(variants: Sequence[Sequence[BenchRequest]]) -> bool:
    return any(request.at > 0 for variant in variants for request in variant)


def _offline(
    config: Config,
    options: argparse.Namespace,
    variants: list[list[BenchRequest]] | None,
    started: float,
) -> dict[str, Any]:
    with load_llm(config) as llm:
        load_s = time.perf_counter() - started
        warm_up, measured = _plan(options, variants, config.seed or 0, llm.model_info.vocab_size)
        measure = _throughput if options.mode == "throughput" else _latency
        if warm_up:
            measure(llm, warm_up, watch=False)
        runs = [measure(llm, requests, watch=sys.stderr.isatty()) for requests in measured]
        return _report(options, llm.config, load_s, runs)


def _throughput(llm: LLM, requests: Sequence[BenchRequest], *, watch: bool) -> Run:
    """All requests at once."""
    found = Run(requests)
    prompts = [list(request.prompt) for request in requests]
    params = [request.params for request in requests]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=watch)
    found.wall = time.perf_counter() - begin
    for request, output in zip(requests, outputs, strict=True):
        _collect(found, request, output)
        times = output.metrics
        if times is None or times.ttft is None or times.e2e_time is None:
            raise EngineError("the engine kept no times of a request")
        found.ttft.append(times.ttft)
        found.e2e.append(times.e2e_time)
        if request.out > 1:
            found.tpot.append((times.e2e_time - times.ttft) / (request.out - 1))
    return found


def _latency(llm: LLM, requests: Sequence[BenchRequest], *, watch: bool) -> Run:
    """One request after the other, each token watched."""
    from tqdm import tqdm

    found = Run(requests)
    begin = time.perf_counter()
    for request in tqdm(requests, disable=not watch, unit="request"):
        start, times = time.perf_counter(), []
        for output in llm.stream(list(request.prompt), request.params):
            times += [time.perf_counter()] * len(output.outputs[0].new_token_ids)
        _collect(found, request, output)
        found.add_times(start, times)
    found.wall = time.perf_counter() - begin
    return found


async def _online(
    config: Config,
    options: argparse.Namespace,
    variants: list[list[BenchRequest]],
    started: float,
) -> dict[str, Any]:
    """Requests that arrive at their own times."""
    quiet_downloads()
    from pagedllm import AsyncLLM

    async with AsyncLLM(config) as llm:
        load_s = time.perf_counter() - started
        warm_up, measured = _plan(options, variants, 0, 0)
        if warm_up:
            await _serve(llm, warm_up, at_once=True)
        runs = [await _serve(llm, requests) for requests in measured]
        return _report(options, llm.config, load_s, runs)


async def _serve(llm: AsyncLLM, requests: Sequence[BenchRequest], *, at_once: bool = False) -> Run:
    found = Run(requests)
    begin = time.perf_counter()

    async def one(request: BenchRequest) -> tuple[RequestOutput, float, list[float]]:
        arrival = begin if at_once else begin + request.at
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        times: list[float] = []
        async for output in llm.generate(list(request.prompt), request.params):
            times += [time.perf_counter()] * len(output.outputs[0].new_token_ids)
        return output, arrival, times

    answers = await asyncio.gather(*map(one, requests))
    found.wall = time.perf_counter() - begin
    for request, (output, arrival, times) in zip(requests, answers, strict=True):
        _collect(found, request, output)
        found.add_times(arrival, times)
    return found


def _collect(found: Run, request: BenchRequest, output: RequestOutput) -> None:
    tokens = list(output.outputs[0].token_ids)
    if len(tokens) != request.out:
        raise UsageError(
            f"a request was to generate {request.out} tokens and got {len(tokens)}; raise "
            f"max_model_len and force_max_tokens, or lower the output length"
        )
    found.tokens.append(tokens)


def _plan(
    options: argparse.Namespace,
    variants: list[list[BenchRequest]] | None,
    seed: int,
    vocab_size: int,
) -> tuple[list[BenchRequest], list[list[BenchRequest]]]:
    """Return the warm-up's requests and each repetition's, all with different tokens."""
    if variants is None:
        made = [_random(options, vocab_size, f"{seed} {run}") for run in range(options.repeat + 1)]
        warm, measured = made[-1], made[:-1]
    else:
        # The last variant warms up; where there is one only, its prompts backwards do.
        measured = variants[:-1] or variants
        warm = variants[-1] if len(variants) > 1 else _backwards(variants[0])
        measured = measured[options.variant : options.variant + options.repeat]
    short = [
        BenchRequest(request.prompt, min(request.out, WARM_UP_TOKENS))
        for request in warm[: options.warm_up]
    ]
    return short, measured


def _backwards(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    return [BenchRequest(request.prompt[::-1], request.out) for request in requests]


def _random(options: argparse.Namespace, vocab_size: int, seed: str) -> list[BenchRequest]:
    draw = random.Random(seed)
    return [
        BenchRequest(
            tuple(draw.randrange(vocab_size) for _ in range(options.input_len)), options.output_len
        )
        for _ in range(options.num_prompts)
    ]


def read_workload(path: Path) -> list[list[BenchRequest]]:
    """Read a workload file's variants.

    Raises:
        UsageError: it is not a workload.
    """
    try:
        data = json.loads(read_file(path))
        variants = data["variants"] if isinstance(data, dict) else [data]
        found = [
            [
                BenchRequest(
                    tuple(map(int, each["prompt"])), int(each["out"]), float(each.get("at", 0))
                )
                for each in variant
            ]
            for variant in variants
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a workload ({type(error).__name__}: {error}); expected "
            '[{"prompt": [ids], "out": N}, ...] or {"variants": [such lists]}'
        ) from error
    if not found or not all(found):
        raise UsageError(f"{path} has no requests")
    return found


def _report(
    options: argparse.Namespace, config: Config, load_s: float, runs: Sequence[Run]
) -> dict[str, Any]:
    """Medians over the repetitions for speeds; percentiles over all their requests for times."""
    import torch

    from pagedllm import __version__

    def speed(prompts: bool) -> list[float]:
        totals = [
            sum(request.out + prompts * len(request.prompt) for request in each.requests)
            for each in runs
        ]
        return [round(total / each.wall, 2) for total, each in zip(totals, runs, strict=True)]

    def times(name: str) -> dict[str, float] | None:
        return median_and_p99(1000 * value for each in runs for value in getattr(each, name))

    requests = runs[0].requests
    decode = times("tpot")
    return {
        "bench": options.mode,
        "model": config.model,
        "workload": options.workload,
        "num_prompts": len(requests),
        "input_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.out for request in requests),
        "repeat": options.repeat,
        "output_tok_s": statistics.median(speed(prompts=False)),
        "total_tok_s": statistics.median(speed(prompts=True)),
        "wall_s": round(statistics.median(each.wall for each in runs), 4),
        **{f"{name}_ms": times(name) for name in ("ttft", "tpot", "itl", "e2e")},
        "decode_tok_s": round(1000 / decode["p50"], 2) if decode else None,
        "all_output_tok_s": speed(prompts=False),
        "load_s": round(load_s, 2),
        "peak_rss_mib": _peak_rss_mib(),
        "tokens_sha1": hashlib.sha1(json.dumps(runs[0].tokens).encode()).hexdigest()[:8],
        "pagedllm": __version__,
        "torch": torch.__version__,
        "settings": config.to_dict(),
    }


def _peak_rss_mib() -> float | None:
    """Most resident memory this process has had, in MiB; None where that is not known."""
    try:
        import resource
    except ImportError:
        return None  # Windows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
