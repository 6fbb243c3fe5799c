"""Conformance suites for plugins: subclass one in a test file, and pytest runs its checks.

Owner: plugins; public. Invariants: each check is behaviour whose lack would break users, and
says so when it fails; nothing here needs a network connection or a GPU. The suites need
pytest; :func:`tiny_model` does not::

    from pagedllm.testing import ModelProviderSuite


    class TestOurModels(ModelProviderSuite):
        plugin = "our-models"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedllm.testing.executors import ExecutorSuite
    from pagedllm.testing.models import tiny_model
    from pagedllm.testing.processors import LogitsProcessorSuite
    from pagedllm.testing.providers import ModelProviderSuite
    from pagedllm.testing.response_caches import KVStoreSuite, ResponseCacheSuite

__all__ = [
    "ExecutorSuite",
    "KVStoreSuite",
    "LogitsProcessorSuite",
    "ModelProviderSuite",
    "ResponseCacheSuite",
    "tiny_model",
]

_HOME = {
    "ExecutorSuite": "executors",
    "KVStoreSuite": "response_caches",
    "LogitsProcessorSuite": "processors",
    "ModelProviderSuite": "providers",
    "ResponseCacheSuite": "response_caches",
    "tiny_model": "models",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
