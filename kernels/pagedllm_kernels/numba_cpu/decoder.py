"""A whole decoder step, embedding to logits, as one program.

Owner: numba_cpu. Weights are read where they lie, row-major and once per step; only norms
and biases are copied, as float32. The residual stream and everything between two products
is float32; the inputs of a product are rounded to the weights' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu import mixture
from pagedllm_kernels.numba_cpu.compiler import compile_soon
from pagedllm_kernels.numba_cpu.program import AttentionShape, Job, operation
from pagedllm_kernels.quantized import GROUP, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm_kernels.numba_cpu.program import Fields
    from pagedllm_kernels.numba_cpu.team import Team
    from pagedllm_kernels.types import AttentionMetadata, LayerCache

FEW_ROWS = 9
"""Rows from which packing the input pays. On Zen 4 a product of 960 by 576 takes 42 us up to 4
rows, 49 at 8 and 65 at 12 without packing, and 59 from 1 to 16 with it."""
SPLIT_ROWS = 3
"""Rows from which their products are bound by arithmetic rather than by reading the weights."""

TAGS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_ACTIVATIONS = {"silu": at.SILU, "gelu_tanh": at.GELU_TANH, "gelu": at.GELU}
_MAX_WINDOWS = 6  # different ones, each with a list of attention's tasks
# Buffers: the residual stream and two outputs of products, float32; activations, also packed or
# in int8 with their factors; logits.
_X, _QKV, _OUT, _H, _ATTENDED, _INNER, _LAST, _PACKED, _FACTORS, _LOGITS = range(
    at.TASKS + _MAX_WINDOWS, at.TASKS + _MAX_WINDOWS + 10
)


def refusal(spec: Any, dtype: torch.dtype) -> str | None:
    """Return why a decoder cannot be compiled, or None when it can."""
    if dtype not in TAGS:
        return f"its weights are {dtype}"
    if len(set(spec.windows)) > _MAX_WINDOWS:
        return f"it has more than {_MAX_WINDOWS} different windows"
    widths = [spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim]
    if spec.qk_norm == "projection":
        widths.append(spec.num_kv_heads * spec.head_dim)
    if spec.experts is not None:
        widths.append(spec.experts.intermediate_size)
    odd = [width for width in widths if width % at.LANES]
    return f"its width {odd[0]} is no multiple of {at.LANES}" if odd else None


def compile_ahead(spec: Any, dtype: torch.dtype, quantized: bool, int8_pages: bool) -> None:
    """Start to compile what a decoder will need, in a thread beside the loading of weights."""
    if refusal(spec, dtype) is None:
        compile_soon(_function(dtype, quantized, int8_pages))


def _function(dtype: torch.dtype, quantized: bool, int8_pages: bool) -> str:
    purpose = "quantized" if quantized else "model"
    return f"{purpose}_{TAGS[dtype]}{'_i8' if int8_pages else ''}"


class CompiledDecoder:
    """Runs the steps of one decoder on CPU cores. Not safe to call from two threads at once.

    Args:
        spec: the decoder's description, with the fields of ``pagedllm``'s ``DecoderSpec``.
        weights: its weights, with the fields of ``DecoderWeights``; kept, not copied.
        team: the threads.
        page_size: tokens in a page.
        int8_pages: whether keys and values are int8 rather than the weights' dtype.
    """

    def __init__(
        self, spec: Any, weights: Any, team: Team, page_size: int, int8_pages: bool = False
    ) -> None:
        self._spec, self._weights = spec, weights
        self._dtype: torch.dtype = weights.embedding.dtype
        self._itemsize = self._dtype.itemsize
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim)
        self._shape = AttentionShape(*sizes, 1 if int8_pages else self._itemsize)
        self._common = self._shape.fields(page_size)
        self._windows = list(dict.fromkeys(spec.windows))
        self._kept: list[tuple[torch.Tensor, float, torch.Tensor]] = []
        self._versions = -1
        self._units = self._groups = 0
        records = self._records()
        function = _function(self._dtype, self._groups > 0, int8_pages)
        # Rows come to their experts in the one form that all rows of a step have.
        split = 0 if spec.experts else SPLIT_ROWS
        self._job = Job(team, function, records, FEW_ROWS, split)
        codes = self._job.operations[:, at.CODE]
        self._writes, self._attends = (codes == code for code in (at.WRITE, at.ATTEND))
        self._cache: Sequence[LayerCache] | None = None
        self._positions = 0

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_indices: torch.Tensor,
        metadata: AttentionMetadata,
        cache: Sequence[LayerCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step and write its keys and values to the cache.

        Args:
            token_ids: int64 [T].
            positions: int64 [T].
            logit_indices: int64 [R], rows whose logits are wanted.
            metadata: the step's boundaries and page table.
            cache: of every layer, from :class:`NumbaAttention`.

        Returns:
            float32 [R, vocab_size], the logits; and float32 [T, E], the residual stream as it
            left the last layer, which the next step overwrites.
        """
        spec, job = self._spec, self._job
        tokens, rows = token_ids.shape[0], logit_indices.shape[0]
        self._refresh()
        self._bind_cache(cache)
        self._extend_ropes(metadata.max_context_len)
        job.bind(metadata, self._shape, len(self._windows))
        out = torch.empty((rows, spec.vocab_size))
        job.fields[at.NUM_LOGITS] = rows
        job.take(at.TOKEN_IDS, token_ids, torch.int64)
        job.take(at.POSITIONS, positions, torch.int64)
        job.take(at.LOGIT_INDICES, logit_indices, torch.int64)
        job.take(_LOGITS, out, torch.float32)
        size = self._itemsize
        room = max(tokens, 2 * SPLIT_ROWS)  # few rows take two lines each
        for buffer, width in (
            (_X, spec.hidden_size * 4),
            (_QKV, self._qkv_width * 4),
            (_OUT, spec.hidden_size * 4),
            (_H, spec.hidden_size * size),
            (_ATTENDED, spec.num_heads * spec.head_dim * size),
            (_INNER, spec.intermediate_size * size),
        ):
            job.reserve(buffer, room * width)
        job.reserve(_LAST, max(rows, 2 * SPLIT_ROWS) * spec.hidden_size * size)
        lines = max(tokens, rows) + at.LANES
        if spec.experts is not None:
            lines += mixture.reserve(job, spec, tokens, _INNER, size)
        job.reserve(_PACKED, lines * max(self._units * 8, self._groups * GROUP))
        job.reserve(_FACTORS, lines * self._groups * 8)
        job.run()
        return out, job.floats(_X, (tokens, spec.hidden_size))

    @property
    def _qkv_width(self) -> int:
        spec = self._spec
        return int((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)

    def _bind_cache(self, cache: Sequence[LayerCache]) -> None:
        if cache is self._cache:
            return
        for layers in (self._writes, self._attends):
            self._job.operations[layers, at.A_KEYS] = [layer.key.data_ptr() for layer in cache]
            self._job.operations[layers, at.A_VALUES] = [layer.value.data_ptr() for layer in cache]
        self._cache = cache

    def _extend_ropes(self, positions: int) -> None:
        """Make the tables of cosines and sines long enough."""
        if positions <= self._positions:
            return
        self._positions = max(256, 1 << (positions - 1).bit_length())
        steps = torch.arange(self._positions, dtype=torch.float32)[:, None]
        rope_of_layer = torch.tensor(self._spec.rope_of_layer).numpy()
        writes = self._writes.nonzero()[0]
        self._ropes = []
        for number, rope in enumerate(self._spec.ropes):
            angles = steps * torch.tensor(rope.inv_freq, dtype=torch.float32)
            cosines, sines = angles.cos() * rope.scale, angles.sin() * rope.scale
            self._ropes += [cosines, sines]
            used = writes[rope_of_layer == number]
            self._job.operations[used, at.W_HALF] = len(rope.inv_freq)
            self._job.operations[used, at.W_COS] = cosines.data_ptr()
            self._job.operations[used, at.W_SIN] = sines.data_ptr()

    # --- the program ---------------------------------------------------------------------------

    def _records(self) -> list[list[int]]:
        spec, weights = self._spec, self._weights
        records = [
            operation(at.PLAN, self._common | {at.A_WINDOW: w or 0, at.A_TASKS_AT: at.TASKS + i})
            for i, w in enumerate(self._windows)
        ]
        embed: Fields = {
            at.E_TABLE: weights.embedding.data_ptr(),
            at.E_WIDTH: spec.hidden_size,
            at.E_OUT_AT: _X,
            at.E_OUT_STRIDE: spec.hidden_size * 4,
            at.E_SCALE: float(spec.embedding_scale),
        }
        if isinstance(weights.embedding, QuantizedWeight):
            embed[at.E_BITS] = weights.embedding.bits
            embed[at.E_SCALES] = weights.embedding.scales.data_ptr()
            embed[at.E_PANEL] = weights.embedding.data.stride(0)
            self._groups = 1
        records.append(operation(at.EMBED, embed))
        for i, layer in enumerate(weights.layers):
            records += self.norm(_X, _H, layer.attention_norm, spec.hidden_size)
            records += self.linear(_H, layer.qkv, layer.qkv_bias, _QKV, at.STORE_F32)
            records += self._attention(i, layer)
            records += self._branch(_ATTENDED, layer.o, layer.o_bias, layer.attention_out_norm)
            if layer.router is not None:
                records += mixture.records(self, spec, layer, (_X, _OUT, _INNER))
                continue
            records += self.norm(_X, _H, layer.mlp_norm, spec.hidden_size)
            records += self.linear(_H, layer.gate_up, layer.gate_up_bias, _INNER, at.GATED)
            records += self._branch(_INNER, layer.down, layer.down_bias, layer.mlp_out_norm)
        rows: Fields = {at.N_ROWS_AT: at.NUM_LOGITS, at.N_INDEX_AT: at.LOGIT_INDICES}
        records += self.norm(_X, _LAST, weights.norm, spec.hidden_size, rows)
        ends: Fields = {
            at.L_SCALE: float(spec.logit_scale),
            at.L_CAP: float(spec.logit_softcap or 0.0),
        }
        rows_at = at.NUM_LOGITS
        records += self.linear(_LAST, weights.head, None, _LOGITS, at.LOGITS, ends, rows_at)
        return records

    def norm(
        self, source: int, target: int, weight: Any, width: int, changes: Fields | None = None
    ) -> list[list[int]]:
        """Norm rows of float32 into activations; without a weight, only round them."""
        fields: Fields = {
            at.N_ROWS_AT: at.NUM_TOKENS,
            at.N_IN_AT: source,
            at.N_IN_STRIDE: width * 4,
            at.N_OUT_AT: target,
            at.N_OUT_STRIDE: width * self._itemsize,
            at.N_WIDTH: width,
            at.N_WEIGHT: self.floats(weight, self._spec.norm_offset),
            at.N_MODE: at.STORE,
            at.N_EPS: float(self._spec.norm_eps),
        }
        return [operation(at.NORM, fields | (changes or {}))]

    def linear(
        self,
        source: int,
        weight: torch.Tensor | QuantizedWeight,
        bias: Any,
        target: int,
        mode: int,
        changes: Fields | None = None,
        rows_at: int = at.NUM_TOKENS,
    ) -> list[list[int]]:
        """Multiply activations by a matrix [out, in]; ``mode`` says what becomes of products."""
        size, width = weight.shape
        if mode == at.GATED:
            size //= 2
        fields: Fields = {
            at.L_ROWS_AT: rows_at,
            at.L_SIZE: size,
            at.L_BIAS: self.floats(bias),
            at.L_OUT_AT: target,
            at.L_OUT_STRIDE: size * (self._itemsize if mode == at.GATED else 4),
            at.L_MODE: mode,
            at.L_SCALE: 1.0,
            at.L_CAP: 0.0,
            at.L_ACTIVATION: _ACTIVATIONS[self._spec.activation],
        }
        fields |= changes or {}
        if isinstance(weight, QuantizedWeight):
            return self._quantized(source, weight, fields)
        units = width * self._itemsize // 4
        self._units = max(self._units, units)
        pack: Fields = {
            at.P_ROWS_AT: rows_at,
            at.P_IN_AT: source,
            at.P_IN_STRIDE: units * 4,
            at.P_UNITS: units,
            at.P_OUT_AT: _PACKED,
        }
        fields |= {
            at.L_WEIGHT: _matrix(weight),
            at.L_STRIDE: weight.stride(0) * self._itemsize,
            at.L_UNITS: units,
            at.L_IN_AT: source,
            at.L_IN_STRIDE: units * 4,
            at.L_PACKED_AT: _PACKED,
        }
        return [operation(at.PACK, pack), operation(at.LINEAR, fields)]

    def _quantized(self, source: int, weight: QuantizedWeight, fields: Fields) -> list[list[int]]:
        """Round activations and multiply quantised weights by them."""
        width = weight.shape[1]
        groups = -(-width // GROUP)
        self._groups = max(self._groups, groups)
        quantize: Fields = {
            at.Q_ROWS_AT: fields[at.L_ROWS_AT],
            at.Q_IN_AT: source,
            at.Q_IN_STRIDE: width * self._itemsize,
            at.Q_WIDTH: width,
            at.Q_OUT_AT: _PACKED,
            at.Q_FACTORS_AT: _FACTORS,
        }
        fields = fields | {
            at.L_WEIGHT: weight.data_ptr(),
            at.L_STRIDE: weight.data.stride(0),
            at.L_UNITS: groups,
            at.L_IN_AT: _PACKED,
            at.L_FACTORS_AT: _FACTORS,
            at.L_SCALES: weight.scales.data_ptr(),
            at.L_BITS: weight.bits,
        }
        return [operation(at.QUANTIZE, quantize), operation(at.LINEAR_Q, fields)]

    def _branch(self, source: int, weight: Any, bias: Any, norm: Any) -> list[list[int]]:
        """Add a product, normed where there is a norm, to the residual stream."""
        scale: Fields = {at.L_SCALE: float(self._spec.residual_scale)}
        if norm is None:
            return self.linear(source, weight, bias, _X, at.ADD, scale)
        return self.linear(source, weight, bias, _OUT, at.STORE_F32) + self.add_normed(norm)

    def add_normed(self, weight: Any) -> list[list[int]]:
        """Norm the buffer of products and add it to the residual stream."""
        width = self._spec.hidden_size
        add: Fields = {
            at.N_MODE: at.ADD,
            at.N_OUT_STRIDE: width * 4,
            at.N_SCALE: float(self._spec.residual_scale),
        }
        return self.norm(_OUT, _X, weight, width, add)

    def _attention(self, index: int, layer: Any) -> list[list[int]]:
        spec = self._spec
        queries, keys = (n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads))
        records = []
        write: Fields = {
            at.W_IN_F32: 1,
            at.W_QUERY_AT: _QKV,
            at.W_KEY_AT: _QKV,
            at.W_KEY_OFFSET: queries * 4,
            at.W_VALUE_AT: _QKV,
            at.W_VALUE_OFFSET: (queries + keys) * 4,
            at.W_QUERY_STRIDE: self._qkv_width * 4,
            at.W_KEY_STRIDE: self._qkv_width * 4,
            at.W_VALUE_STRIDE: self._qkv_width * 4,
            at.W_EPS: float(spec.norm_eps),
        }
        if spec.qk_norm == "projection":
            for weight, offset, width in (
                (layer.q_norm, 0, queries),
                (layer.k_norm, queries * 4, keys),
            ):
                place: Fields = {
                    at.N_MODE: at.STORE_F32,
                    at.N_IN_OFFSET: offset,
                    at.N_OUT_OFFSET: offset,
                    at.N_IN_STRIDE: self._qkv_width * 4,
                    at.N_OUT_STRIDE: self._qkv_width * 4,
                }
                records += self.norm(_QKV, _QKV, weight, width, place)
        elif spec.qk_norm == "head":
            write[at.W_Q_NORM] = self.floats(layer.q_norm, spec.norm_offset)
            write[at.W_K_NORM] = self.floats(layer.k_norm, spec.norm_offset)
        attend: Fields = {
            at.A_WINDOW: spec.windows[index] or 0,
            at.A_TASKS_AT: at.TASKS + self._windows.index(spec.windows[index]),
            at.A_SCALE: float(spec.attention_scale),
            at.A_CAP: float(spec.attention_softcap or 0.0),
            at.A_OUT_AT: _ATTENDED,
            at.A_OUT_STRIDE: queries * self._itemsize,
        }
        records.append(operation(at.WRITE, self._common | write))
        records.append(operation(at.ATTEND, self._common | attend))
        return records

    def floats(self, tensor: torch.Tensor | None, offset: float = 0.0) -> int:
        """Keep a small tensor as float32, padded to whole vectors; return its address."""
        if tensor is None:
            return 0
        values = torch.zeros(tensor.numel() + 2 * at.LANES)
        self._kept.append((tensor, offset, values))
        return values.data_ptr()

    def _refresh(self) -> None:
        """Copy norms and biases, at first and whenever someone trained the model."""
        # Inference tensors, which nobody trains, count no versions.
        versions = sum(0 if s.is_inference() else s._version for s, _, _ in self._kept)
        if versions != self._versions:
            for source, offset, values in self._kept:
                values[: source.numel()] = source.float().flatten() + offset
            self._versions = versions


def _matrix(weight: torch.Tensor) -> int:
    if weight.stride(1) != 1:
        raise ValueError(f"a row-major matrix is needed, not strides {weight.stride()}")
    return weight.data_ptr()
