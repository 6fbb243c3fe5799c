"""``pagedllm quantize``: its report against the definition, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from paged_driver import logits_of
from pagedllm.cli.main import main
from pagedllm.models import load_model
from pagedllm.models.quantizing import Quantizer


def report(capsys, *arguments):
    assert main(["quantize", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_the_report_is_that_of_the_models_predictions(smollm2_path, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Rivers run to the sea, and yet the sea is never full.")
    found, table = report(
        capsys, smollm2_path, "--quantization", "int8", "--report", "--text", text,
        "--quantization-skip", "lm_head", "--threads", 1,
    )  # fmt: skip
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2_path)(text.read_text())["input_ids"]
    models = [
        load_model(str(smollm2_path), quantizer=quantizer)
        for quantizer in (None, Quantizer("int8", ["lm_head"]))
    ]
    wanted, got = (torch.log_softmax(logits_of(m, ids, len(ids)), -1) for m in models)
    divergence = torch.nn.functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
    assert found["tokens"] == len(ids)
    assert found["kl_mean"] == pytest.approx(float(divergence.mean()), rel=0.02, abs=2e-5)
    assert found["kl_max"] == pytest.approx(float(divergence.max()), rel=0.02, abs=2e-5)
    assert 0 < found["kl_mean"] < 0.03
    assert found["top1_agreement"] > 0.7
    assert found["bytes_before"] == models[0].weight_bytes
    assert found["bytes_after"] == models[1].weight_bytes < 0.75 * found["bytes_before"]
    assert found["skipped"] == ["lm_head"]
    assert f"kl_mean            {found['kl_mean']}" in table


@pytest.mark.parametrize("rows", [1, 200])
def test_pages_in_int8_change_little_and_take_half(smollm2_path, capsys, rows):
    arguments = ("--kv-cache-dtype", "int8", "--report", "--tokens", 120, "--rows", rows)
    found, _ = report(capsys, smollm2_path, *arguments)
    assert found["page_bytes_after"] / found["page_bytes_before"] == (64 + 4) / (2 * 64)
    assert found["bytes_after"] == found["bytes_before"]
    assert 0 < found["kl_mean"] < 0.004
    assert found["kl_max"] < 0.1
    assert found["top1_agreement"] > 0.9


def test_sizes_alone(tiny_with_text, capsys):
    found, _ = report(capsys, tiny_with_text, "--quantization", "int4", "--threads", 1)
    assert found["ratio"] < 0.4
    assert "kl_mean" not in found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--quantization METHOD is missing"),
        (["--quantization", "int8", "--tokens", "1"], "--tokens must be at least 2"),
        (["--quantization", "int8", "--report", "--text", "/nowhere"], "cannot read /nowhere"),
        (["--quantization", "int9"], "no plugin registers 'int9'; did you mean 'int"),
    ],
    ids=str,
)
def test_wrong_use_is_one_line(smollm2_path, capsys, arguments, words):
    assert main(["quantize", str(smollm2_path), *arguments]) == 2
    assert words in capsys.readouterr().err
