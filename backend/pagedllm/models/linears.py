"""The generic tier's linear layers under compiled products, where those are faster.

Owner: models. Invariants: a layer keeps its parameters, which may be another model's too and
are read where they lie at every call; whatever a product does not cover, torch computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pagedllm_kernels.numba_cpu.products import Products
    from pagedllm_kernels.types import AttentionBackend


class CompiledLinear(torch.nn.Linear):
    """Stands in for a linear layer; for inference alone."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        products: Products,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)
        self._products = products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, a sum in fp32 that is rounded once."""
        weight, bias = self.weight, self.bias
        rows = x.reshape(-1, x.shape[-1])
        if x.dtype != weight.dtype or not self._products.covers(weight, rows=len(rows)):
            return F.linear(x, weight, bias)
        product = self._products(rows, weight)
        if bias is not None:
            product += bias
        return product.to(x.dtype).view(*x.shape[:-1], len(weight))


def compile_linears(model: PreTrainedModel, attention: AttentionBackend, *, own: bool) -> None:
    """Put compiled products into a model's tree of modules.

    Args:
        model: on the CPU.
        attention: whose threads are used; nothing is done unless it is compiled too.
        own: whether nobody else has the model's parameters. GPT-2's matrices, which are kept
            the other way round, are turned then, and left to torch otherwise.
    """
    if attention.name != "numba":
        return
    from transformers.pytorch_utils import Conv1D

    from pagedllm_kernels.numba_cpu.products import Products

    products = Products(attention.team, model.dtype)  # type: ignore[attr-defined]
    module: Any
    for name, module in list(model.named_modules()):
        if type(module) is Conv1D and own:
            weight: Any = torch.nn.Parameter(module.weight.data.T.contiguous(), requires_grad=False)
        elif type(module) is torch.nn.Linear:
            weight = module.weight
        else:
            continue
        if products.covers(weight):
            model.set_submodule(name, CompiledLinear(weight, module.bias, products))
