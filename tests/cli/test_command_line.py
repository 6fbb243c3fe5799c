"""The command without a model: start-up, help, errors and statuses, plugins' commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import pagedllm
from pagedllm._options import options_of
from pagedllm.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-m", "pagedllm.cli.main"]


def _run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "timeout": 120} | options
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, **options)


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """Run in this process; return the one line on standard error."""
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pagedllm: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_version_is_quick() -> None:
    took = []
    for _ in range(3):
        started = _processor_seconds()
        result = _run("--version")
        took.append(_processor_seconds() - started)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.strip() == f"pagedllm {pagedllm.__version__}"
    assert min(took) < 0.5


def _processor_seconds() -> float:
    """What this process's children have used: unlike the clock, no matter what else runs."""
    times = os.times()
    return times.children_user + times.children_system


def test_parsing_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pagedllm.cli.main import main; main(['generate', '--help']); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy', 'numba')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 0


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("generate", "chat", "bench", "plugins", "--version"):
        assert name in shown


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_help_has_a_flag_for_every_setting(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    classes = (
        [pagedllm.Config] if command == "bench" else [pagedllm.Config, pagedllm.SamplingParams]
    )
    for name in (name for cls in classes for name in options_of(cls)):
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no command", "--help"]),
        (["generte"], ["generte", "did you mean 'generate'"]),
        (["xyzzy"], ["xyzzy", "--help"]),
        (["generate", "--temprature", "1", "x"], ["--temprature", "--temperature"]),
        (["generate", "--temp=1", "x"], ["--temp"]),
        (["generate", "--temperature", "-1", "x"], ["temperature", "-1"]),
        (["generate", "--temperature", "hot", "x"], ["temperature", "'hot'"]),
        (["generate", "--top-p", "2", "x"], ["top_p", "2"]),
        (["generate", "--max-tokens", "0", "x"], ["max_tokens", "0"]),
        (["generate", "--logit-bias", "5", "x"], ["logit_bias"]),
        (["generate", "--stop", "", "x"], ["stop"]),
        (["generate", "--page-size", "0", "x"], ["page_size", "0"]),
        (["generate", "--dtype", "float8", "x"], ["dtype", "float8", "bfloat16"]),
        (["generate", "--max-num-seqs"], ["--max-num-seqs", "expected one argument"]),
        (["generate", "--stream", "--n", "2", "x"], ["--stream", "--n"]),
        (["generate", "a", "--n", "1", "b"], ["'b'"]),
        (["generate", "a", "--file", "b"], ["--file"]),
        (["generate", "--file", "/does/not/exist"], ["/does/not/exist"]),
        (["generate", "--config", "/does/not/exist.yaml", "x"], ["/does/not/exist.yaml"]),
        (["generate", "--model", "./does/not/exist", "x"], ["./does/not/exist"]),
        (["generate", "--model", "smolm2", "x"], ["smolm2", "smollm2"]),
        (["chat", "--n", "2"], ["--n"]),
        (["bench"], ["mode"]),
        (["bench", "speed"], ["speed", "throughput", "latency"]),
        (["bench", "latency", "--input-len", "0"], ["--input-len", "at least 1"]),
        (["bench", "latency", "--output-len", "x"], ["--output-len", "x"]),
        (["bench", "latency", "--workload", "/does/not/exist"], ["/does/not/exist"]),
        (["plugins", "lst"], ["lst", "list"]),
    ],
)
def test_what_the_user_did_wrong_is_one_line_and_status_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = _fails(capsys, *arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not a workload"]),
        ("[]", ["no requests"]),
        ('{"variants": []}', ["no requests"]),
        ('{"variants": [[]]}', ["no requests"]),
        ('[{"prompt": [1]}]', ["out"]),
        ('[{"prompt": "text", "out": 1}]', ["not a workload"]),
        ('{"requests": []}', ["variants"]),
        ("3", ["not a workload"]),
        ('[{"prompt": [], "out": 1}]', ["not a workload"]),
        ('[{"prompt": [1], "out": 0}]', ["not a workload"]),
        ('[{"prompt": [1], "out": 1, "at": -1}]', ["not a workload"]),
    ],
)
def test_workloads_that_are_none(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    line = _fails(capsys, "bench", "throughput", "--workload", str(file))
    for word in ["load.json", *words]:
        assert word in line


def test_more_repetitions_than_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"variants": [[{"prompt": [1], "out": 1}]] * 3}))
    line = _fails(
        capsys, "bench", "latency", "--workload", str(file), "--variant", "1", "--repeat", "2"
    )
    assert "2 to measure" in line


def test_no_prompt_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "gap.txt").write_text("one\n\nthree\n")
    (tmp_path / "empty.txt").write_text("")
    assert "line 2 is empty" in _fails(capsys, "generate", "--file", str(tmp_path / "gap.txt"))
    assert "no prompts" in _fails(capsys, "generate", "--file", str(tmp_path / "empty.txt"))


def test_debug_shows_the_traceback_and_only_then() -> None:
    plain = _run("generate", "--top-p", "2", "x")
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    debug = _run("generate", "--top-p", "2", "x", "--debug")
    assert debug.returncode == 2
    assert debug.stderr.endswith(plain.stderr)
    assert "Traceback" in debug.stderr
    assert "ValidationError" in debug.stderr


def test_plugins_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out
    assert main(["plugins", "list", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["name"] for record in records} >= {"local", "hf"}
    for record in records:
        assert record["name"] in table
        assert record["version"] in table


PLUGIN = """
import sys
from pagedllm import ConfigError, hookimpl

@hookimpl
def pagedllm_cli_commands():
    return {"greet": "greeting:greet", "fail": "greeting:fail", "crash": "greeting:crash"}

def greet(arguments):
    print("hello", *arguments)
    return 7 if arguments else None

def fail(arguments):
    raise ConfigError("threads: wrong")

def crash(arguments):
    raise KeyError("over\\nboard")
"""


@pytest.fixture
def with_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a plugin, on the path of the processes that a test starts."""
    (tmp_path / "greeting.py").write_text(PLUGIN)
    info = tmp_path / "greeting-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[pagedllm]\ngreeting = greeting\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("with_plugin")
def test_plugins_add_commands() -> None:
    assert "greet" in _run("--help").stdout
    assert _run("greet").returncode == 0
    result = _run("greet", "--loud", "you", "--help")
    assert (result.returncode, result.stdout) == (7, "hello --loud you --help\n")
    assert "did you mean 'greet'" in _run("gret").stderr
    listed = {each["name"]: each for each in json.loads(_run("plugins", "--json").stdout)}
    assert listed["greeting"]["version"] == "1.2"


@pytest.mark.usefixtures("with_plugin")
def test_errors_of_a_command_are_one_line_with_the_right_status() -> None:
    wrong = _run("fail")
    assert (wrong.returncode, wrong.stderr) == (2, "pagedllm: error: threads: wrong\n")
    broken = _run("crash")
    assert broken.returncode == 1
    assert broken.stderr.count("\n") == 1
    assert "KeyError" in broken.stderr
    assert "--debug" in broken.stderr
    assert "Traceback" in _run("crash", "--debug").stderr


@pytest.mark.parametrize("argument", ["plugins", "--version"])
def test_a_reader_that_goes_away_is_no_error(argument: str) -> None:
    # Buffered, as a shell has it: only then does the error come as late as it can.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*COMMAND, argument], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert errors == b""
    assert process.returncode == 141
