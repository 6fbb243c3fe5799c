"""``pagedllm generate`` and ``bench``: what is printed is what the API gives."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import preloaded
from pagedllm import LLM, SamplingParams
from pagedllm.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = ["The capital of France is", "Two plus two is", "Water boils at"]
GREEDY = ["--temperature", "0", "--max-tokens", "12"]
# fp32: in bf16 a prompt's answer may depend on how many others share its batch.
SMALL = ["--num-pages", "300", "--max-model-len", "2048", "--threads", "1", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tiny_and_long: Path) -> list[str]:
    return ["--model", str(tiny_and_long), *SMALL]


@pytest.fixture(scope="module")
def real_model(smollm2_path: Path) -> list[str]:
    """For what sense is asked of, or many seconds of work."""
    return ["--model", str(smollm2_path), *SMALL]


@pytest.fixture(scope="module")
def expected(tiny_and_long: Path) -> list[str]:
    return _texts(tiny_and_long)


def _texts(model: Path) -> list[str]:
    with LLM(str(model), dtype="float32", num_pages=200, threads=1) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
        return [output.outputs[0].text for output in outputs]


def _out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(arguments)
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def test_one_prompt_prints_its_continuation_and_nothing_else(
    real_model: list[str], smollm2_path: Path
) -> None:
    command = ["-m", "pagedllm.cli.main", "generate", PROMPTS[0]]
    result = preloaded.run([*command, *GREEDY, *real_model])
    assert result.returncode == 0, result.stderr
    assert result.stdout == _texts(smollm2_path)[0] + "\n"
    assert "Paris" in result.stdout
    assert result.stderr == ""  # no progress bars where nobody watches


def test_streaming_prints_the_same(
    model: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _out(capsys, "generate", "--stream", PROMPTS[0], *GREEDY, *model) == expected[0] + "\n"


def test_prompts_from_standard_input_and_file(
    model: list[str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPTS[1] + "\n"))
    assert _out(capsys, "generate", *GREEDY, *model) == expected[1] + "\n"
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    shown = _out(capsys, "generate", "--file", str(file), *GREEDY, *model)
    lines = shown.splitlines()
    assert [line for line in lines if line.startswith("=== ")] == [
        f"=== {number}: {prompt}" for number, prompt in enumerate(PROMPTS, 1)
    ]
    for text in expected:
        assert text in shown


def test_json_has_a_line_per_prompt(
    model: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _out(capsys, "generate", *PROMPTS, "--json", "--logprobs", "2", *GREEDY, *model)
    records = [json.loads(line) for line in shown.splitlines()]
    assert [record["prompt"] for record in records] == PROMPTS
    for record, text in zip(records, expected, strict=True):
        (answer,) = record["outputs"]
        assert answer["text"] == text
        assert answer["finish_reason"] == "length"
        assert len(answer["token_ids"]) == len(answer["logprobs"]) == 12
        for token, position in zip(answer["token_ids"], answer["logprobs"], strict=True):
            chosen = next(each for each in position if each["id"] == token)
            assert chosen["rank"] == 1
            assert chosen["logprob"] == max(each["logprob"] for each in position)
        assert 0 < record["ttft_s"] <= record["e2e_s"]


def test_json_pieces_of_several_answers_add_up(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--n", "2", "--seed", "5", "--max-tokens", "6", *model]
    shown = _out(capsys, "generate", "--stream", "--json", PROMPTS[0], *flags)
    pieces = [json.loads(line) for line in shown.splitlines()]
    whole = json.loads(_out(capsys, "generate", "--json", PROMPTS[0], *flags))
    assert [answer["index"] for answer in whole["outputs"]] == [0, 1]
    for answer in whole["outputs"]:
        mine = [piece for piece in pieces if piece["index"] == answer["index"]]
        assert "".join(piece["text"] for piece in mine) == answer["text"]
        assert [token for piece in mine for token in piece["token_ids"]] == answer["token_ids"]
        assert mine[-1]["finish_reason"] == answer["finish_reason"]


def test_flags_and_file_reach_the_request_and_the_engine(
    model: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stop = expected[0].split()[-1]
    shown = _out(capsys, "generate", PROMPTS[0], "--stop", stop, *GREEDY, *model)
    assert shown == expected[0].partition(stop)[0] + "\n"
    file = tmp_path / "engine.yaml"
    file.write_text("scheduler: {force_max_tokens: 3}")
    shown = _out(capsys, "generate", PROMPTS[0], "--config", str(file), "--json", *GREEDY, *model)
    assert len(json.loads(shown)["outputs"][0]["token_ids"]) == 3


def test_statistics_on_request(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *PROMPTS, "--stats", *GREEDY, *model]) == 0
    note = capsys.readouterr().err
    assert "3 prompts, 36 tokens" in note
    assert "tokens/s" in note


def test_what_cannot_be_served_is_one_line(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--max-model-len", "4"], ["--logit-bias", "10000000=1"]):
        assert main(["generate", "a b c d e f g h i j", *model, *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("pagedllm: error: ")
        assert captured.err.count("\n") == 1


def test_interrupting_is_quiet(real_model: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pagedllm.cli.main",
        "generate",
        "--stream",
        "Once upon a time",
    ]
    process = subprocess.Popen(
        [*command, "--max-tokens", "2000", "--ignore-eos", *real_model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is generating
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")


def test_a_reader_that_goes_away_stops_the_generation(real_model: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pagedllm.cli.main",
        "generate",
        "--stream",
        "Once upon a time",
    ]
    process = subprocess.Popen(
        [*command, "--max-tokens", "2000", "--ignore-eos", *real_model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


def _bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    shown = _out(capsys, "bench", *arguments)
    assert shown.count("\n") == 1
    return json.loads(shown)


def test_throughput_of_random_prompts(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--input-len", "9", "--output-len", "5", "--num-prompts", "4", "--warm-up", "1"]
    report = _bench(capsys, "throughput", *sizes, "--repeat", "2", "--page-size", "8", *model)
    assert (report["input_tokens"], report["output_tokens"]) == (36, 20)
    # Of two runs, one may take many times as long as the other; both are medians over the runs.
    walls = [20 / speed for speed in report["all_output_tok_s"]]
    assert report["wall_s"] == pytest.approx(sum(walls) / 2, rel=1e-3, abs=1e-4)
    assert report["output_tok_s"] == pytest.approx(sum(report["all_output_tok_s"]) / 2, rel=1e-3)
    assert report["total_tok_s"] == pytest.approx(56 / 20 * report["output_tok_s"], rel=1e-3)
    assert len(report["all_output_tok_s"]) == 2
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert report["ttft_ms"]["p99"] <= report["e2e_ms"]["p99"] <= 1000 * report["wall_s"] * 3
    assert report["settings"]["page_size"] == 8
    assert report["peak_rss_mib"] > 100
    again = _bench(capsys, "throughput", *sizes, *model)
    assert again["tokens_sha1"] == report["tokens_sha1"]  # the prompts follow from the seed
    other = _bench(capsys, "throughput", *sizes, "--seed", "1", *model)
    assert other["tokens_sha1"] != report["tokens_sha1"]


def test_latency_watches_every_token(
    real_model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--input-len", "6", "--output-len", "4", "--num-prompts", "2", "--warm-up", "0"]
    report = _bench(capsys, "latency", *sizes, *real_model)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert report["e2e_ms"]["p50"] >= report["ttft_ms"]["p50"] + 2 * report["itl_ms"]["p50"]
    assert report["decode_tok_s"] == pytest.approx(1000 / report["tpot_ms"]["p50"], rel=1e-2)


def test_workload_with_arrivals_gives_the_same_tokens_as_at_once(
    real_model: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    at_once = [
        {"prompt": [draw.randrange(40_000) for _ in range(draw.randint(3, 9))], "out": 3}
        for _ in range(4)
    ]
    in_turn = [request | {"at": 0.2 * index} for index, request in enumerate(at_once)]
    (tmp_path / "at_once.json").write_text(json.dumps(at_once))
    (tmp_path / "in_turn.json").write_text(json.dumps({"variants": [in_turn, at_once]}))
    precise = [*real_model, "--dtype", "float32"]
    started = time.perf_counter()
    first, second = (
        _bench(capsys, "throughput", "--workload", str(tmp_path / name), *precise)
        for name in ("at_once.json", "in_turn.json")
    )
    assert time.perf_counter() - started > 0.6
    assert second["wall_s"] >= 0.6  # the last one's arrival
    assert second["itl_ms"]["p50"] > 0
    assert first["tokens_sha1"] == second["tokens_sha1"], f"seed {seed}"
    assert first["output_tokens"] == second["output_tokens"] == 12


def test_bench_refuses_to_measure_less_than_asked(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--input-len", "6", "--output-len", "8", "--num-prompts", "1"]
    assert main(["bench", "latency", *sizes, "--force-max-tokens", "4", *model]) == 2
    assert "force_max_tokens" in capsys.readouterr().err
