"""Loads a transformers model: for the generic tier, and whatever is quantised.

Owner: models. Invariants: a model whose weights are not all in its checkpoint is refused:
transformers would fill the rest with random numbers. So is one whose weights come with scales
that nothing applies: transformers would take the numbers as they are.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from pagedllm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

    from pagedllm.models.checkpoint import Checkpoint


_SCALES = re.compile(r"[._](scales?|scale_inv|q?zeros|zero_points?|absmax|g_idx)$")
"""Names of tensors that say what quantised weights stand for."""


def load_transformers(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, *, progress: bool
) -> PreTrainedModel:
    """Build a checkpoint's own class with its weights.

    Raises:
        UnsupportedModelError: transformers cannot load it here, or weights are missing.
    """
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import AutoHfQuantizer

    quantisation = getattr(checkpoint.config, "quantization_config", None)
    method = quantisation and quantisation.get("quant_method", "an unnamed method")
    what = f"its weights, quantised with {method}," if quantisation else "it"
    try:
        if quantisation and not AutoHfQuantizer.supports_quant_method(quantisation):
            raise ValueError("it does not know that method")
        with _bars(progress):
            model, report = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                config=checkpoint.config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=checkpoint.trust_remote_code,
                output_loading_info=True,
            )
            model = model.to(device)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"transformers cannot load {what} here: {reason}") from error
    missing = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if missing:
        raise UnsupportedModelError(
            f"its checkpoint lacks {len(missing)} of its weights, such as {missing[0]}"
        )
    scales = sorted(key for key in report["unexpected_keys"] if _SCALES.search(key))
    if scales:
        raise UnsupportedModelError(
            f"its weights are quantised in a way that transformers does not know: nothing applies "
            f"{len(scales)} of its tensors, such as {scales[0]}"
        )
    loaded: PreTrainedModel = model
    return loaded


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars for a while."""
    from transformers.utils import logging as hub_logging

    before: Any = hub_logging.is_progress_bar_enabled()
    (hub_logging.enable_progress_bar if shown else hub_logging.disable_progress_bar)()
    try:
        yield
    finally:
        (hub_logging.enable_progress_bar if before else hub_logging.disable_progress_bar)()
