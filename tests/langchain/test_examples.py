"""The LangChain examples run on the embedded default model, all on one engine."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

from pagedllm import ChatPagedLLM

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "langchain_chain": ["one:", "batch:", "stream:"],
    "langchain_rag": ["Found:  The library opens", "Answer:"],
    "langchain_agent": ["calls: ", "tool: "],
    "langchain_streaming": ["'output_tokens': ", "'total_tokens': "],
    "langchain_async_batch": ["abatch:", "gather:"],
}


@pytest.fixture(scope="module", autouse=True)
def _engine_stays():
    with ChatPagedLLM(model_id="smollm2") as chat:
        yield chat.engine


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_what_it_should(name, capsys):
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    result = main()
    if asyncio.iscoroutine(result):
        asyncio.run(result)
    out = capsys.readouterr().out
    for part in SAYS[name]:
        assert part in out


def test_every_langchain_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("langchain_*.py")} == set(SAYS)
