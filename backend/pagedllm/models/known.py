"""What a start needs of a native model's configuration, kept from the start before.

Owner: models. Invariant: what is recalled equals what the configuration's reader returned.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedllm.models.spec import DecoderSpec, ExpertSpec, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedllm._recall import Recall


class Known(NamedTuple):
    """A model that has loaded in the native tier."""

    spec: DecoderSpec
    dtype: str | None
    """Of the checkpoint, as torch names it."""
    eos_token_ids: frozenset[int]

    @classmethod
    def recalled(cls, recall: Recall) -> Known | None:
        """Return what was kept; None when nothing was, or nothing that can be used."""
        kept = recall.get("model")
        try:
            return cls(_spec(kept["spec"]), kept["dtype"], frozenset(kept["eos"]))
        except (TypeError, KeyError, AttributeError):
            return None


def keep(recall: Recall, spec: DecoderSpec, config: Any, eos: Iterable[int]) -> None:
    """Keep for the next start what was read from a configuration of transformers."""
    # A length below the configuration's own is warned of, and is to be at each start.
    if spec.max_positions != getattr(config, "max_position_embeddings", None):
        return
    dtype = getattr(config, "dtype", None)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    recall.keep("model", {"spec": asdict(spec), "dtype": name, "eos": sorted(eos)})


def _spec(kept: dict[str, Any]) -> DecoderSpec:
    fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in kept.items()}
    fields["ropes"] = tuple(
        RopeSpec(tuple(rope["inv_freq"]), rope["scale"]) for rope in kept["ropes"]
    )
    if kept["experts"] is not None:
        fields["experts"] = ExpertSpec(**kept["experts"])
    return DecoderSpec(**fields)
