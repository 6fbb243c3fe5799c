"""The headers that say what an answer cost, on TGI's routes and on OpenAI's of the same kind.

Owner: the server integration. Names and units are those of TGI's router.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm import RequestOutput

NAMES = (
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-prompt-tokens",
    "x-generated-tokens",
)


class Timing:
    """Measures a request from its arrival on.

    Args:
        device: where the model runs.
    """

    __slots__ = ("_arrived", "_checked", "_device", "characters")

    def __init__(self, device: str) -> None:
        self._device = device
        self._arrived = self._checked = time.perf_counter()
        self.characters: int | None = None
        """Of the prompts' text; None when it is not known, as for a conversation."""

    def checked(self) -> None:
        """The request has been found to be right, and is the engine's now."""
        self._checked = time.perf_counter()

    def of_stream(self) -> dict[str, str]:
        """What is known when a stream begins."""
        known = {"x-compute-type": self._device}
        if self.characters is not None:
            known["x-compute-characters"] = str(self.characters)
        return known

    def of_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, str]:
        """All of them: times in milliseconds, but for x-compute-time in seconds.

        Several outputs, of a request with several prompts, ran at the same time: the longest
        times count.
        """
        total = time.perf_counter() - self._arrived
        generated = sum(len(answer.token_ids) for each in outputs for answer in each.outputs)
        metrics = [each.metrics for each in outputs if each.metrics is not None]
        queue = max((each.queue_time or 0.0 for each in metrics), default=0.0)
        whole = max((each.e2e_time or 0.0 for each in metrics), default=0.0)
        inference = max(0.0, whole - queue)

        def ms(seconds: float) -> str:
            return str(max(0, round(1000 * seconds)))

        return {
            **self.of_stream(),
            "x-compute-time": str(round(total, 6)),
            "x-total-time": ms(total),
            "x-validation-time": ms(self._checked - self._arrived),
            "x-queue-time": ms(queue),
            "x-inference-time": ms(inference),
            "x-time-per-token": ms(inference / generated if generated else 0.0),
            "x-prompt-tokens": str(sum(len(each.prompt_token_ids) for each in outputs)),
            "x-generated-tokens": str(generated),
        }
