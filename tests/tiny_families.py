"""Tiny models with random weights, one for every architecture that is promised to work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from transformers import PreTrainedModel

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True)
class Family:
    config: str
    """transformers' configuration class, without ``Config``."""
    extra: dict[str, Any] = field(default_factory=dict)
    native: bool = True
    plain: bool = True
    """Whether the common sizes above are this class's names."""


FAMILIES = {
    "llama": Family("Llama"),
    "llama-tied": Family("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biased": Family("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-llama3": Family("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": Family("Llama", {"rope_parameters": _YARN, "hidden_act": "gelu"}),
    "mistral-window": Family("Mistral", {"sliding_window": 11}),
    "qwen2": Family("Qwen2"),
    "qwen2-window": Family(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3": Family("Qwen3", {"head_dim": 32}),
    "gemma": Family("Gemma", {"head_dim": 32}),
    "gemma2": Family(
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": Family(
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _GEMMA3_ROPE,
            "query_pre_attn_scalar": 48,
        },
    ),
    "phi3": Family(
        "Phi3",
        {
            "sliding_window": 20,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "granite": Family(
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": Family("Olmo2"),
    "smollm3": Family("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "mixtral": Family("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": Family(
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 32,
        },
    ),
    "gpt2": Family(
        "GPT2",
        {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
        native=False,
        plain=False,
    ),
    "gpt-neox": Family("GPTNeoX", native=False),
    "opt": Family(
        "OPT",
        {
            "vocab_size": 320,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 32,
        },
        native=False,
        plain=False,
    ),
    "starcoder2": Family("Starcoder2", {"sliding_window": 11}, native=False),
    "cohere": Family("Cohere", {"logit_scale": 1.5, "use_qk_norm": True}, native=False),
    "gpt-oss": Family(
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 16},
        native=False,
    ),
    "qwen2-moe-window": Family(
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        native=False,
    ),
}


def build(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A model in fp32 whose weights, norms and biases are all far from their defaults."""
    import torch
    import transformers

    family = FAMILIES[name]
    values = {**(_COMMON if family.plain else {}), **family.extra, **changes}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, family.config + "Config")(**{**tokens, **values})
    torch.manual_seed(seed)
    # Eager: SDPA cannot cap scores, and leaves it out (Gemma 2) with no more than a warning.
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    # Small beside what the layers add: a tied model would otherwise repeat its last token.
    scale = 8.0 if name.startswith("gemma") else 1.0
    model.get_input_embeddings().weight.data.mul_(0.5 / scale)
    return model


CLEAR = 2e-4
"""Where two are nearly as likely rounding decides, so tests draw until no two are. This is the
lead, in standard deviations of a row, that rounding errors of fp32 stay far below."""


def decided(scores: torch.Tensor, kept: int = 1) -> bool:
    """Whether the ``kept`` largest numbers of each row clearly lead the rest of it."""
    top = scores.topk(kept + 1, dim=-1).values
    return bool((top[..., kept - 1] - top[..., kept] > CLEAR * scores.std(dim=-1)).all())


def routes_clearly(model: PreTrainedModel, rows: Iterable[Sequence[int]]) -> bool:
    """Whether each token's experts clearly lead the others; so they do where there are none."""
    import torch

    count = getattr(model.config, "num_experts_per_tok", None)
    if count is None:
        return True
    with torch.no_grad():
        return all(
            decided(layer, count)
            for row in rows
            for layer in model(torch.tensor([row]), output_router_logits=True).router_logits
        )


def build_clear(name: str, seed: int, rows: Sequence[Sequence[int]]) -> PreTrainedModel:
    """The first model from this seed on whose experts for these tokens rounding cannot change."""
    for attempt in range(seed, seed + 100):
        model = build(name, attempt)
        if routes_clearly(model, rows):
            return model
    raise AssertionError(f"a hundred random models of {name} all have near ties")
