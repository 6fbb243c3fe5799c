"""Pages in int8 beside pages in the model's dtype: bytes of a token, and time of one decoded.

Two engines in one process, in turn. Prints a line of JSON per context:

    python benchmarks/kv_cache.py --context 2048 4096

What int8 does to the answers is said by ``pagedllm quantize MODEL --kv-cache-dtype int8 --report``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import TYPE_CHECKING

from pagedllm import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT = ("auto", "int8")


def main() -> None:
    """Measure as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--streams", type=int, default=1, help="sequences that decode together")
    parser.add_argument("--new", type=int, default=64, help="tokens decoded after the context")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    pages = args.streams * (-(-(max(args.context) + args.new) // 16) + 1)
    settings = {"num_pages": pages, "skip_tokenizer_init": True, "threads": args.threads}
    engines = {kept: LLM(args.model, kv_cache_dtype=kept, **settings) for kept in KEPT}
    for context in args.context:
        times: dict[str, list[tuple[float, float]]] = {kept: [] for kept in KEPT}
        for number in range(args.rounds + 1):
            for kept, llm in engines.items():
                found = measure(llm, context, args.streams, args.new)
                if number:  # the first warms up
                    times[kept].append(found)
        infos = {kept: llm.model_info for kept, llm in engines.items()}
        line: dict[str, object] = {"context": context, "streams": args.streams}
        line |= {
            f"{kept}_bytes_per_token": infos[kept].bytes_per_page // infos[kept].page_size
            for kept in KEPT
        }
        for i, name in enumerate(("prefill", "decode")):
            medians = [statistics.median(each[i] for each in times[kept]) for kept in KEPT]
            ratios = [a[i] / b[i] for a, b in zip(times["auto"], times["int8"], strict=True)]
            line |= {f"{k}_{name}_ms": round(m * 1e3, 2) for k, m in zip(KEPT, medians)}
            line[f"{name}_speedup"] = round(statistics.median(ratios), 3)
        print(json.dumps(line), flush=True)
    for llm in engines.values():
        llm.close()


def measure(llm: LLM, context: int, streams: int, new: int) -> tuple[float, float]:
    """Return the seconds of a prompt, and those of a step that decodes a token of each stream."""
    prompts = [prompt(context) for _ in range(streams)]
    return timed(llm, prompts, 1), (timed(llm, prompts, new + 1) - timed(llm, prompts, 1)) / new


def prompt(length: int) -> list[int]:
    """Random tokens: no two prompts begin alike."""
    return [random.randrange(100, 20_000) for _ in range(length)]


def timed(llm: LLM, prompts: Sequence[list[int]], new: int) -> float:
    """Seconds that it takes to answer; after the first call, from the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(list(prompts), params, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
