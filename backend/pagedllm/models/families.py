"""Reads a Hugging Face configuration into a :class:`DecoderSpec`, one function per family.

Owner: models. Invariants: one entry of ``_FAMILIES`` per ``model_type``; a value that no
function here knows the meaning of raises :class:`UnsupportedModelError`, and the caller
falls back to the generic tier. Formulas follow the classes of the same names in
transformers; rotary scalings are computed by its own functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagedllm.errors import UnsupportedModelError
from pagedllm.models.limits import position_limit
from pagedllm.models.spec import DecoderSpec, ExpertSpec, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def spec_from_config(config: Any) -> DecoderSpec | None:
    """Describe the model of a transformers configuration.

    Returns:
        The spec, or None when there is no native decoder for this ``model_type``.

    Raises:
        UnsupportedModelError: the family is known but this model has a feature that the
            native decoder does not have; the message names it.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None or not type(config).__module__.startswith("transformers."):
        return None
    expected, build = family
    architectures = getattr(config, "architectures", None) or [expected]
    if architectures[0] != expected:
        raise UnsupportedModelError(f"{architectures[0]} is not {expected}")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError("its weights are quantised")
    return build(config, expected)


def _base(config: Any, architecture: str, **changes: Any) -> DecoderSpec:
    """Return the spec of a Llama-like model; ``changes`` replace fields."""
    layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes: tuple[RopeSpec, ...] = ()
    if "ropes" not in changes:
        ropes = (_rope(config, head_dim),)
    spec = DecoderSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        windows=(None,) * layers,
        ropes=ropes,
        rope_of_layer=(0,) * layers,
        attention_scale=head_dim**-0.5,
        activation=_activation(config.hidden_act if hasattr(config, "hidden_act") else None),
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        max_positions=position_limit(config),
    )
    return replace(spec, **changes)


def _activation(name: str | None) -> Any:
    if name is None:
        return "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"the activation {name!r} is not implemented")
    return _ACTIVATIONS[name]


# --- rotary positions -------------------------------------------------------------------


def _rope(
    config: Any, head_dim: int, layer_type: str | None = None, *, partial: bool = False
) -> RopeSpec:
    """Compute frequencies as the class would at load.

    Args:
        config: its ``rope_parameters`` are read.
        head_dim: entries of a head.
        layer_type: the key of this rope where layers have several.
        partial: whether the class heeds ``partial_rotary_factor``.
    """
    import torch

    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    factor = float(parameters.get("partial_rotary_factor") or 1.0)
    if factor != 1.0 and not partial:
        raise UnsupportedModelError(f"partial_rotary_factor is {factor}")
    if kind == "default":
        size = int(head_dim * factor)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        inv_freq, scale = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    elif kind in ("linear", "dynamic", "yarn", "longrope", "llama3"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # Without a length these give what transformers uses up to position_limit().
        key = {} if layer_type is None else {"layer_type": layer_type}
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **key)
    else:
        raise UnsupportedModelError(f"the rope type {kind!r} is not implemented")
    return RopeSpec(tuple(inv_freq.float().tolist()), float(scale))


# --- families ---------------------------------------------------------------------------


def _llama(config: Any, architecture: str) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return _base(config, architecture, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.mlp_bias))


def _mistral(config: Any, architecture: str) -> DecoderSpec:
    window = config.sliding_window
    return _base(config, architecture, windows=(window,) * config.num_hidden_layers)


def _qwen2(config: Any, architecture: str) -> DecoderSpec:
    return _base(config, architecture, qkv_bias=True, windows=_windows(config))


def _qwen3(config: Any, architecture: str) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return _base(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=_windows(config),
    )


def _qwen3_moe(config: Any, architecture: str) -> DecoderSpec:
    bias = bool(config.attention_bias)
    dense = set(config.mlp_only_layers or ())
    experts = ExpertSpec(
        num=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalize=bool(config.norm_topk_prob),
    )
    sparse = tuple(
        i not in dense and experts.num > 0 and (i + 1) % config.decoder_sparse_step == 0
        for i in range(config.num_hidden_layers)
    )
    return _base(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=(config.sliding_window,) * config.num_hidden_layers,
        experts=experts if any(sparse) else None,
        sparse_layers=sparse if any(sparse) else (),
        intermediate_size=0 if all(sparse) else config.intermediate_size,
    )


def _mixtral(config: Any, architecture: str) -> DecoderSpec:
    layers = config.num_hidden_layers
    return _base(
        config,
        architecture,
        windows=(config.sliding_window,) * layers,
        experts=ExpertSpec(
            num=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            normalize=True,
        ),
        sparse_layers=(True,) * layers,
        intermediate_size=0,
    )


def _phi3(config: Any, architecture: str) -> DecoderSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _base(
        config,
        architecture,
        windows=(config.sliding_window,) * config.num_hidden_layers,
        ropes=(_rope(config, head_dim, partial=True),),
    )


def _smollm3(config: Any, architecture: str) -> DecoderSpec:
    bias = bool(config.attention_bias)
    windows = _windows(config) if config.use_sliding_window else (None,) * config.num_hidden_layers
    return _base(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.mlp_bias),
        windows=windows,
        rope_of_layer=tuple(0 if rotated else -1 for rotated in config.no_rope_layers),
    )


def _granite(config: Any, architecture: str) -> DecoderSpec:
    return replace(
        _llama(config, architecture),
        attention_scale=float(config.attention_multiplier),
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logit_scale=1.0 / float(config.logits_scaling),
    )


def _olmo2(config: Any, architecture: str) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return _base(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        norm_placement="post",
        qk_norm="projection",
    )


def _gemma(config: Any, architecture: str) -> DecoderSpec:
    _causal(config)
    bias = bool(config.attention_bias)
    return _base(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
    )


def _gemma2(config: Any, architecture: str) -> DecoderSpec:
    return replace(
        _gemma(config, architecture),
        norm_placement="sandwich",
        activation=_activation(config.hidden_activation),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
        windows=_windows(config),
    )


def _gemma3(config: Any, architecture: str) -> DecoderSpec:
    _causal(config)
    bias = bool(config.attention_bias)
    kinds = ("full_attention", "sliding_attention")
    return _base(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        norm_placement="sandwich",
        activation=_activation(config.hidden_activation),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,
        qk_norm="head",
        windows=_windows(config),
        ropes=tuple(_rope(config, config.head_dim, kind) for kind in kinds),
        rope_of_layer=tuple(kinds.index(kind) for kind in config.layer_types),
    )


def _causal(config: Any) -> None:
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError("its attention is bidirectional")


def _windows(config: Any) -> tuple[int | None, ...]:
    """Windows per layer from ``layer_types``."""
    windows: list[int | None] = []
    for kind in config.layer_types[: config.num_hidden_layers]:
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention":
            windows.append(int(config.sliding_window))
        else:
            raise UnsupportedModelError(f"a layer is of the type {kind!r}")
    return tuple(windows)


_FAMILIES: dict[str, tuple[str, Callable[[Any, str], DecoderSpec]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "gemma": ("GemmaForCausalLM", _gemma),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma3),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "granite": ("GraniteForCausalLM", _granite),
    "olmo2": ("Olmo2ForCausalLM", _olmo2),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
}
"""``model_type`` to the class it means and the reader of its configuration."""
