"""Loads a model into a tier: native, generic, or refused with the reason.

Owner: models. Invariants: ``auto`` takes the native tier for a model that it understands in
full, else the generic one, and logs why; a tier that the caller names is used or refused.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pagedllm.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel

    from pagedllm.models.base import PagedModel
    from pagedllm.models.decoder import NativeModel
    from pagedllm.models.quantizing import Quantizer
    from pagedllm.models.spec import DecoderSpec
    from pagedllm.models.weights import TensorSource
    from pagedllm_kernels.types import AttentionBackend

logger = logging.getLogger(__name__)

_TIERS = ("auto", "native", "generic")


def load_model(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    attention: str | AttentionBackend = "auto",
    quantizer: Quantizer | None = None,
    int8_pages: bool = False,
    progress: bool = False,
) -> PagedModel:
    """Load a model from a folder.

    Args:
        path: a folder with config.json and safetensors.
        dtype: of weights and activations; ``auto`` is the checkpoint's own.
        device: where it runs.
        model_impl: ``auto``, ``native`` or ``generic``.
        trust_remote_code: whether code that comes with the model may run.
        attention: an implementation, a name from
            :func:`pagedllm_kernels.attention_backends`, or ``auto``.
        quantizer: of its matrices; None keeps them as they are.
        int8_pages: whether its pages will be int8; decides what is compiled meanwhile.
        progress: whether a bar shows the loading.

    Raises:
        ModelNotFoundError: there is no such model, or a file of it is missing.
        UnsupportedModelError: it cannot be run correctly; the message names its class.
        ConfigError: a setting has a wrong value.
    """
    import torch

    from pagedllm.models.checkpoint import eos_token_ids, open_checkpoint
    from pagedllm.models.precision import choose_dtype
    from pagedllm.models.quantizing import QuantizingSource, quantize_modules
    from pagedllm.models.support import check_supported, plain_model

    _check_tier(model_impl)
    place = torch.device(device)
    checkpoint = open_checkpoint(path, trust_remote_code=trust_remote_code)
    config = checkpoint.config
    architecture = check_supported(config, trust_remote_code=trust_remote_code)
    chosen = choose_dtype(dtype, getattr(config, "dtype", None), place)
    backend = _attention(attention, place, chosen)
    eos = eos_token_ids(checkpoint)
    held: PreTrainedModel | None = None

    def whole() -> PreTrainedModel:
        from pagedllm.models.hub import load_transformers

        return held or load_transformers(
            checkpoint, chosen, place, trust_remote_code=trust_remote_code, progress=progress
        )

    def native(spec: DecoderSpec) -> NativeModel:
        from pagedllm.models.decoder import NativeModel
        from pagedllm.models.sources import ModuleSource, SafetensorsSource
        from pagedllm.models.weights import load_weights

        if backend.name == "numba":
            from pagedllm_kernels.numba_cpu.decoder import compile_ahead

            quantized = quantizer is not None and quantizer.custom is None
            compile_ahead(spec, chosen, quantized, int8_pages)
        source: TensorSource = SafetensorsSource(checkpoint.files, chosen, place)
        if held is not None:
            plain_model(held)
            source = ModuleSource(held)
        if quantizer is not None:
            source = QuantizingSource(source, quantizer)
        return NativeModel(spec, load_weights(spec, source, _bar(progress)), backend, eos)

    def generic() -> PagedModel:
        from pagedllm.models.generic import GenericModel

        model = whole()
        if quantizer is not None:
            quantize_modules(model, quantizer)
        return GenericModel(model, backend, eos)

    if getattr(config, "quantization_config", None) is not None:
        if quantizer is not None:
            raise ConfigError(
                "quantization: the checkpoint is quantised already; leave it out, or take the "
                "model's plain weights",
                "quantization",
            )
        # transformers reads the formats. What it turns into plain weights, as it does fp8 on a
        # CPU, has no such entry in its configuration any more, and runs in any tier.
        try:
            held = whole()
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{architecture} is not supported: {error}") from error
        config = held.config
    loaded = _in_tier(config, architecture, model_impl, native, generic)
    if quantizer is not None:
        quantizer.finish()
    return loaded


def wrap_model(
    model: PreTrainedModel,
    *,
    model_impl: str = "auto",
    attention: str | AttentionBackend = "auto",
) -> PagedModel:
    """Run a transformers model that the caller already holds; its weights are shared.

    The model stays usable. In the native tier its separate projections become views of
    merged tensors, with the same values.

    Raises:
        UnsupportedModelError: it cannot be run correctly; the message names its class.
        ConfigError: a setting has a wrong value.
    """
    from pagedllm.models.checkpoint import token_set
    from pagedllm.models.support import check_class, plain_model

    _check_tier(model_impl)
    architecture = check_class(type(model), model.config)
    backend = _attention(attention, model.device, model.dtype)
    generation = getattr(model, "generation_config", None)
    eos = token_set(getattr(generation, "eos_token_id", None)) or token_set(
        getattr(model.config, "eos_token_id", None)
    )

    def native(spec: DecoderSpec) -> NativeModel:
        from pagedllm.models.decoder import NativeModel
        from pagedllm.models.sources import ModuleSource
        from pagedllm.models.weights import load_weights

        plain_model(model)
        return NativeModel(spec, load_weights(spec, ModuleSource(model)), backend, eos)

    def generic() -> PagedModel:
        from pagedllm.models.generic import GenericModel, shared_copy

        return GenericModel(shared_copy(model), backend, eos)

    return _in_tier(model.config, architecture, model_impl, native, generic)


def _in_tier(
    config: Any,
    architecture: str,
    model_impl: str,
    native: Callable[[DecoderSpec], NativeModel],
    generic: Callable[[], PagedModel],
) -> PagedModel:
    """Build the model in the first tier that takes it; see :func:`load_model`."""
    from pagedllm.models.families import spec_from_config

    if model_impl != "generic":
        try:
            spec = spec_from_config(config)
            if spec is not None:
                loaded = _compiled(native(spec))
                logger.info("model: %s in the native tier", architecture)
                return loaded
            reason = "there is no native decoder for it"
        except UnsupportedModelError as error:
            reason = str(error)
        if model_impl == "native":
            raise UnsupportedModelError(
                f"{architecture} cannot run in the native tier: {reason}; "
                "model_impl='auto' tries the generic one"
            )
        logger.info("model: %s goes to the generic tier: %s", architecture, reason)
    try:
        loaded = generic()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{architecture} is not supported: {error}") from error
    logger.info("model: %s in the generic tier", architecture)
    return loaded


def _compiled(model: NativeModel) -> PagedModel:
    """Run a native model's step as one compiled program, where its attention is compiled too."""
    if model.attention.name != "numba":
        return model
    from pagedllm.models.compiled import CompiledModel, why_not

    reason = why_not(model)
    if reason is None:
        return CompiledModel(model)
    logger.info("model: %s runs in torch: %s", model.architecture, reason)
    return model


def _check_tier(model_impl: str) -> None:
    if model_impl not in _TIERS:
        raise ConfigError(
            f"model_impl is {model_impl!r}; it must be one of {', '.join(_TIERS)}", "model_impl"
        )


def _attention(
    asked: str | AttentionBackend, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    from pagedllm_kernels import select_attention

    if not isinstance(asked, str):
        return asked
    try:
        return select_attention(device, dtype, asked)
    except ValueError as error:
        raise ConfigError(str(error), "attention") from error


def _bar(progress: bool) -> Callable[[Any], Any]:
    """Return what wraps the iteration over layers: a bar, or nothing."""
    if not progress:
        return iter
    from tqdm import tqdm

    # disable=None: silent when the output is not a terminal.
    return lambda layers: tqdm(layers, desc="Loading weights", unit="layer", disable=None)
