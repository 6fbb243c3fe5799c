"""The native decoder's weights: read from safetensors or taken from a live model.

Owner: models. Invariants: QKV and gate-up are merged while they are read, so that peak
memory stays near the weights' own size; a tensor of the checkpoint that nothing used is an
error, since it may be a feature that the decoder does not have. A live model is shared: its
separate projections become views of the merged tensors, with the values they had.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pagedllm.errors import UnsupportedModelError
from pagedllm.models import experts
from pagedllm_kernels.quantized import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagedllm.models.layers import Matrix
    from pagedllm.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in] and row-major. E hidden, I intermediate, N experts."""

    qkv: Matrix
    """[(Hq + 2 * Hkv) * D, E]: queries, keys, values."""
    o: Matrix
    """[E, Hq * D]."""
    gate_up: Matrix
    """[2 * I, E], gate first; of a sparse layer [N, 2 * I, E]."""
    down: Matrix
    """[E, I]; of a sparse layer [N, E, I]."""
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    """[D], or [Hq * D] when the norm spans the projection."""
    k_norm: torch.Tensor | None = None
    """[D], or [Hkv * D]."""
    attention_norm: torch.Tensor | None = None
    """[E], before attention (pre, sandwich)."""
    attention_out_norm: torch.Tensor | None = None
    """[E], of attention's output (post, sandwich)."""
    mlp_norm: torch.Tensor | None = None
    """[E], before the MLP (pre, sandwich)."""
    mlp_out_norm: torch.Tensor | None = None
    """[E], of the MLP's output (post, sandwich)."""
    router: torch.Tensor | None = None
    """[N, E], of a sparse layer."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of a decoder."""

    embedding: Matrix
    """[V, E]."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    """[E], before the output projection."""
    head: Matrix
    """[V, E]; the embedding itself when they are tied."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        tensors = [self.embedding, self.norm, self.head]
        for layer in self.layers:
            tensors += [t for f in fields(layer) if (t := getattr(layer, f.name)) is not None]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


class TensorSource(Protocol):
    """Where the decoder's tensors come from."""

    names: frozenset[str]

    def read(self, parts: Sequence[str]) -> torch.Tensor:
        """Return these tensors one below the other along dimension 0, as one tensor."""
        ...

    def stack(self, rows: Sequence[Sequence[str]]) -> torch.Tensor:
        """Return [len(rows), ...]: each row's tensors one below the other."""
        ...


# Tensors that old checkpoints carry and no class reads.
_IGNORED = ("rotary_emb.inv_freq",)


def load_weights(
    spec: DecoderSpec,
    source: TensorSource,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> DecoderWeights:
    """Read and merge the weights that a spec describes.

    Args:
        spec: says which tensors there must be and of which shapes.
        source: a checkpoint or a live model, with transformers' names.
        progress: wraps the iteration over the layers.

    Raises:
        UnsupportedModelError: a tensor is missing, has another shape, or is left over.
    """
    reader = Reader(source)
    width = spec.hidden_size
    embedding = reader.one("model.embed_tokens.weight", spec.vocab_size, width)
    layers = tuple(_layer(spec, i, reader) for i in progress(range(spec.num_layers)))
    norm = reader.one("model.norm.weight", width)
    head = embedding
    if "lm_head.weight" in source.names or not spec.tied_head:
        head = reader.one("lm_head.weight", spec.vocab_size, width)
        # A checkpoint may hold a tied matrix twice. Two different ones are not tied,
        # whatever the configuration says; transformers decides the same way.
        if spec.tied_head and _equal(head, embedding):
            head = embedding
    left = sorted(n for n in source.names - reader.used if not n.endswith(_IGNORED))
    if left:
        raise UnsupportedModelError(
            f"the native decoder has no use for {len(left)} of its tensors, such as {left[0]}"
        )
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, head=head)


def _equal(a: Matrix, b: Matrix) -> bool:
    if isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        return torch.equal(a.data, b.data) and torch.equal(a.scales, b.scales)
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)


class Reader:
    """Takes tensors from a source, checks their shapes and keeps count of them."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.used: set[str] = set()

    def one(self, name: str, *shape: int) -> Any:
        """Return a tensor, once it has this shape."""
        return self.merged([name], *shape)

    def merged(self, names: Sequence[str], *shape: int) -> Any:
        """Return tensors one below the other."""
        self._use(names)
        return _shaped(self.source.read(names), names[0], shape)

    def stacked(self, rows: Sequence[Sequence[str]], *shape: int) -> Any:
        """Return a stack of what :meth:`merged` returns."""
        for names in rows:
            self._use(names)
        return _shaped(self.source.stack(rows), rows[0][0], shape)

    def has(self, name: str) -> bool:
        """Whether the source has such a tensor."""
        return name in self.source.names

    def _use(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.source.names:
                raise UnsupportedModelError(f"the weights have no tensor {name}")
        self.used.update(names)


def _shaped(tensor: Any, name: str, shape: tuple[int, ...]) -> Any:
    if tuple(tensor.shape) != shape:
        raise UnsupportedModelError(
            f"{name} has the shape {tuple(tensor.shape)} where its configuration means {shape}"
        )
    return tensor


def _layer(spec: DecoderSpec, index: int, reader: Reader) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    width, out = spec.hidden_size, spec.num_heads * spec.head_dim
    tensors: dict[str, Any] = {}

    split = [attention + p for p in ("q_proj", "k_proj", "v_proj")]
    if reader.has(attention + "qkv_proj.weight"):
        split = [attention + "qkv_proj"]
    qkv = reader.merged([f"{p}.weight" for p in split], spec.qkv_size, width)
    if spec.qkv_bias:
        tensors["qkv_bias"] = reader.merged([f"{p}.bias" for p in split], spec.qkv_size)
    o = reader.one(attention + "o_proj.weight", width, out)
    if spec.o_bias:
        tensors["o_bias"] = reader.one(attention + "o_proj.bias", width)
    if spec.qk_norm != "none":
        whole = spec.qk_norm == "projection"
        kv_out = spec.num_kv_heads * spec.head_dim
        tensors["q_norm"] = reader.one(attention + "q_norm.weight", out if whole else spec.head_dim)
        tensors["k_norm"] = reader.one(
            attention + "k_norm.weight", kv_out if whole else spec.head_dim
        )
    for field, name in _NORMS[spec.norm_placement]:
        tensors[field] = reader.one(f"{prefix}{name}.weight", width)
    if spec.is_sparse(index):
        tensors.update(experts.read(spec, prefix, reader))
    else:
        tensors.update(_mlp(spec, prefix + "mlp.", reader))
    return LayerWeights(qkv=qkv, o=o, **tensors)


_NORMS = {
    "pre": (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
    "post": (
        ("attention_out_norm", "post_attention_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
    "sandwich": (
        ("attention_norm", "input_layernorm"),
        ("attention_out_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
}
"""By placement: our field and transformers' name."""


def _mlp(spec: DecoderSpec, prefix: str, reader: Reader) -> dict[str, Any]:
    width, inner = spec.hidden_size, spec.intermediate_size
    parts = [prefix + "gate_proj", prefix + "up_proj"]
    if reader.has(prefix + "gate_up_proj.weight"):
        parts = [prefix + "gate_up_proj"]
    tensors = {
        "gate_up": reader.merged([f"{p}.weight" for p in parts], 2 * inner, width),
        "down": reader.one(prefix + "down_proj.weight", width, inner),
    }
    if spec.mlp_bias:
        tensors["gate_up_bias"] = reader.merged([f"{p}.bias" for p in parts], 2 * inner)
        tensors["down_bias"] = reader.one(prefix + "down_proj.bias", width)
    return tensors
