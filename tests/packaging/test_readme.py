"""The README's Python runs as it stands, its commands parse, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^(pagedllm .*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs_as_a_script(number, smollm2_path, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[number])
    run = preloaded.run([script], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout.strip()
    if "capital of France" in SNIPPETS[number]:
        assert "Paris" in run.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_the_flags_that_it_is_shown_with(command):
    words = re.sub(r'"[^"]*"', "", command).split()
    positional = [word for word in words[1:3] if not word.startswith("-")]
    run = subprocess.run(
        [sys.executable, "-m", "pagedllm.cli.main", *positional, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for flag in (word for word in words if word.startswith("--")):
        assert flag in run.stdout, f"{command}: no {flag}"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/plugins.md"]
)
def test_links_within_the_repository_lead_somewhere(page):
    path = ROOT / page
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert missing == []
