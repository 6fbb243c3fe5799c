"""Many questions with asyncio: as one batch, and as single calls that share batches."""

from __future__ import annotations

import asyncio
import time

from pagedllm import ChatPagedLLM

COUNTRIES = ["France", "Japan", "Kenya", "Peru", "Norway", "India", "Canada", "Egypt"]


async def main() -> None:
    """Ask for capitals, once with abatch and once with a task for each question."""
    chat = ChatPagedLLM(model_id="smollm2", temperature=0, max_tokens=16)
    questions = [f"What is the capital of {country}?" for country in COUNTRIES]
    started = time.perf_counter()
    for answer in await chat.abatch(questions):
        print(answer.content)
    print(f"abatch: {time.perf_counter() - started:.1f} s")
    started = time.perf_counter()
    await asyncio.gather(*(chat.ainvoke(question) for question in questions))
    print(f"gather: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
