"""An accelerated model inside what people use it with: pipelines and evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import pagedllm
import preloaded

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tiny_with_text: Any) -> Any:
    return tiny_with_text


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_text_generation_pipeline(folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = ["The capital of France is", "Once upon a time, a long way from here,", "Hi"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    calls: list[tuple[Any, dict[str, Any]]] = [
        (prompts[0], {}),
        (prompts, {"batch_size": 3}),
        (chat, {}),
        (prompts, {"num_beams": 3, "batch_size": 2, "return_full_text": False}),
        (prompts[0], {"repetition_penalty": 1.3, "return_tensors": True}),
    ]
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer)

    def answers() -> list[Any]:
        return [ask(prompt, max_new_tokens=10, do_sample=False, **kw) for prompt, kw in calls]

    expected = answers()
    with pagedllm.accelerate(model, strict=True, num_pages=512) as handle:
        assert answers() == expected
        assert handle.llm.stats().generated_tokens > 100


def test_token_healing_generates_within_generate(folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["The link is https:", "An example of a simp"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    call = {**inputs, "token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 6}
    expected = model.generate(**call)
    with pagedllm.accelerate(model, strict=True, num_pages=256):
        assert torch.equal(model.generate(**call), expected)


def test_lm_eval(folder: Any) -> None:
    reason = "lm-eval brings thirty distributions and is no part of the development environment"
    pytest.importorskip("lm_eval", reason=reason)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests = [
        Instance("generate_until", {}, (text, {"until": ["\n\n"], "max_gen_toks": 12}), index)
        for index, text in enumerate(["The capital of", "Two and two make", "Hello there, you"])
    ]

    def answers() -> list[str]:
        ask = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=256)
        return list(ask.generate_until(requests, disable_tqdm=True))

    expected = answers()
    with pagedllm.accelerate(model, strict=True, num_pages=512) as handle:
        assert answers() == expected
        assert handle.llm.stats().generated_tokens > 10


def test_the_page_about_it_runs(smollm2_path: Path, tmp_path: Path) -> None:
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/generate.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert "Paris" in _run("-c", snippet, cwd=tmp_path)


def test_the_example_runs(smollm2_path: Path, tmp_path: Path) -> None:
    shown = _run(str(ROOT / "examples/generate_dropin.py"), cwd=tmp_path)
    assert "all answers equal" in shown


def test_the_benchmark_prints_a_line_of_json(tiny_with_text: Path, tmp_path: Path) -> None:
    import json

    shown = _run(
        str(ROOT / "benchmarks/generate_dropin.py"), "--model", str(tiny_with_text), "--dtype",
        "float32", "--batches", "1", "3", "--new-tokens", "4", "--rounds", "2", cwd=tmp_path,
    )  # fmt: skip
    report = json.loads(shown.splitlines()[-1])
    assert [row["batch"] for row in report["batches"]] == [1, 3]
    assert all(row["original_s"] > 0 and row["dropin_s"] > 0 for row in report["batches"])


def _run(*arguments: str, cwd: Path) -> str:
    done = preloaded.run(arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout
