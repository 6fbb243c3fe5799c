"""How long a sequence may get before a model's positions stop being right.

Owner: models. Invariant: a step beyond the limit raises; it never computes with positions
that the model was not made for.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pagedllm.errors import RequestTooLongError

if TYPE_CHECKING:
    from pagedllm.models.base import DeviceBatch


logger = logging.getLogger(__name__)


def position_limit(config: Any) -> int | None:
    """Return the longest sequence that a transformers configuration is made for.

    ``longrope`` switches all positions of a sequence to other frequencies once it outgrows
    the original length, and ``dynamic`` recomputes them past ``max_position_embeddings``:
    keys that are in the cache already would be wrong from then on. Up to that length both
    are plain constants, so it is the limit.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    for rope in rope_entries(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") != "longrope" or original is None:
            continue
        if limit is None or original < limit:
            logger.warning(
                "sequences are limited to %d of %s positions: longrope changes the positions "
                "of all tokens of a longer one, those in the cache included",
                original,
                limit,
            )
            limit = int(original)
    return limit


def rope_entries(config: Any) -> list[dict[str, Any]]:
    """Return every set of rotary parameters of a configuration, in no fixed order."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def check_length(batch: DeviceBatch, limit: int | None) -> None:
    """Raise when a sequence of the batch is longer than the model's positions reach.

    Raises:
        RequestTooLongError: the message has both numbers.
    """
    longest = batch.attention.max_context_len
    if limit is not None and longest > limit:
        raise RequestTooLongError(
            f"a sequence has {longest} tokens and this model's positions reach {limit}; "
            f"set max_model_len to at most {limit}"
        )
