"""The protocol between the engine and whatever runs its steps.

Owner: the engine. Invariants: steps are collected in the order they were submitted; an
exception inside a step comes back as ``StepOutput.error`` and leaves the executor usable;
after ``close`` no memory of the model or its cache is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pagedllm.types import ModelInfo, ScheduleStep, StepOutput


class Executor(Protocol):
    """Runs :class:`ScheduleStep`s on one worker or many."""

    max_steps_in_flight: int
    """Steps that may be submitted before the first is collected: 1 is synchronous, 2
    overlaps the host's work with the device's, a pipeline takes its number of stages."""

    def start(self) -> ModelInfo:
        """Load the model and allocate its pages. Raises what loading raises."""
        ...

    def submit(self, step: ScheduleStep) -> None:
        """Begin a step."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step that was submitted and not yet collected."""
        ...

    def health(self) -> str | None:
        """None when all is well, else one line that says what is not."""
        ...

    def close(self) -> None:
        """Stop and give back all memory. Safe to call twice."""
        ...
