"""The native tier: one decoder, driven by a :class:`DecoderSpec`, in plain torch.

Owner: models. Invariants: the residual stream, norms, rotations and logits are fp32; the
weights are read only; nothing but the cache changes in a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedllm.models import experts, layers
from pagedllm.models.limits import check_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.models.base import DeviceBatch, LayerShape
    from pagedllm.models.spec import DecoderSpec
    from pagedllm.models.weights import DecoderWeights, LayerWeights
    from pagedllm_kernels.types import AttentionBackend, AttentionMetadata, LayerCache


class NativeModel:
    """A :class:`~pagedllm.models.base.PagedModel` computed from a spec and its weights."""

    tier = "native"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        attention: AttentionBackend,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.attention = attention
        self.eos_token_ids = eos_token_ids
        self.architecture = spec.architecture
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.max_positions
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.weight_bytes = weights.nbytes
        self.layers: Sequence[LayerShape] = spec.layer_shapes()
        self._act = layers.activation(spec.activation)

    @torch.no_grad()
    def forward(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step; see :class:`~pagedllm.models.base.PagedModel`."""
        spec, weights = self.spec, self.weights
        x = self._norm(self._residual(batch, cache)[batch.logit_indices], weights.norm)
        logits = layers.head(x, weights.head)
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    @torch.no_grad()
    def states(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step; see :class:`~pagedllm.models.base.PagedModel`."""
        return self._norm(self._residual(batch, cache), self.weights.norm)

    def _residual(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run the layers; return float32 [T, E]."""
        spec, weights = self.spec, self.weights
        check_length(batch, spec.max_positions)
        x = layers.embed(batch.token_ids, weights.embedding)
        if spec.embedding_scale != 1.0:
            x = x * spec.embedding_scale
        tables = [layers.rope_table(rope, batch.positions) for rope in spec.ropes]
        for i, layer in enumerate(weights.layers):
            rope = spec.rope_of_layer[i]
            table = None if rope < 0 else tables[rope]
            h = self._norm(x, layer.attention_norm)
            h = self._attend(i, h, layer, table, cache[i], batch.attention)
            x = self._add(x, self._norm(h, layer.attention_out_norm))
            h = self._norm(x, layer.mlp_norm)
            h = self._mlp(h, layer)
            x = self._add(x, self._norm(h, layer.mlp_out_norm))
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Normalise; a placement that has no norm here has no weight for it."""
        if weight is None:
            return x
        return layers.rms_norm(x, weight, self.spec.norm_eps, self.spec.norm_offset)

    def _add(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        scale = self.spec.residual_scale
        return x + h if scale == 1.0 else x + h * scale

    def _attend(
        self,
        index: int,
        x: torch.Tensor,
        layer: LayerWeights,
        table: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return float32 [T, E] of float32 ``x`` [T, E]."""
        spec = self.spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = layers.linear(x, layer.qkv, layer.qkv_bias)
        query, key, value = qkv.split([q_size, kv_size, kv_size], dim=-1)
        if spec.qk_norm == "projection":
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        query = query.unflatten(-1, (spec.num_heads, spec.head_dim))
        key = key.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        value = value.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        if spec.qk_norm == "head":
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        if table is not None:
            query, key = layers.rotate(query, table), layers.rotate(key, table)
        attended = self.attention.attend(
            query.to(self.dtype),
            key.to(self.dtype),
            value.to(self.dtype),
            cache,
            metadata,
            scale=spec.attention_scale,
            window=spec.windows[index],
            softcap=spec.attention_softcap,
        )
        return layers.linear(attended.flatten(1), layer.o, layer.o_bias)

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Return float32 [T, E] of float32 ``x`` [T, E]."""
        spec = self.spec
        if layer.router is not None and spec.experts is not None:
            return experts.run(x, layer.router, layer, spec.experts, self._act)
        gate, up = layers.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return layers.linear(self._act(gate) * up, layer.down, layer.down_bias)
