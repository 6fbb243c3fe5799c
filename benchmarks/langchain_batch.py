"""64 prompts by one ``batch`` and by 64 ``invoke``: prints one line of JSON.

    python benchmarks/langchain_batch.py --model smollm2 --prompts 64 --tokens 32

Greedy decoding of the same prompts; weights are loaded and kernels compiled before either is
timed, and each prompt is new to the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

from langchain_core.messages import HumanMessage

from pagedllm import ChatPagedLLM, PagedLLM


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--chat", action="store_true", help="ChatPagedLLM instead of PagedLLM")
    options = parser.parse_args()

    fields = {"model_id": options.model, "temperature": 0, "max_tokens": options.tokens}
    model = (
        ChatPagedLLM(**fields, ignore_eos=True)
        if options.chat
        else PagedLLM(**fields, ignore_eos=True)
    )

    def prompts(run):
        texts = [f"{run} {number}: tell me about it." for number in range(options.prompts)]
        return [[HumanMessage(text)] for text in texts] if options.chat else texts

    model.batch(prompts("Warm-up")[:8])
    model.invoke(prompts("Warm")[0])
    started = time.perf_counter()
    model.batch(prompts("Batch"))
    batch = time.perf_counter() - started
    started = time.perf_counter()
    for prompt in prompts("Single"):
        model.invoke(prompt)
    single = time.perf_counter() - started
    info = model.engine.model_info
    total = options.prompts * options.tokens
    print(
        json.dumps(
            {
                "benchmark": "langchain_batch",
                "class": type(model).__name__,
                "model": options.model,
                "dtype": info.dtype,
                "device": info.device,
                "machine": platform.processor() or platform.machine(),
                "prompts": options.prompts,
                "tokens": options.tokens,
                "batch_s": round(batch, 3),
                "invokes_s": round(single, 3),
                "batch_tok_s": round(total / batch, 1),
                "invokes_tok_s": round(total / single, 1),
                "speedup": round(single / batch, 2),
            }
        )
    )
    model.close()


if __name__ == "__main__":
    main()
