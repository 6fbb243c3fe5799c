"""Tells whether a model is still the one that an engine was made of.

Owner: the generate drop-in. Invariants: a change of any weight, module, hook, setting, dtype
or device changes the fingerprint. Two looks: the cheap one (:func:`shape_of`) sees whatever
goes through torch's version counters, replaces a tensor or touches the module tree; the
thorough one (:func:`contents_of`) reads the weights too, since writes through ``.data`` leave
no trace in any counter. On CPUs it takes as long as one or two decoding steps of one sequence.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

_PLAIN = (int, float, bool, str, type(None))
_WORDS = 256
"""Words summed up before their place counts: a checksum of sums finds rows that moved."""


def fingerprint(model: PreTrainedModel, *, contents: bool) -> tuple[Any, ...]:
    """Return what two looks at a model must agree on.

    Args:
        model: the caller's.
        contents: also read the weights.
    """
    return shape_of(model), contents_of(model) if contents else None


def shape_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Modules, hooks and settings, and per tensor its memory, layout and version."""
    modules: list[Any] = []
    for module in model.modules():
        held = vars(module)
        settings = tuple(item for item in held.items() if isinstance(item[1], _PLAIN))
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in held)
        modules.append((id(module), type(module), hooks, settings))
    tensors = tuple(
        (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, _version(t))
        for t in _tensors(model)
    )
    return tuple(modules), tensors, repr(model.config.to_dict())


def contents_of(model: PreTrainedModel) -> tuple[int, ...]:
    """A checksum of the bytes of every parameter and buffer, and of what shares their memory."""
    import torch

    # Merged projections are views of one memory: read whole, it takes fewer calls.
    memories = {
        (tensor.device, memory.data_ptr()): memory
        for tensor in _tensors(model)
        if tensor.device.type != "meta" and (memory := tensor.untyped_storage()).nbytes()
    }
    with torch.inference_mode():
        sums = [
            _checksum(torch.empty(0, dtype=torch.uint8, device=device).set_(memory))
            for (device, _), memory in memories.items()
        ]
        return tuple(torch.stack([s.to(sums[0].device) for s in sums]).tolist()) if sums else ()


def _tensors(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode: it has no counter
        return -1


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    """int64 [], of uint8 [N] as 64-bit words, modulo 2**64."""
    import torch

    whole = len(flat) - len(flat) % (8 * _WORDS)
    sums = flat[whole:].long()
    if whole:
        sums = torch.cat([sums, flat[:whole].view(torch.int64).view(-1, _WORDS).sum(dim=1)])
    return (sums * _odd_numbers(len(sums), flat.device)).sum()


@functools.lru_cache(maxsize=64)
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.arange(1, 2 * count + 1, 2, device=device)
