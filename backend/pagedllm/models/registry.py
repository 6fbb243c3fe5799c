"""Loads a model into a tier: native, generic, or refused with the reason.

Owner: models. Invariants: ``auto`` takes the native tier for a model that it understands in
full, else the generic one, and logs why; a tier that the caller names is used or refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pagedllm._recall import Recall
from pagedllm.errors import ConfigError, UnsupportedModelError
from pagedllm.models.checkpoint import Checkpoint, eos_token_ids, open_checkpoint, token_set
from pagedllm.models.decoder import NativeModel
from pagedllm.models.families import spec_from_config
from pagedllm.models.generic import GenericModel, shared_copy
from pagedllm.models.hub import load_transformers
from pagedllm.models.known import Known, keep
from pagedllm.models.precision import choose_dtype
from pagedllm.models.quantizing import Quantizer, QuantizingSource, quantize_modules
from pagedllm.models.sources import ModuleSource, SafetensorsSource
from pagedllm.models.support import check_class, check_supported, plain_model
from pagedllm.models.weights import load_weights
from pagedllm_kernels import select_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from pagedllm.models.base import PagedModel
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
    _check_tier(model_impl)
    place = torch.device(device)
    checkpoint = open_checkpoint(path, trust_remote_code=trust_remote_code)
    # Code that comes with a model may describe it in another way each time.
    recall = Recall(checkpoint.folder) if not trust_remote_code else None
    known = Known.recalled(recall) if recall and model_impl != "generic" else None
    config = None
    if known is not None:
        architecture, stored, eos = known.spec.architecture, known.dtype, known.eos_token_ids
    else:
        config = checkpoint.config
        architecture = check_supported(config, trust_remote_code=trust_remote_code)
        stored, eos = getattr(config, "dtype", None), eos_token_ids(checkpoint)
    chosen = choose_dtype(dtype, stored, place)
    backend = _attention(attention, place, chosen)
    loading = _Loading(checkpoint, chosen, place, backend, eos, quantizer, int8_pages, progress)
    if getattr(config, "quantization_config", None) is not None:
        recall, config = None, loading.read_quantized(architecture)
    read = partial(spec_from_config, config) if known is None else lambda: known.spec
    loaded = _in_tier(read, architecture, model_impl, loading.native, loading.generic)
    if quantizer is not None:
        quantizer.finish()
    if recall and known is None and loading.spec is not None:
        keep(recall, loading.spec, config, eos)
    return loaded


@dataclass(slots=True)
class _Loading:
    """A checkpoint on its way into either tier."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    eos: frozenset[int]
    quantizer: Quantizer | None
    int8_pages: bool
    progress: bool
    held: PreTrainedModel | None = None
    """Of a quantised checkpoint, whose formats transformers reads."""
    spec: DecoderSpec | None = None
    """Of the native tier, when it took the model."""

    def read_quantized(self, architecture: str) -> Any:
        """Load a quantised checkpoint; return the configuration of what came of it.

        What transformers turns into plain weights, as it does fp8 on a CPU, has no
        ``quantization_config`` any more, and runs in any tier.
        """
        if self.quantizer is not None:
            raise ConfigError(
                "quantization: the checkpoint is quantised already; leave it out, or take the "
                "model's plain weights",
                "quantization",
            )
        try:
            self.held = self._whole()
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{architecture} is not supported: {error}") from error
        return self.held.config

    def native(self, spec: DecoderSpec) -> NativeModel:
        """Read the weights into the native tier."""
        quantizer = self.quantizer
        if self.backend.name == "numba":
            from pagedllm_kernels.numba_cpu.decoder import compile_ahead

            quantized = quantizer is not None and quantizer.custom is None
            compile_ahead(spec, self.dtype, quantized, self.int8_pages)
        source: TensorSource = SafetensorsSource(self.checkpoint.files, self.dtype, self.device)
        if self.held is not None:
            plain_model(self.held)
            source = ModuleSource(self.held)
        if quantizer is not None:
            source = QuantizingSource(source, quantizer)
        weights = load_weights(spec, source, _bar(self.progress))
        self.spec = spec
        return NativeModel(spec, weights, self.backend, self.eos)

    def generic(self) -> PagedModel:
        """Load transformers' own model."""
        model = self._whole()
        if self.quantizer is not None:
            quantize_modules(model, self.quantizer)
        return GenericModel(model, self.backend, self.eos)

    def _whole(self) -> PreTrainedModel:
        return self.held or load_transformers(
            self.checkpoint, self.dtype, self.device, progress=self.progress
        )


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
    _check_tier(model_impl)
    architecture = check_class(type(model), model.config)
    backend = _attention(attention, model.device, model.dtype)
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = token_set(named) or token_set(getattr(model.config, "eos_token_id", None))

    def native(spec: DecoderSpec) -> NativeModel:
        plain_model(model)
        return NativeModel(spec, load_weights(spec, ModuleSource(model)), backend, eos)

    def generic() -> PagedModel:
        return GenericModel(shared_copy(model), backend, eos, own=False)

    read = partial(spec_from_config, model.config)
    return _in_tier(read, architecture, model_impl, native, generic)


def _in_tier(
    read: Callable[[], DecoderSpec | None],
    architecture: str,
    model_impl: str,
    native: Callable[[DecoderSpec], NativeModel],
    generic: Callable[[], PagedModel],
) -> PagedModel:
    """Build the model in the first tier that takes it; see :func:`load_model`."""
    if model_impl != "generic":
        try:
            spec = read()
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
