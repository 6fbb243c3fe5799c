"""Norms, rotary positions, activations and projections of the native decoder, in torch.

Owner: models. Invariants: everything between two matrix products is fp32; only the inputs
and outputs of a product are rounded to the weights' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pagedllm_kernels.quantized import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedllm.models.spec import RopeSpec

# Rows of the output projection that are widened to fp32 at once: 8 MiB at hidden size 1024.
_HEAD_ROWS = 2048


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Scale float32 ``x`` [..., E] to a root mean square of 1, then by ``weight + offset`` [E].

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = weight.float()
    return scaled * (weight + offset if offset else weight)


def rope_table(rope: RopeSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines, float32 [T, 1, len(inv_freq)] each, of int64 positions [T]."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, None].float() * inv_freq
    return angles.cos() * rope.scale, angles.sin() * rope.scale


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn float32 ``x`` [T, heads, D] by a :func:`rope_table`; entries past it are kept.

    Su et al., "RoFormer", 2021, with halves paired instead of neighbours.
    """
    cos, sin = table
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of a :class:`DecoderSpec`'s ``activation``."""
    if name == "silu":
        return F.silu
    if name == "gelu":
        return F.gelu
    return lambda x: F.gelu(x, approximate="tanh")


Matrix = torch.Tensor | QuantizedWeight


def embed(ids: torch.Tensor, table: Matrix) -> torch.Tensor:
    """Return float32 [T, E], the rows of int64 [T]."""
    if isinstance(table, QuantizedWeight):
        return table.rows(ids)
    return F.embedding(ids, table).float()


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 ``x @ weight.T + bias``; ``x`` [..., in] is rounded to the weight's dtype.

    A quantised weight is not rounded to that dtype once more, but multiplied in float32.
    """
    x = x.to(weight.dtype)
    if isinstance(weight, QuantizedWeight):
        x, weight = x.float(), weight.dequantize(torch.float32)
    product = F.linear(x, weight).float()
    return product if bias is None else product + bias.float()


def head(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Return float32 logits [R, V] of float32 ``x`` [R, E], no step of it rounded.

    A logit rounded to bf16 has 8 bits: the two likeliest tokens are then often tied, and
    greedy decoding no longer follows fp32's. So the weights are widened, some rows at a time.
    """
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantize(torch.float32)
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    logits = x.new_empty((x.shape[0], weight.shape[0]))
    if x.shape[0] == 0:
        return logits
    for begin in range(0, weight.shape[0], _HEAD_ROWS):
        rows = weight[begin : begin + _HEAD_ROWS]
        torch.mm(x, rows.float().t(), out=logits[:, begin : begin + _HEAD_ROWS])
    return logits
