"""``model.generate`` before and after ``pagedllm.accelerate``, in turns, in one process.

    python benchmarks/generate_dropin.py
    python benchmarks/generate_dropin.py --model ORG/NAME --dtype float32 --batches 1 8 32

Each round times the original and the drop-in on the same prompts, so that a machine that
slows down slows both. Prints a line for each batch size, then all of it as one JSON line.
Greedy, without an end token: both generate the same number of tokens. The answers are
compared too: in float32 they must be equal; in bfloat16 the two round differently.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import statistics
import time
from typing import Any

TEXT = "the of a river house runs slowly over green old stones while seven people watch it"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="name that pagedllm resolves")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-words", type=int, nargs=2, default=[8, 48], help="from, to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch; as many as it likes by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import pagedllm

    logging.basicConfig(level=logging.WARNING)
    if args.threads:
        torch.set_num_threads(args.threads)
    path = pagedllm.resolve_model(args.model).path
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    rng = random.Random(args.seed)
    with pagedllm.accelerate(model, strict=True) as handle:
        results = [_measure(model, tokenizer, batch, args, rng) for batch in args.batches]
        info = handle.llm.model_info
    report = {
        "benchmark": "generate_dropin",
        "model": args.model,
        "dtype": args.dtype,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "batches": results,
        "tier": info.tier,
        "attention": info.attention_backend,
        "device": info.device,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "pagedllm": pagedllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(report))


def _measure(
    model: Any, tokenizer: Any, batch: int, args: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    import torch

    times: dict[str, list[float]] = {"original": [], "dropin": []}
    equal = 0
    for number in range(args.rounds + 1):
        # Fresh prompts each time: the prefix cache must not know them.
        lengths = [rng.randint(*args.prompt_words) for _ in range(batch)]
        texts = [" ".join(rng.choices(TEXT.split(), k=length)) for length in lengths]
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        call = {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": None}
        call |= {"pad_token_id": tokenizer.pad_token_id}
        answers = {}
        for name in ("original", "dropin"):
            begin = time.perf_counter()
            if name == "original":
                answers[name] = type(model).generate(model, **inputs, **call)
            else:
                answers[name] = model.generate(**inputs, **call)
            taken = time.perf_counter() - begin
            if number:  # the first round warms both up
                times[name].append(taken)
        if number:
            same = (answers["original"] == answers["dropin"]).all(dim=1)
            equal += int(torch.sum(same))
    original, dropin = (statistics.median(times[name]) for name in ("original", "dropin"))
    tokens = batch * args.new_tokens
    row = {
        "batch": batch,
        "original_s": round(original, 4),
        "dropin_s": round(dropin, 4),
        "original_tok_s": round(tokens / original, 1),
        "dropin_tok_s": round(tokens / dropin, 1),
        "speedup": round(original / dropin, 2),
        "equal_answers": f"{equal}/{batch * args.rounds}",
    }
    print(
        f"batch {batch:3d}: {row['original_tok_s']:8.1f} tok/s before, "
        f"{row['dropin_tok_s']:8.1f} after: {row['speedup']:.2f} times as fast; "
        f"{row['equal_answers']} answers equal",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
