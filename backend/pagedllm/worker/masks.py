"""Rules on what may come next that depend on a sequence's whole output, such as grammars.

Owner: the worker. Invariants: a sequence has its own state, made when it enters a slot, so
answers of one request and sequences that return after a preemption never share one; the
masks of all rows that have one are applied together; a row whose mask fails fails alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pagedllm.errors import EngineError
from pagedllm.worker.sampling_ops import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pagedllm.worker.slot import SlotState


class TokenMask(Protocol):
    """Which tokens may come next in one sequence."""

    def fill(self, output: NDArray[np.int64], mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next.

        Args:
            output: int64 [n], the sequence's output so far.
            mask: int32 [ceil(V / 32)], zeros; bit i of word j is token 32 j + i.

        Raises:
            EngineError: there is no saying.
        """
        ...


def apply_masks(logits: Tensor, states: Sequence[SlotState]) -> dict[int, EngineError]:
    """-inf for every token that a row's masks exclude, in place.

    Args:
        logits: float32 [r, V], contiguous.
        states: of the r rows.

    Returns:
        The rows that failed, each with its error.
    """
    failures: dict[int, EngineError] = {}
    size = logits.shape[1]
    rows = [row for row, state in enumerate(states) if state.masks]
    if not rows:
        return failures
    words = np.full((len(rows), -(-size // 32)), -1, dtype=np.int32)
    for line, row in enumerate(rows):
        state = states[row]
        try:
            for mask in state.masks:
                found = np.zeros_like(words[line])
                mask.fill(state.output, found)
                words[line] &= found
        except Exception as error:  # noqa: BLE001 - a plugin's own, perhaps
            failures[row] = _engine_error(error)
            words[line] = -1
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=size, bitorder="little")
    excluded = to_device(bits == 0, logits.device)
    if len(rows) == len(states):
        logits.masked_fill_(excluded, -torch.inf)
    else:
        index = to_device(np.array(rows, dtype=np.int64), logits.device)
        logits[index] = logits[index].masked_fill_(excluded, -torch.inf)
    return failures


def _engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    found = EngineError(f"the request's logits processor raised {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
