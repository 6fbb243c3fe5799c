"""Chooses the dtype that a model computes in.

Owner: models. Invariant: a choice that differs from the checkpoint's own dtype is logged
with its reason.
"""

from __future__ import annotations

import logging

import torch

from pagedllm._kinds import BadValue
from pagedllm.config import DTYPES
from pagedllm.errors import ConfigError

logger = logging.getLogger(__name__)


def choose_dtype(
    wanted: str | torch.dtype, stored: torch.dtype | str | None, device: torch.device
) -> torch.dtype:
    """Return the dtype of weights and activations.

    Args:
        wanted: a dtype, its name, or ``auto`` for the checkpoint's own.
        stored: the checkpoint's dtype; None when it does not say.
        device: where the model will run.

    ``auto`` widens fp16 to fp32 on a CPU: few CPUs multiply in fp16, and bf16, which they
    do multiply in, has three bits fewer than the weights.

    Raises:
        ConfigError: ``wanted`` is no dtype that a model can run in.
    """
    if isinstance(stored, str):
        stored = getattr(torch, stored.removeprefix("torch."), None)
    if wanted == "auto":
        if stored == torch.float16 and device.type == "cpu":
            logger.info(
                "dtype: float32, since the checkpoint's float16 is slow on a CPU; "
                "dtype='bfloat16' takes half the memory and rounds the weights"
            )
            return torch.float32
        if stored in (torch.float32, torch.bfloat16, torch.float16):
            return stored
        if stored is not None:
            logger.info("dtype: float32, since a model cannot run in %s", stored)
        return torch.float32
    try:
        chosen: torch.dtype = getattr(torch, DTYPES.check(wanted))
    except BadValue as error:
        raise ConfigError(f"dtype: {error}", "dtype") from None
    return chosen
