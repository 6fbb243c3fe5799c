"""What `make demo` shows: a chat answer as it is written, then a batch of 16 prompts.

Run as ``python examples/demo.py [MODEL]``; the default is the embedded SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import sys
import time

from pagedllm import LLM, SamplingParams

QUESTION = "What is the capital of France, and what is it known for?"
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The largest planet of the solar system is",
    "A good breakfast starts with",
    "The first step in learning to play the piano is",
    "Photosynthesis is the process by which",
    "In the year 1969,",
    "The three primary colours are",
    "To bake bread you need",
    "The speed of light is",
    "A triangle has",
    "The author of Romeo and Juliet is",
    "The best way to learn a language is",
    "Gravity is the force that",
    "Once upon a time, in a small village,",
    "The opposite of hot is",
]


def chat(llm: LLM) -> None:
    """Stream one answer to the terminal."""
    print(f"\n> {QUESTION}")
    params = SamplingParams(temperature=0, max_tokens=120)
    for output in llm.chat_stream([{"role": "user", "content": QUESTION}], params):
        print(output.outputs[0].text_delta, end="", flush=True)
    print()


def batch(llm: LLM) -> None:
    """Complete all prompts at once, and say how fast that went."""
    print(f"\nA batch of {len(PROMPTS)} prompts:")
    params = SamplingParams(temperature=0, max_tokens=48)
    started = time.perf_counter()
    outputs = llm.generate(PROMPTS, params)
    seconds = time.perf_counter() - started
    for output in outputs:
        print(f"  {output.prompt} | {' '.join(output.outputs[0].text.split())[:70]}")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")


def main(model: str = "smollm2") -> None:
    """Load the model, chat, run the batch, and give the memory back."""
    with LLM(model, max_model_len=2048) as llm:
        info = llm.model_info
        print(f"{model}: {info.architecture} ({info.tier} tier) in {info.dtype} on {info.device}")
        chat(llm)
        batch(llm)


if __name__ == "__main__":
    main(*sys.argv[1:2])
