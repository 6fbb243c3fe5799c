"""Which models are refused before their weights are read, and why.

Owner: models. Invariants: a refusal names the class and the reason. What passes here is
still understood in full (native tier) or probed on its weights (generic tier) before it
serves anything, so this list makes errors early and clear; it is not what keeps answers
right.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from pagedllm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_REASONS = {
    "bloom": "it adds ALiBi position biases to its attention scores",
    "mpt": "it adds ALiBi position biases to its attention scores",
    "gemma3n": "it is multimodal and its layers share keys and values",
    "gemma3n_text": "its layers share keys and values",
}
"""By ``model_type``, where the class itself does not tell."""
_HARMLESS = frozenset({"padding_idx", "max_seq_len_cached"})
"""Numbers of a module that change nothing that generation computes."""


def check_supported(config: Any, *, trust_remote_code: bool = False) -> str:
    """Return the class name of a checkpoint's model.

    Raises:
        UnsupportedModelError: it cannot be run correctly; the message says why.
    """
    if _is_native(config):
        return str(config.architectures[0])
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    named = (getattr(config, "architectures", None) or [None])[0]
    shown = str(named or f"a model of the type {config.model_type!r}")
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        _refuse(shown, _config_reason(config))
        return shown
    if getattr(config, "is_encoder_decoder", False):
        _refuse(shown, "it is an encoder-decoder; only decoder-only language models run")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse(shown, "it is not a decoder-only language model")
    _refuse(shown, _config_reason(config))
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls = cls[0] if isinstance(cls, tuple) else cls
    if named is not None and named.lower() != cls.__name__.lower():
        _refuse(
            named,
            f"it has no language model's head or another one than {cls.__name__}, which is "
            f"what generates text with a {config.model_type!r} checkpoint",
        )
    return check_class(cls, config)


def _is_native(config: Any) -> bool:
    """Whether there is a native decoder, so that the class, slow to import, need not be asked."""
    from pagedllm.models.families import spec_from_config

    if not getattr(config, "architectures", None) or _config_reason(config) is not None:
        return False
    try:
        return spec_from_config(config) is not None
    except UnsupportedModelError:
        return False


def check_class(cls: type, config: Any) -> str:
    """Return the name of a transformers class.

    Raises:
        UnsupportedModelError: it cannot be run correctly; the message says why.
    """
    name = cls.__name__
    if _value(config, "is_encoder_decoder"):
        _refuse(name, "it is an encoder-decoder; only decoder-only language models run")
    _refuse(name, _config_reason(config))
    if getattr(cls, "_is_stateful", False):
        _refuse(name, "it keeps a recurrent state instead of keys and values of every token")
    if not getattr(cls, "_supports_attention_backend", False):
        _refuse(name, "its attention does not go through transformers' attention interface")
    return name


def _config_reason(config: Any) -> str | None:
    """Return what a configuration asks for that no tier computes, or None."""
    if config.model_type in _REASONS:
        return _REASONS[config.model_type]
    if config.get_text_config(decoder=True) is not config:
        return "it is multimodal; only language models that take text alone run"
    strange = sorted(set(_value(config, "layer_types") or ()) - _LAYER_TYPES)
    if strange:
        return f"it has layers of the type {strange[0]!r}, which pages of keys cannot serve"
    if _value(config, "kv_lora_rank"):
        return "its attention is multi-head latent attention (MLA)"
    if _value(config, "num_kv_shared_layers"):
        return "some of its layers share the keys and values of others"
    if _value(config, "alibi"):
        return "it adds ALiBi position biases to its attention scores"
    if _value(config, "is_causal") is False or _value(config, "use_bidirectional_attention"):
        return "its attention is bidirectional"
    if _value(config, "add_cross_attention"):
        return "it attends to an encoder (add_cross_attention)"
    return None


def _value(config: Any, name: str) -> Any:
    """Read a field that a configuration may lack, or may have per layer only."""
    try:
        return getattr(config, name, None)
    except (AttributeError, ValueError):
        return None


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedModelError(f"{name} is not supported: {reason}")


def plain_model(model: PreTrainedModel) -> None:
    """Check that a live model computes what its class does, and nothing more.

    Raises:
        UnsupportedModelError: modules were replaced, hooked or offloaded, so that reading
            the parameters alone would lose something.
    """
    first = next(model.parameters())
    for name, parameter in model.named_parameters():
        if parameter.device != first.device or parameter.device.type == "meta":
            raise UnsupportedModelError(f"its parameter {name} is on {parameter.device}")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModelError(f"its parameter {name} is stored as {parameter.dtype}")
    for name, module in model.named_modules():
        # transformers' own hooks record outputs and change nothing.
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(not hook.__module__.startswith("transformers.") for hook in hooks):
            raise UnsupportedModelError(f"its module {name or 'itself'} has forward hooks")
        if "forward" in vars(module):
            raise UnsupportedModelError(f"the forward of its {name or 'model'} was replaced")
        if not type(module).__module__.startswith(("transformers.", "torch.nn.")):
            raise UnsupportedModelError(f"its module {name} is a {type(module).__name__}")
    _check_as_built(model)


def _check_as_built(model: PreTrainedModel) -> None:
    """Check that a model's modules are those that its class makes of its configuration.

    Raises:
        UnsupportedModelError: somebody put in another activation, moved a layer or changed
            an epsilon; the configuration does not tell.
    """
    with torch.device("meta"):
        built = dict(type(model)(copy.deepcopy(model.config)).named_modules())
    for name, module in model.named_modules():
        usual = built.get(name)
        if usual is None or type(usual) is not type(module):
            raise UnsupportedModelError(f"its module {name} was replaced")
        for key, value in vars(usual).items():
            plain = type(value) in (int, float) and key not in _HARMLESS
            if plain and vars(module).get(key, value) != value:
                raise UnsupportedModelError(f"the {key} of its module {name} was changed")
