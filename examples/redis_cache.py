"""Equal requests answered from Redis: `pip install pagedllm-redis`, `redis-server --save ""`.

Run it twice: the second run is another engine, and its answers are there already.
"""

from __future__ import annotations

import time
from typing import Any

from pagedllm import LLM, SamplingParams


def main(response_cache: str | dict[str, Any] = "redis") -> None:
    """Ask the same three times; a cache that is not there changes the times and nothing else."""
    greedy = SamplingParams(temperature=0, max_tokens=32)
    with LLM("smollm2", response_cache=response_cache) as llm:
        llm.generate("Once", greedy.replace(max_tokens=1))  # connects, and warms up
        for number in (1, 2, 3):
            begin = time.perf_counter()
            [output] = llm.generate("The capital of France is", greedy)
            milliseconds = 1000 * (time.perf_counter() - begin)
            source = "Redis" if output.from_response_cache else "the model"
            print(f"request {number}: {milliseconds:7.1f} ms, from {source}")
        print("answer:", output.outputs[0].text.strip())
        print("streamed in", len(list(llm.stream("The capital of France is", greedy))), "pieces")
        print(llm.stats().response_cache)


if __name__ == "__main__":
    main()
