"""Registers ``pagedllm serve``, as any plugin registers a command.

Owner: the server integration. Invariant: importing this module loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedllm.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGEDLLM_API_VERSION = 1


@hookimpl
def pagedllm_cli_commands() -> Mapping[str, str]:
    """``pagedllm serve``."""
    return {"serve": "pagedllm_server.cli:main"}
