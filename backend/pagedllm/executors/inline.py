"""The executor that runs steps in the engine's own thread.

Owner: the engine. Invariant: a step runs when it is submitted; ``collect`` hands out the
results in order, so any depth works, which a device that computes on its own makes use of.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from pagedllm.errors import EngineClosedError
from pagedllm.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedllm.config import Config
    from pagedllm.models.base import PagedModel
    from pagedllm.types import ModelInfo, ScheduleStep, StepOutput
    from pagedllm_kernels.types import LayerCache


class InlineExecutor:
    """Runs one worker in the calling thread.

    Args:
        config: a resolved config.
        load: returns the model; called by :meth:`start`, so that it is loaded in the thread
            that uses it and nobody else holds on to it.
    """

    def __init__(self, config: Config, load: Callable[[], PagedModel]) -> None:
        self.max_steps_in_flight = config.steps_in_flight or 1
        self._config = config
        self._load = load
        self._worker: Worker | None = None
        self._results: deque[StepOutput] = deque()

    def start(self) -> ModelInfo:
        """Load the model and allocate its pages."""
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        self._worker = Worker(self._load(), self._config)
        return self._worker.info

    @property
    def layers(self) -> Sequence[LayerCache]:
        """The pages' memory; for the engine's thread, between two steps."""
        return () if self._worker is None else self._worker.layers

    def submit(self, step: ScheduleStep) -> None:
        """Run a step and keep its result."""
        if self._worker is None:
            raise EngineClosedError("the executor is not running")
        self._results.append(self._worker.execute(step))

    def collect(self) -> StepOutput:
        """Return the oldest result. Raises IndexError when there is none."""
        return self._results.popleft()

    def health(self) -> str | None:
        """Say what is wrong, if anything."""
        return None if self._worker is not None else "the executor is not running"

    def close(self) -> None:
        """Free the model and its pages."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._results.clear()
