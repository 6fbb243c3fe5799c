"""The cache in an answer of ``generate``: made from its tokens when someone looks at it.

Owner: the generate drop-in. The engine's own pages are gone when a call ends, and few callers
want a cache. Who does gets a plain one of transformers, filled by one forward step of the model
over the tokens that the original would have had in it. Invariants: what is not looked at costs
nothing; once it is looked at, nothing of this module is left in it.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

_FILL = "_pagedllm_fill"


def late_cache(
    empty: Cache, model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor | None, name: str
) -> Cache:
    """Return a cache of the class of ``empty`` that is filled at its first use.

    Args:
        empty: as transformers makes it for the call.
        model: computes it.
        tokens: int64 [B, N]: what it is to hold.
        mask: [B, L]: zeros for padding on the left of the first ``L <= N`` tokens; None when
            there is none.
        name: of the argument that takes the cache in the model's forward.
    """
    cls = type(empty)
    late: Cache = object.__new__(type(cls.__name__, (_Late, cls), {"__module__": cls.__module__}))
    vars(late)[_FILL] = partial(_fill, empty, model, tokens, mask, name)
    return late


class _Late:
    """Goes before a class of cache: has no attributes, and whatever is asked of it fills it."""

    def __getattr__(self, name: str) -> Any:
        fill = vars(self).get(_FILL)
        if fill is None:
            raise AttributeError(name)
        filled = fill()
        vars(self).update(vars(filled))
        del vars(self)[_FILL]
        self.__class__ = type(filled)
        return getattr(self, name)

    # A copy of the recipe would copy the model.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_filled(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _filled(self).__reduce_ex__(protocol)


def _filled(late: Any) -> Any:
    late.layers  # noqa: B018 - looking at it is what fills it
    return late


def _fill(
    empty: Cache, model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor | None, name: str
) -> Cache:
    import torch

    shown = torch.ones_like(tokens)
    if mask is not None:
        shown[:, : mask.shape[1]] = mask
    filled = copy.deepcopy(empty)  # two threads may be here at once
    positions = (shown.cumsum(dim=1) - 1).clamp(min=0)
    keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    inputs = {"input_ids": tokens, "attention_mask": shown, "position_ids": positions}
    moved = {key: value.to(model.device) for key, value in inputs.items()}
    with torch.no_grad():
        model(**moved, **{name: filled}, use_cache=True, **keep)
    return filled
