"""pagedllm under the peers' benchmark: the same workloads, loops and JSON line as its peers.

    PEERS=DIR python benchmarks/bench_pagedllm.py w2 --model DIR/models/smollm2-135m

DIR is where the peers' benchmark was set up: its ``scripts/common.py`` has the measuring and
its ``workloads/`` the token ids. ``compare_peers.py`` beside this file runs both sides in turn.

Workloads: w1 offline throughput (64 mixed requests), w2 one stream, w3 time to the first token
of 1,024, w4 a shared prefix (32 requests), w5 requests that arrive two a second; ``cold``
measures the start alone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

SCRIPTS = Path(os.environ.get("PEERS", "")) / "scripts"
if not (SCRIPTS / "common.py").is_file():
    sys.exit("set PEERS to the folder of the peers' benchmark, which holds scripts/common.py")
sys.path.insert(0, str(SCRIPTS))

from common import main  # type: ignore[import-not-found]  # noqa: E402

Reqs = list[dict[str, Any]]


class PagedLLMPeer:
    """What ``common.main`` drives; see its docstring."""

    def __init__(self) -> None:
        self.times: list[list[float]] = []
        self.t_start = 0.0

    def load(self, args: argparse.Namespace) -> None:
        """Load the model; w2 and w5 stream, so they use the engine's asyncio face."""
        import pagedllm

        self._params = pagedllm.SamplingParams
        settings = {
            "dtype": args.dtype,
            "threads": args.threads,
            "max_batch_size": args.seqs,
            "quantization": args.quantization or None,
            "skip_tokenizer_init": not args.text,
            "disable_log_stats": True,
            "kv_cache_memory": args.kv_cache_memory,
        }
        if args.batch_tokens:
            settings["max_num_batched_tokens"] = args.batch_tokens
        if args.workload.lower() in ("w2", "w5"):
            import asyncio

            self._events = asyncio.new_event_loop()
            self._async = pagedllm.AsyncLLM(args.path, **settings)
        else:
            self._llm = pagedllm.LLM(args.path, **settings)

    def gen(self, reqs: Reqs, stream: bool = False) -> list[list[int]]:
        """Greedy token ids, one list per request; with their times when streaming."""
        self.t_start = time.perf_counter()
        if hasattr(self, "_async"):
            rows = self._events.run_until_complete(self._all(reqs, None))
            self.times = [times for times, _ in rows]
            return [tokens for _, tokens in rows]
        prompts = [request["prompt"] for request in reqs]
        outputs = self._llm.generate(prompts, [self._greedy(r) for r in reqs])
        return [list(output.outputs[0].token_ids) for output in outputs]

    def online(self, reqs: Reqs) -> list[tuple[float, list[float]]]:
        """Send each request at its time; return its arrival and the times of its tokens."""
        begin = time.perf_counter()
        rows = self._events.run_until_complete(self._all(reqs, begin))
        arrivals = [begin + request["at"] for request in reqs]
        return [(at, times) for at, (times, _) in zip(arrivals, rows, strict=True)]

    def close(self) -> None:
        """Free the model."""
        (self._async if hasattr(self, "_async") else self._llm).close()

    def _greedy(self, request: dict[str, Any]) -> Any:
        return self._params(temperature=0.0, max_tokens=request["out"], ignore_eos=True)

    async def _all(self, reqs: Reqs, begin: float | None) -> list[tuple[list[float], list[int]]]:
        import asyncio

        return await asyncio.gather(*(self._one(request, begin) for request in reqs))

    async def _one(
        self, request: dict[str, Any], begin: float | None
    ) -> tuple[list[float], list[int]]:
        import asyncio

        if begin is not None:
            await asyncio.sleep(max(0.0, begin + request["at"] - time.perf_counter()))
        times: list[float] = []
        tokens: list[int] = []
        async for output in self._async.generate(request["prompt"], self._greedy(request)):
            tokens = list(output.outputs[0].token_ids)
            times += [time.perf_counter()] * (len(tokens) - len(times))
        return times, tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options beside the common ones."""
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=0)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--kv-cache-memory", default="512MiB", help="w1 needs 380 MB")
    parser.add_argument("--text", action="store_true", help="detokenise too; the peers do not")


if __name__ == "__main__":
    main("pagedllm", PagedLLMPeer, add_options)
