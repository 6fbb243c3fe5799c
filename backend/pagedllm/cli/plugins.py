"""``pagedllm plugins``: what is installed and what is wrong with it; the skeleton of a new one.

Owner: the command line. Invariant: ``new`` writes a whole folder or nothing.
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import re
import shutil
import string
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from pagedllm._options import options_of
from pagedllm.cli.common import UsageError
from pagedllm.config import Config

if TYPE_CHECKING:
    import argparse

RULES = ("plugins_allow", "plugins_block")
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    "src/$module/__init__.py": "__init__.py.in",
    "src/$module/plugin.py": "plugin.py.in",
    "src/$module/fetch.py": "fetch.py.in",
    "tests/test_$module.py": "test.py.in",
}
"""A new plugin's files, and their templates in the folder ``skeleton``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "action", nargs="?", choices=["list", "new"], default="list",
        help="list what is installed (the default), or write a new plugin's files",
    )  # fmt: skip
    parser.add_argument("name", nargs="?", help="of the new plugin, such as acme-models")
    parser.add_argument("--directory", metavar="DIR", help="where the new one's folder goes")
    parser.add_argument("--json", action="store_true", help="list as a JSON array")
    others = tuple(name for name in options_of(Config) if name not in RULES)
    Config.add_cli_arguments(parser, exclude=others)


def run(options: argparse.Namespace) -> int:
    """List the plugins, or write a new one; return the exit status."""
    if options.action == "new":
        if options.json:
            raise UsageError("--json is for the list; leave it out")
        if options.name is None:
            raise UsageError("the new plugin needs a name: pagedllm plugins new acme-models")
        return _new(options.name, Path(options.directory or "."))
    for given, flag in ((options.name, "a name"), (options.directory, "--directory")):
        if given is not None:
            raise UsageError(f"{flag} is for 'plugins new'; leave out '{given}'")
    return _list(Config.from_cli(options), as_json=options.json)


def _list(config: Config, *, as_json: bool) -> int:
    from pagedllm.plugins import list_plugins

    records = list_plugins(config)
    if as_json:
        print(json.dumps([dataclasses.asdict(record) for record in records], indent=2))
        return 0
    rows = [("NAME", "DISTRIBUTION", "VERSION", "STATUS", "HOOKS")]
    for record in records:
        hooks = ", ".join(hook.removeprefix("pagedllm_") for hook in record.hooks)
        rows.append((record.name, record.distribution, record.version, record.status, hooks))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    for record in records:
        if record.error is not None:
            print(f"{record.name}: {record.error}")
    return 0


def _new(name: str, directory: Path) -> int:
    from pagedllm import __version__
    from pagedllm.hookspecs import API_VERSION
    from pagedllm.plugins import list_plugins

    module = _module_of(name)
    if name in {each for r in list_plugins() for each in (r.name, r.distribution)}:
        raise UsageError(f"a plugin named '{name}' is installed; give the new one another name")
    folder = directory / name
    if folder.exists():
        raise UsageError(f"{folder} exists; give another name or another --directory")
    values = {
        "name": name,
        "module": module,
        "model": f"{name}-model",
        "version": __version__,
        "api": str(API_VERSION),
    }
    templates = resources.files("pagedllm.cli") / "skeleton"
    try:
        for path, template in FILES.items():
            target = folder / string.Template(path).substitute(values)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = string.Template((templates / template).read_text("utf-8")).substitute(values)
            target.write_text(text, "utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"cannot write {folder}: {error.strerror}") from error
    print(f"Wrote {folder}. Now:\n  cd {folder}\n  pip install -e '.[test]'\n  pytest")
    return 0


def _module_of(name: str) -> str:
    """Return the package for a distribution's name. Raises UsageError for what is no name."""
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(
            f"'{name}' is no name for a plugin: take lower-case letters, digits and single "
            "hyphens, with a letter first, such as acme-models"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise UsageError(f"'{name}' is Python's own name; take another, such as {name}-models")
    if module in ("pagedllm", "torch", "transformers", "tests"):
        raise UsageError(f"'{name}' would hide another package; take another, such as acme-models")
    return module
