"""``pagedllm plugins``: the list under the rules of a config, and the skeleton of a new plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pagedllm
from pagedllm.cli.main import main
from plugin_site import installed

GOOD = """
    from pagedllm import hookimpl

    @hookimpl
    def pagedllm_cli_commands():
        return {"greet": "good:main"}
"""


def listed(capsys, *flags):
    assert main(["plugins", "list", "--json", *flags]) == 0
    return {record["name"]: record for record in json.loads(capsys.readouterr().out)}


@pytest.fixture
def site(tmp_path):
    broken = "raise RuntimeError('out of order')"
    (tmp_path / "site").mkdir()
    with installed(tmp_path / "site", good=GOOD, broken=broken):
        yield tmp_path


def test_the_list_has_name_version_hooks_status_and_error(site, capsys):
    found = listed(capsys)
    assert found["good"] == {
        "name": "good",
        "distribution": "good",
        "version": "1.2.3",
        "hooks": ["pagedllm_cli_commands"],
        "status": "loaded",
        "error": None,
    }
    assert found["broken"]["status"] == "failed"
    assert "out of order" in found["broken"]["error"]
    assert found["smollm2"]["status"] == "loaded"
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out
    assert "NAME" in table.splitlines()[0]
    assert "cli_commands" in table
    assert "broken: it cannot be imported: RuntimeError: out of order" in table


def test_allow_and_block_by_flags_and_by_file(site, capsys):
    assert listed(capsys, "--plugins-block", "good,broken")["good"]["status"] == "blocked"
    only = listed(capsys, "--plugins-allow", "good")
    assert (only["good"]["status"], only["smollm2"]["status"]) == ("loaded", "blocked")
    assert only["hf"]["status"] == "loaded"
    file = site / "settings.yaml"
    file.write_text("model: {plugins_block: [broken]}\n")
    by_file = listed(capsys, "--config", str(file))
    assert (by_file["broken"]["status"], by_file["broken"]["error"]) == ("blocked", None)
    assert main(["plugins", "--plugins-allow", "good", "--plugins-block", "good"]) == 2
    assert "plugins_block: 'good' is in plugins_allow too" in capsys.readouterr().err


def test_a_broken_plugin_stops_no_command(site, capfd):
    greet = "def main(arguments):\n    print('Hello', *arguments)\n    return 7\n"
    with (site / "site" / "good.py").open("a") as file:
        file.write(greet)
    run = subprocess.run(
        [sys.executable, "-m", "pagedllm.cli.main", "greet", "you"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (7, "Hello you\n")
    assert "broken 1.2.3" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.fixture(scope="module")
def new_plugin(tmp_path_factory):
    """A new plugin's folder, and the path under which pip has installed it."""
    where = tmp_path_factory.mktemp("new")
    assert main(["plugins", "new", "acme-models", "--directory", str(where)]) == 0
    folder, target = where / "acme-models", where / "target"
    pip = ["pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    to = ["--no-build-isolation", "--target", target]
    subprocess.run([sys.executable, "-m", *pip, *to, folder], check=True)
    return folder, os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])


@pytest.mark.slow
def test_a_new_plugin_passes_its_tests_at_once(new_plugin):
    folder, paths = new_plugin
    environment = {**os.environ, "PYTHONPATH": paths}

    def run(*command):
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    tests = run("pytest", "-q", "-p", "no:cacheprovider")
    assert tests.returncode == 0, tests.stdout
    assert "10 passed" in tests.stdout
    records = json.loads(run("pagedllm.cli.main", "plugins", "list", "--json").stdout)
    [record] = [record for record in records if record["name"] == "acme-models"]
    assert record == {
        "name": "acme-models",
        "distribution": "acme-models",
        "version": "0.1.0",
        "hooks": ["pagedllm_model_names", "pagedllm_resolve_model"],
        "status": "loaded",
        "error": None,
    }
    wrong = run("pagedllm.cli.main", "generate", "--model", "acme-modells", "Hi")
    assert (wrong.returncode, "Did you mean 'acme-models-model'" in wrong.stderr) == (2, True)
    lint = run("ruff", "check", "--isolated", "--line-length", "100", ".")
    assert lint.returncode == 0 or "No module named ruff" in lint.stderr, lint.stdout


EXAMPLE = Path(__file__).parents[2] / "examples" / "provider_plugin"


def test_the_example_is_the_skeleton(tmp_path, capsys):
    assert main(["plugins", "new", "acme-models", "--directory", str(tmp_path)]) == 0
    assert "pip install -e '.[test]'" in capsys.readouterr().out
    written = [path for path in (tmp_path / "acme-models").rglob("*") if path.is_file()]
    assert len(written) == 6
    for path in written:
        name = path.relative_to(tmp_path / "acme-models")
        assert (EXAMPLE / name).read_text() == path.read_text(), f"{name}: write the example again"


@pytest.mark.slow
def test_the_example_runs(new_plugin, tmp_path):
    caches = [Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")), tmp_path / "cache"]
    run = subprocess.run(
        [sys.executable, EXAMPLE / "demo.py"],
        env={
            **os.environ,
            "PYTHONPATH": new_plugin[1],  # the example is the new plugin, and a demonstration
            "XDG_CACHE_HOME": str(caches[1]),
            "NUMBA_CACHE_DIR": str(caches[0]),  # kernels need not be compiled for its own cache
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "plugin: acme-models 0.1.0 loaded" in run.stdout
    assert f"folder: {tmp_path / 'cache' / 'acme-models' / '1'} revision: 1" in run.stdout
    assert "tokens of noise: [" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new"], ["needs a name", "acme-models"]),
        (["new", "Acme"], ["'Acme' is no name", "lower-case"]),
        (["new", "acme_models"], ["no name"]),
        (["new", "2fast"], ["no name", "letter first"]),
        (["new", "../acme"], ["no name"]),
        (["new", ""], ["no name"]),
        (["new", "json"], ["'json' is Python's own", "json-models"]),
        (["new", "class"], ["Python's own"]),
        (["new", "torch"], ["hide another package"]),
        (["new", "smollm2"], ["'smollm2' is installed"]),
        (["new", "there"], ["there exists"]),
        (["new", "acme", "--json"], ["--json"]),
        (["new", "acme", "--directory", "file"], ["cannot write file/acme", "Not a directory"]),
        (["list", "acme"], ["a name is for 'plugins new'", "'acme'"]),
        (["list", "--directory", "x"], ["--directory is for 'plugins new'"]),
        (["nwe", "acme"], ["nwe", "new"]),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    arguments, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["plugins", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_the_skeletons_templates_are_in_the_package():
    from importlib import resources

    from pagedllm.cli.plugins import FILES

    folder = resources.files("pagedllm.cli") / "skeleton"
    assert {file.name for file in folder.iterdir()} == set(FILES.values())
    assert pagedllm.__version__
