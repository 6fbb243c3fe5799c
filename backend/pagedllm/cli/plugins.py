"""``pagedllm plugins``: what is installed, what it adds and what is wrong with it.

Owner: the command line.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("action", nargs="?", choices=["list"], default="list", help="list them")
    parser.add_argument("--json", action="store_true", help="a JSON array")


def run(options: argparse.Namespace) -> int:
    """Print the plugins and return the exit status."""
    from pagedllm.plugins import list_plugins

    records = list_plugins()
    if options.json:
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
