"""The cache in an answer of ``generate``: made from its tokens when someone looks at it.

Owner: the generate drop-in. The engine's own pages are gone when a call ends, and few callers
want a cache. Who does gets a plain one of transformers, filled by one forward step of the model
over the tokens that the original would have had in it. Invariants: what is not looked at costs
nothing, and does not keep the model alive; no cache is computed from another state of the model
than the answer's; once it is looked at, nothing of this module is left in it.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedllm_hf.fingerprint import fingerprint

if TYPE_CHECKING:
    import weakref

    import torch
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

_RECIPE = "_pagedllm_recipe"


@dataclass(slots=True, eq=False)
class Recipe:
    """How to make a cache, later."""

    empty: Cache
    """As transformers makes it for the call; what is filled."""
    model: weakref.ref[PreTrainedModel]
    mark: tuple[Any, ...]
    """The model's fingerprint when it answered."""
    tokens: torch.Tensor
    """int64 [B, N]: what the cache is to hold."""
    mask: torch.Tensor | None
    """[B, L]: zeros for padding on the left of the first ``L <= N`` tokens; None for none."""
    name: str
    """Of the argument that takes the cache in the model's forward."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self) -> Cache:
        """Fill the cache. Raises ValidationError when the model is gone or has changed."""
        import torch

        model = self.model()
        if model is None:
            raise _too_late(self.name, "is gone")
        if fingerprint(model, contents=self.mark[1] is not None) != self.mark:
            raise _too_late(self.name, "has changed since")
        shown = torch.ones_like(self.tokens)
        if self.mask is not None:
            shown[:, : self.mask.shape[1]] = self.mask
        positions = (shown.cumsum(dim=1) - 1).clamp(min=0)
        keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        inputs = {"input_ids": self.tokens, "attention_mask": shown, "position_ids": positions}
        moved = {key: value.to(model.device) for key, value in inputs.items()}
        filled = copy.deepcopy(self.empty)  # a step that fails may be tried again
        with torch.no_grad():
            model(**moved, **{self.name: filled}, use_cache=True, **keep)
        return filled


def late_cache(recipe: Recipe) -> Cache:
    """Return a cache of the class of the recipe's empty one that is filled at its first use."""
    cls = type(recipe.empty)
    late: Cache = object.__new__(type(cls.__name__, (_Late, cls), {"__module__": cls.__module__}))
    vars(late)[_RECIPE] = recipe
    return late


class _Late:
    """Goes before a class of cache: has no attributes, and whatever is asked of it fills it."""

    def __getattr__(self, name: str) -> Any:
        held = vars(self)
        recipe: Recipe | None = held.get(_RECIPE)
        if recipe is not None:
            with recipe.lock:
                if _RECIPE in held:  # no other thread was first
                    filled = recipe.make()
                    held.update(vars(filled))
                    self.__class__ = type(filled)
                    del held[_RECIPE]
        return object.__getattribute__(self, name)

    # A copy of the recipe would need the model.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_filled(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _filled(self).__reduce_ex__(protocol)


def _filled(late: Any) -> Any:
    late.layers  # noqa: B018 - looking at it is what fills it
    return late


def _too_late(name: str, what: str) -> Exception:
    from pagedllm import ValidationError

    return ValidationError(
        f"the cache of an answer is computed when it is first looked at, and the model that gave "
        f"this one {what}; look at it before, with len(answer.{name})"
    )
