"""Quantises a model's matrices one by one while they are loaded.

Owner: models. Invariants: norms, biases, routers and what ``quantization_skip`` names keep
the model's dtype; a pattern that names nothing is an error. With ``int4`` the embedding and
the output projection are kept in 8 bits: they cost the most in 4 and are read the least.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pagedllm.errors import ConfigError
from pagedllm_kernels.quantized import QuantizedWeight, quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from pagedllm.models.weights import TensorSource

METHODS = {"int8": 8, "int4": 4}
_ENDS = ("embed_tokens", "lm_head")
_ROUTERS = (".gate", ".router", "_expert_gate")


class Quantizer:
    """Turns matrices [out, in] into :class:`QuantizedWeight`, or what a plugin makes of them.

    Args:
        method: ``int8``, ``int4``, or a plugin's name for ``custom``.
        skip: patterns of modules, such as ``lm_head``, ``down_proj`` or ``layers.0.*``.
        custom: takes a matrix and returns one of its shape, or a pair to be multiplied.
    """

    def __init__(
        self,
        method: str,
        skip: Sequence[str] = (),
        custom: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self._method, self._skip, self.custom = method, tuple(skip), custom
        self._unused = set(skip)

    def __call__(self, names: Sequence[str], weight: torch.Tensor) -> Any:
        """Quantise the matrix, or stack of matrices, that these modules' weights were merged to.

        A pattern that names one of them keeps all.
        """
        matches = [p for p in self._skip for n in names if fnmatchcase(f".{n}", f"*.{p}")]
        self._unused.difference_update(matches)
        if matches:
            return weight
        if self.custom is not None:
            stacked = weight.dim() == 3
            made = [self._own(matrix) for matrix in (weight if stacked else [weight])]
            return torch.stack(made) if stacked else made[0]
        ends = any(name.endswith(_ENDS) for name in names)
        return quantize(weight, 8 if ends else METHODS[self._method])

    def finish(self) -> None:
        """Raise ConfigError if a pattern has named nothing."""
        if self._unused:
            raise ConfigError(
                f"quantization_skip: {min(self._unused)!r} names no matrix of this model; give "
                "the names of its modules, such as lm_head, down_proj or layers.0.*",
                "quantization_skip",
            )

    def _own(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what a plugin's numbers stand for."""
        given: Any = weight if self.custom is None else self.custom(weight)
        values, scales = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
        try:
            made: torch.Tensor = values.to(torch.float32) * scales
        except (AttributeError, TypeError, RuntimeError) as error:
            raise self._refusal(f"{type(given).__name__} ({error})") from error
        if made.shape != weight.shape or not bool(torch.isfinite(made).all()):
            raise self._refusal(f"a tensor of shape {tuple(made.shape)}, or not finite")
        return made.to(weight.dtype)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"quantization: '{self._method}' returned {what}; it has to return a tensor of the "
            "weight's shape, or one and its scales",
            "quantization",
        )


class QuantizingSource:
    """A :class:`~pagedllm.models.weights.TensorSource` that quantises what it reads."""

    def __init__(self, source: TensorSource, quantizer: Quantizer) -> None:
        self._source, self._quantizer = source, quantizer
        self.names = source.names

    def read(self, parts: Sequence[str]) -> Any:
        """Return tensors one below the other; see :class:`TensorSource`."""
        return self._quantized(parts, self._source.read(parts))

    def stack(self, rows: Sequence[Sequence[str]]) -> Any:
        """Return rows of merged tensors; see :class:`TensorSource`."""
        return self._quantized([name for row in rows for name in row], self._source.stack(rows))

    def _quantized(self, parts: Sequence[str], tensor: torch.Tensor) -> Any:
        names = [part.removesuffix(".weight") for part in parts]
        if tensor.dim() < 2 or names[0].endswith((".mlp.gate", "block_sparse_moe.gate")):
            return tensor
        if names[0].endswith("embed_tokens") and "lm_head.weight" not in self.names:
            names.append("lm_head")  # tied: one matrix under two names
        return self._quantizer(names, tensor)


class QuantizedLinear(torch.nn.Module):
    """Stands in for a module that multiplies by a matrix, which it widens at every call."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``."""
        return F.linear(x, self.weight.dequantize(x.dtype), self.bias)


def quantize_modules(model: PreTrainedModel, quantizer: Quantizer) -> None:
    """Quantise the linear layers of a transformers model in place, but for a tied head.

    Raises:
        ConfigError: weights of experts are stacked in parameters of their own, which would
            stay as they are.
    """
    from transformers.pytorch_utils import Conv1D

    stacked = [name for name, each in model.named_parameters() if each.dim() > 2]
    if stacked and quantizer.custom is None:
        raise ConfigError(
            f"quantization: {type(model).__name__} keeps experts in {stacked[0]}, which the "
            "generic tier does not quantise; leave quantization out",
            "quantization",
        )
    tied = model.get_input_embeddings().weight
    for name, module in list(model.named_modules()):
        if not isinstance(module, (torch.nn.Linear, Conv1D)) or module.weight is tied:
            continue
        if name.endswith(_ROUTERS):
            continue
        turned = isinstance(module, Conv1D)  # GPT-2 keeps [in, out]
        weight = module.weight.detach()
        made = quantizer([name], weight.T if turned else weight)
        if isinstance(made, QuantizedWeight):
            model.set_submodule(name, QuantizedLinear(made, module.bias))
        else:
            module.weight.data = made.T if turned else made
