"""What a decoder computes, as frozen scalars and tuples.

Owner: models. Invariants: a :class:`DecoderSpec` is hashable and complete: with the weights
it determines the logits, so that a kernel can be specialised from it alone. The reader of a
configuration that meets a feature it does not understand refuses; it never ignores one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagedllm.models.base import LayerShape


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: the first ``2 * len(inv_freq)`` entries of each head are rotated.

    Entry i is paired with entry i + len(inv_freq) (the "rotate half" layout), and the pair
    is turned by ``position * inv_freq[i]`` radians. Linear, llama3, yarn and other scalings
    are already inside ``inv_freq``.
    """

    inv_freq: tuple[float, ...]
    """Radians per position; every one is a float32 value."""
    scale: float = 1.0
    """Factor on the cosines and sines (yarn, longrope)."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A sparse MLP: softmax over all experts' logits, then the ``top_k`` largest are run."""

    num: int
    top_k: int
    intermediate_size: int
    normalize: bool
    """Whether the chosen experts' weights are divided by their sum."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer with RMS norms, rotary attention and gated MLPs.

    A layer, with ``r = residual_scale`` and norms by ``norm_placement``::

        pre:       x += r * attend(norm(x));         x += r * mlp(norm(x))
        post:      x += r * norm(attend(x));         x += r * norm(mlp(x))
        sandwich:  x += r * norm(attend(norm(x)));   x += r * norm(mlp(norm(x)))

    where ``mlp(h) = down(activation(gate(h)) * up(h))``, or the weighted sum of that over
    the experts chosen. All projections are ``weight @ h (+ bias)``.
    """

    architecture: str
    """The Hugging Face class, such as ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense MLPs; 0 when every layer is sparse."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    windows: tuple[int | None, ...]
    """Per layer: positions that a query sees, itself included; None sees all."""
    ropes: tuple[RopeSpec, ...]
    rope_of_layer: tuple[int, ...]
    """Per layer: index into ``ropes``, or -1 for a layer without positions."""
    attention_scale: float
    """Factor on the scores."""
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    norm_offset: float = 0.0
    """Added to every norm's weight (1 in the Gemma family), QK norms included."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMS norm of queries and keys before the rotation: per head, or over all heads at once."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    """Logits become ``softcap * tanh(logits / softcap)``, after ``logit_scale``."""
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    tied_head: bool = False
    """Whether the output projection is the embedding matrix."""
    experts: ExpertSpec | None = None
    sparse_layers: tuple[bool, ...] = ()
    """Per layer: whether its MLP is ``experts``; empty when there are none."""
    max_positions: int | None = None
    """Longest sequence that these rotary frequencies are right for; None when unlimited."""

    @property
    def qkv_size(self) -> int:
        """Rows of the merged QKV projection: all queries, then all keys, then all values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return bool(self.sparse_layers) and self.sparse_layers[layer]

    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """What each layer stores per token."""
        from pagedllm.models.base import LayerShape

        shape = LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)
        return (shape,) * self.num_layers
