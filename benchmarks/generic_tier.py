"""Models that are not dense Llamas: ``generate`` of transformers and of the engine, in turns.

    python benchmarks/generic_tier.py
    python benchmarks/generic_tier.py --dtype float32 --sizes 100m --batch 8

GPT-2, StarCoder2 and Cohere, which have no native decoder, and Mixtral, which has, with random
weights, tiny and of about 100 million, through ``pagedllm.accelerate``, which shares their weights,
and loaded by ``pagedllm.LLM`` from a folder, in one process: each round times all on the same fresh
prompts, so that a machine that slows down slows all. Greedy, without an end token. Prints a line
for each model, then all of it as one JSON line; medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers

import pagedllm

VOCABULARY = 32_000
SIZES = {"tiny": (64, 2, 4), "100m": (768, 8, 12)}
"""Hidden size, layers, heads."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["GPT-2", "StarCoder2", "Cohere", "Mixtral"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[8, 64], help="from, to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        for name, config in _configs(*SIZES[size]).items():
            if name not in args.models:
                continue
            torch.manual_seed(args.seed)
            model = transformers.AutoModelForCausalLM.from_config(config)
            model = model.to(getattr(torch, args.dtype)).eval()
            with (
                tempfile.TemporaryDirectory() as folder,
                pagedllm.accelerate(model, strict=True) as handle,
            ):
                model.save_pretrained(folder)
                row = {"model": name, "size": size, "tier": handle.llm.model_info.tier}
                with pagedllm.LLM(folder, skip_tokenizer_init=True, max_model_len=1024) as llm:
                    row |= _measure(model, llm, args)
            rows.append(row)
            print(
                f"{name} {size}: {row['original_s']:.3f} s before, {row['dropin_s']:.3f} s "
                f"after: {row['speedup']:.2f} times as fast; loaded by LLM {row['loaded_s']:.3f} "
                f"s: {row['loaded_speedup']:.2f} times",
                flush=True,
            )
    report = {
        "benchmark": "generic_tier",
        "dtype": args.dtype,
        "batch": args.batch,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "models": rows,
    }
    print(json.dumps(report))


def _configs(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }
    return {
        "GPT-2": transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=hidden, n_layer=layers, n_head=heads, **ends
        ),
        "StarCoder2": transformers.Starcoder2Config(**shape, **ends),
        "Cohere": transformers.CohereConfig(**shape, **ends),
        # Eight experts of a quarter of the width, of which two are run.
        "Mixtral": transformers.MixtralConfig(
            **{**shape, "intermediate_size": hidden}, num_local_experts=8, **ends
        ),
    }


def _measure(model: Any, llm: pagedllm.LLM, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    times: dict[str, list[float]] = {"original": [], "dropin": [], "loaded": []}
    params = pagedllm.SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    equal = 0
    for number in range(args.rounds + 1):
        # Fresh prompts each time: the prefix cache must not know them.
        longest = args.prompt_tokens[1]
        ids = torch.zeros(args.batch, longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row in range(args.batch):
            length = rng.randint(*args.prompt_tokens)
            ids[row, longest - length :] = torch.randint(1, VOCABULARY, (length,))
            mask[row, longest - length :] = 1
        call = {"input_ids": ids, "attention_mask": mask, "do_sample": False}
        call |= {"max_new_tokens": args.new_tokens}
        answers = {}
        for name in times:
            prompts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
            begin = time.perf_counter()
            if name == "loaded":
                llm.generate(prompts, params, use_tqdm=False)
                if number:
                    times[name].append(time.perf_counter() - begin)
                continue
            run = model.generate if name == "dropin" else type(model).generate.__get__(model)
            answers[name] = run(**call)
            if number:  # the first round warms both up
                times[name].append(time.perf_counter() - begin)
        if number:
            equal += int((answers["original"] == answers["dropin"]).all(dim=1).sum())
    original, dropin, loaded = (statistics.median(each) for each in times.values())
    return {
        "original_s": round(original, 4),
        "dropin_s": round(dropin, 4),
        "speedup": round(original / dropin, 2),
        "loaded_s": round(loaded, 4),
        "loaded_speedup": round(original / loaded, 2),
        "equal_answers": f"{equal}/{args.batch * args.rounds}",
    }


if __name__ == "__main__":
    main()
