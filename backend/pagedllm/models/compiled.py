"""The native tier on CPU cores: a :class:`NativeModel`'s weights under compiled kernels.

Owner: models. Invariants: it computes what :class:`NativeModel` computes, from the same
weights, which are not copied; both write the same pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedllm.models.decoder import NativeModel
from pagedllm.models.layers import rms_norm
from pagedllm.models.limits import check_length
from pagedllm_kernels.numba_cpu.attention import NumbaAttention
from pagedllm_kernels.numba_cpu.decoder import CompiledDecoder, refusal
from pagedllm_kernels.quantized import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.models.base import DeviceBatch
    from pagedllm_kernels.types import LayerCache


class CompiledModel(NativeModel):
    """A :class:`~pagedllm.models.base.PagedModel` that runs a step as one compiled function.

    Args:
        model: a native model on the CPU whose attention is :class:`NumbaAttention`.

    Raises:
        ValueError: :func:`why_not` has a reason.
    """

    def __init__(self, model: NativeModel) -> None:
        reason = why_not(model)
        if reason is not None:
            raise ValueError(f"{model.architecture} cannot be compiled: {reason}")
        super().__init__(model.spec, model.weights, model.attention, model.eos_token_ids)
        self._decoder: CompiledDecoder | None = None
        self._pages = (0, False)

    @torch.inference_mode()
    def forward(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step; see :class:`~pagedllm.models.base.PagedModel`."""
        return self._run(batch, batch.logit_indices, cache)[0]

    @torch.inference_mode()
    def states(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step; see :class:`~pagedllm.models.base.PagedModel`."""
        x = self._run(batch, batch.logit_indices[:0], cache)[1]
        return rms_norm(x, self.weights.norm, self.spec.norm_eps, self.spec.norm_offset)

    def _run(
        self, batch: DeviceBatch, logit_indices: torch.Tensor, cache: Sequence[LayerCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_length(batch, self.spec.max_positions)
        pages = (batch.attention.page_size, cache[0].key.dtype == torch.int8)
        if self._decoder is None or self._pages != pages:
            self._pages = pages
            team = self.attention.team  # type: ignore[attr-defined]
            self._decoder = CompiledDecoder(self.spec, self.weights, team, *pages)
        return self._decoder.forward(
            batch.token_ids, batch.positions, logit_indices, batch.attention, cache
        )


def why_not(model: NativeModel) -> str | None:
    """Return why a native model cannot be compiled, or None when it can."""
    if model.device.type != "cpu":
        return f"it is on {model.device}"
    if not isinstance(model.attention, NumbaAttention):
        return f"its attention is {model.attention.name}"
    if any(
        isinstance(layer.gate_up, QuantizedWeight) and layer.router is not None
        for layer in model.weights.layers
    ):
        return "its experts are quantised"
    return refusal(model.spec, model.dtype)
