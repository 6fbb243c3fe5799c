"""What a step costs beside the model: schedule, build the batch, sample, write text.

    python benchmarks/step_overhead.py                       # 1 and 64 sequences
    python benchmarks/step_overhead.py --waiting 10000       # with a long queue

Runs an engine in this thread on a real model and tokenizer, greedy, with text, and takes the
time inside the model's own forward away from each step's. Also times the pool of pages at a
million pages. Medians; one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import pagedllm
from pagedllm import Config, SamplingParams
from pagedllm.cache.manager import CacheManager
from pagedllm.cache.page_table import PageTable
from pagedllm.engine.engine import Engine
from pagedllm.engine.intake import Intake
from pagedllm.engine.requests import RequestState
from pagedllm.engine.text import TokenDecoder
from pagedllm.engine.tokenizer import load_tokenizer
from pagedllm.executors.inline import InlineExecutor
from pagedllm.models.registry import load_model


class Timed:
    """A model that says how long its forward took."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any, cache: Any) -> Any:
        """Run the model's, timed."""
        begin = time.perf_counter()
        logits = self._model.forward(batch, cache)
        self.seconds += time.perf_counter() - begin
        return logits


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--waiting", type=int, default=0, help="requests in the queue behind them")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    path = str(pagedllm.resolve_model(args.model).path)
    rows = [_measure(args, path, count) for count in args.sequences]
    print(json.dumps({"benchmark": "step_overhead", "waiting": args.waiting, "rows": rows}))
    print(json.dumps({"benchmark": "pages", "rows": [_pages(n) for n in (1_000, 1_000_000)]}))


def _measure(args: argparse.Namespace, path: str, count: int) -> dict[str, Any]:
    config = Config(
        path, max_batch_size=count, threads=args.threads, kv_cache_memory="1GiB"
    ).resolve()
    timed: list[Timed] = []

    def load() -> Any:
        timed.append(Timed(load_model(path, dtype=config.dtype)))
        return timed[0]

    executor = InlineExecutor(config, load)
    info = executor.start()
    engine = Engine(config, executor, info)
    tokenizer = load_tokenizer(path)
    intake, decoder = Intake(config, info, tokenizer), TokenDecoder(tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=args.steps + 100, ignore_eos=True)
    for number in range(count + args.waiting):
        request = intake.request(f"Once upon a time, {number} people", params)
        engine.add(RequestState(request, decoder, lambda _: None), params.max_tokens)
    for _ in range(50):  # prompts, first pages, warm caches
        engine.step()
    whole, outside = [], []
    for _ in range(args.steps):
        timed[0].seconds = 0.0
        begin = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begin
        whole.append(seconds)
        outside.append(seconds - timed[0].seconds)
    executor.close()
    return {
        "sequences": count,
        "step_ms": round(1e3 * statistics.median(whole), 3),
        "overhead_ms": round(1e3 * statistics.median(outside), 3),
        "overhead_p90_ms": round(1e3 * statistics.quantiles(outside, n=10)[-1], 3),
    }


def _pages(num_pages: int) -> dict[str, Any]:
    """Microseconds a page to take, publish, find and give back, in a full pool."""
    cache = CacheManager(num_pages, 16)
    tokens = 16 * 500
    times: dict[str, list[float]] = {"take": [], "publish": [], "find": [], "give_back": []}
    for number in range(num_pages // 500 + 20):  # more than fit: the last ones evict
        table, ids = PageTable(), [number] * tokens
        cache.hash_tokens(table, ids, "")
        finder = PageTable()
        cache.hash_tokens(finder, ids, "")
        parts = {
            "take": lambda t=table: cache.extend(t, 0, tokens),
            "publish": lambda t=table, i=ids: cache.publish(t, i, tokens, ""),
            "find": lambda t=finder, i=ids: cache.find_prefix(t, i, ""),
            "give_back": lambda t=table: cache.release(t),
        }
        for name, part in parts.items():
            begin = time.perf_counter()
            part()
            times[name].append((time.perf_counter() - begin) / 500)
    medians = {name: round(1e6 * statistics.median(v[-20:]), 3) for name, v in times.items()}
    return {"pages": num_pages, "us_a_page": medians}


if __name__ == "__main__":
    main()
