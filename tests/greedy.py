"""Whether an answer is greedy, by transformers; comparing whole answers would ask for more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


def is_greedy(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether each token is the likeliest after those before it.

    Of two that differ by less than rounding may add either will do. Such a pair is rare, but
    thousands of tokens are drawn in a run, and the answers that follow are different ones.
    """
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor([list(answer)]).T)[:, 0]
    return bool((logits.max(dim=1).values - chosen < 5e-4 * logits.std(dim=1)).all())
