"""Picks an implementation of paged attention by device, dtype and name.

Owner: pagedllm_kernels. Invariants: nothing is imported before it is picked; every choice
is logged with its reason; a name that the caller gave is used or refused, never replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from pagedllm_kernels.types import AttentionBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where an implementation is and what it can run."""

    name: str
    factory: str
    """``module:class``, called without arguments."""
    devices: frozenset[str]
    """Types of torch devices; empty means any."""
    dtypes: frozenset[str]
    """Names of torch dtypes, without the ``torch.``."""
    requires: tuple[str, ...] = ()
    """Top-level modules that must be importable."""

    def refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this implementation cannot run here, or None when it can."""
        if self.devices and device.type not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))}, not on {device.type}"
        if _name(dtype) not in self.dtypes:
            return f"it computes in {', '.join(sorted(self.dtypes))}, not in {_name(dtype)}"
        for module in self.requires:
            if importlib.util.find_spec(module) is None:
                return f"it needs the package {module}, which is not installed"
        return None


_FLOATS = frozenset({"float32", "bfloat16", "float16"})

# The fastest first: the first that can run is taken when the caller names none.
_ENTRIES: tuple[_Entry, ...] = (
    _Entry(
        "numba",
        "pagedllm_kernels.numba_cpu.attention:NumbaAttention",
        frozenset({"cpu"}),
        _FLOATS,
        ("numba",),
    ),
    _Entry("reference", "pagedllm_kernels.reference:ReferenceAttention", frozenset(), _FLOATS),
)


def attention_backends() -> tuple[str, ...]:
    """Names that :func:`select_attention` knows, the fastest first."""
    return tuple(entry.name for entry in _ENTRIES)


def select_attention(
    device: torch.device | str, dtype: torch.dtype, prefer: str | None = None
) -> AttentionBackend:
    """Return an implementation of paged attention for a device.

    Args:
        device: where the cache and the queries will be.
        dtype: of the queries.
        prefer: a name from :func:`attention_backends`; None or ``auto`` takes the fastest
            that runs here.

    Raises:
        ValueError: no implementation has that name, or it cannot run here.
    """
    import torch

    device = torch.device(device)
    if prefer in (None, "auto"):
        passed: list[str] = []
        for entry in _ENTRIES:
            reason = entry.refusal(device, dtype)
            if reason is None:
                why = f" ({'; '.join(passed)})" if passed else ""
                logger.info("attention: %s on %s in %s%s", entry.name, device, _name(dtype), why)
                return _load(entry)
            passed.append(f"not {entry.name}: {reason}")
        raise ValueError(f"no attention implementation runs on {device}: {'; '.join(passed)}")
    for entry in _ENTRIES:
        if entry.name == prefer:
            reason = entry.refusal(device, dtype)
            if reason is not None:
                raise ValueError(f"attention {prefer!r} cannot be used: {reason}")
            logger.info("attention: %s on %s, as asked", entry.name, device)
            return _load(entry)
    raise ValueError(
        f"no attention implementation is named {prefer!r}; valid names: auto, "
        f"{', '.join(attention_backends())}"
    )


def _load(entry: _Entry) -> AttentionBackend:
    module, _, attribute = entry.factory.partition(":")
    return cast("AttentionBackend", getattr(importlib.import_module(module), attribute)())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
