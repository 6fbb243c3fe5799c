"""Mixtures of experts in the native tier: their weights, and their product in torch.

Owner: models. Invariant: the router's product is fp32, so that rounding moves no token to
another expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pagedllm.errors import UnsupportedModelError
from pagedllm.models.layers import linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedllm.models.spec import DecoderSpec, ExpertSpec
    from pagedllm.models.weights import LayerWeights, Reader


def read(spec: DecoderSpec, prefix: str, reader: Reader) -> dict[str, Any]:
    """Read a layer's router and its experts, under either of the names that they have.

    Raises:
        UnsupportedModelError: a tensor is missing or has another shape.
    """
    if spec.experts is None:
        raise UnsupportedModelError(f"{prefix} is sparse and no experts are described")
    num, inner, width = spec.experts.num, spec.experts.intermediate_size, spec.hidden_size
    block = prefix + "mlp."
    names = ("gate_proj", "up_proj", "down_proj")
    if reader.has(prefix + "block_sparse_moe.gate.weight"):  # Mixtral as published
        block, names = prefix + "block_sparse_moe.", ("w1", "w3", "w2")
    router = reader.one(block + "gate.weight", num, width)
    if reader.has(block + "experts.gate_up_proj"):
        gate_up = reader.one(block + "experts.gate_up_proj", num, 2 * inner, width)
        down = reader.one(block + "experts.down_proj", num, width, inner)
    else:
        gate, up, out = (
            [f"{block}experts.{n}.{name}.weight" for n in range(num)] for name in names
        )
        gate_up = reader.stacked(list(zip(gate, up)), num, 2 * inner, width)
        down = reader.stacked([[name] for name in out], num, width, inner)
    return {"router": router, "gate_up": gate_up, "down": down}


def run(
    x: torch.Tensor,
    router: torch.Tensor,
    layer: LayerWeights,
    spec: ExpertSpec,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run each token through its ``top_k`` experts (Shazeer et al., 2017).

    Args:
        x: float32 [T, E].
        router: [N, E].
        layer: has gate_up [N, 2 * I, E], gate first, and down [N, E, I].
        spec: how many experts, and how their shares are weighted.
        act: of the gate.

    Returns:
        float32 [T, E].
    """
    weights = torch.softmax(F.linear(x, router.float()), dim=-1)
    weights, chosen = torch.topk(weights, spec.top_k, dim=-1)
    if spec.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    output = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        gate, up = linear(x[token], layer.gate_up[expert]).chunk(2, dim=-1)
        result = linear(act(gate) * up, layer.down[expert])
        output.index_add_(0, token, result * weights[token, place, None])
    return output
