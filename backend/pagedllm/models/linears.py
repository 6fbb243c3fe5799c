"""The generic tier's linear layers under compiled products, where those are faster.

Owner: models. Invariants: a layer keeps its parameters and hooks, which may be another model's
too, and reads them at every call; whatever a product does not cover, torch computes.
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
    """Stands in for a linear layer, for inference alone, and has all that the layer has."""

    _products: Products

    @classmethod
    def of(cls, module: torch.nn.Module, products: Products) -> CompiledLinear:
        """Return one for a layer: what is put into or hooked onto either is the other's, too."""
        made = cls.__new__(cls)
        vars(made).update(vars(module), _products=products)
        return made

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
            weight = module.weight.data.T.contiguous()
        elif type(module) is torch.nn.Linear:
            weight = module.weight
        else:
            continue
        if products.covers(weight):
            if weight is not module.weight:
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
            model.set_submodule(name, CompiledLinear.of(module, products))
