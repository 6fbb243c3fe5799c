"""A transformers pipeline before and after ``pagedllm.accelerate``, on the same model.

Run as ``python examples/generate_dropin.py``; it uses the embedded SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import pagedllm

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "A good breakfast starts with",
    "The opposite of hot is",
    "To bake bread you need",
    "Gravity is the force that",
    "A triangle has",
    "Once upon a time, in a small village,",
]


def ask(pipe: Any) -> list[str]:
    """Complete the prompts as one batch."""
    outputs = pipe(PROMPTS, batch_size=len(PROMPTS), max_new_tokens=16, do_sample=False)
    return [output[0]["generated_text"] for output in outputs]


def timed(pipe: Any) -> tuple[list[str], float]:
    """Ask twice and time the second: the first warms up, and compiles on a new machine."""
    ask(pipe)
    begin = time.perf_counter()
    answers = ask(pipe)
    return answers, time.perf_counter() - begin


def main() -> None:
    """Time both and show that they agree."""
    path = pagedllm.resolve_model("smollm2").path
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    # float32: then the answers are the same to the last token.
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)

    before, original = timed(pipe)
    with pagedllm.accelerate(model):
        after, dropin = timed(pipe)

    for text in after:
        print("-", " ".join(text.split()))
    print(f"\ntransformers {original:.2f} s, pagedllm {dropin:.2f} s; ", end="")
    print("all answers equal" if before == after else "answers differ")


if __name__ == "__main__":
    main()
