"""The interface of a model that runs on a paged cache, and the batch it is given.

Owner: models. Invariants: a model is stateless between calls but for the pages it writes;
a :class:`DeviceBatch` is built once per step by ``worker.batch`` and never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pagedllm_kernels.types import AttentionBackend, AttentionMetadata, LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """One step's inputs on the device: S sequences packed into T tokens, R of them read out."""

    token_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T], each token's place in its own sequence, from 0."""
    logit_indices: torch.Tensor
    """int64 [R], the rows whose logits are wanted, ascending."""
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_kv_heads: int
    head_dim: int
    value_dim: int


class PagedModel(Protocol):
    """A loaded decoder-only model."""

    tier: str
    """``native`` or ``generic``."""
    architecture: str
    """The Hugging Face class name, such as ``LlamaForCausalLM``."""
    vocab_size: int
    """Columns of the logits."""
    max_positions: int | None
    """Longest sequence the position encoding was made for; None when unlimited."""
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    layers: Sequence[LayerShape]
    attention: AttentionBackend

    def forward(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step and write its keys and values to the cache.

        Args:
            batch: the step's packed inputs.
            cache: one entry per element of ``layers``.

        Returns:
            float32 [R, vocab_size]: logits of the rows in ``batch.logit_indices``.
        """
        ...

    def states(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step as :meth:`forward`; return what the output projection would be given.

        Returns:
            float32 [T, hidden_size]: every row's final state, after the last norm.

        Raises:
            UnsupportedModelError: the model does not hand it out.
        """
        ...
