"""The scheduler's view of one sequence.

Owner: the scheduler; never crosses to an executor. Invariant: computed tokens chase known
tokens, so there is no prefill or decode phase:
``num_computed <= num_scheduled <= len(tokens) + num_pending``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pagedllm.cache.page_table import PageTable

if TYPE_CHECKING:
    from pagedllm.types import Request


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SequenceState:
    """One of the ``n`` sequences of a request."""

    request: Request
    index: int
    """Which of the request's ``n`` sequences this is."""
    seed: int
    order: int
    """Arrival number, unique in the engine; a preempted sequence keeps its own."""
    max_tokens: int
    """Tokens to generate at most."""
    tokens: list[int]
    """Every known token, prompt first."""
    leader: SequenceState | None = None
    """The sequence of the same request whose prompt pages this one may share."""
    followers: list[SequenceState] = field(default_factory=list)
    """Sequences that wait until this one's prompt has been computed."""
    num_computed: int = 0
    """Tokens whose keys and values are in pages, as far as results have come back."""
    num_scheduled: int = 0
    """The same, with the steps in flight."""
    num_pending: int = 0
    """Draws in flight."""
    table: PageTable = field(default_factory=PageTable)
    status: Status = Status.WAITING
    slot: int = -1
    generation: int = -1
    num_cached_tokens: int = 0
    """Prompt tokens that the first admission found in the cache."""
    num_preemptions: int = 0
    late: bool = False
    """Under the ``deadline`` policy: its target can no longer be met. Changes only in the
    waiting queue's hands."""
    first_scheduled_time: float | None = None
    """Seconds of ``time.monotonic()``."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def driven(self) -> bool:
        """Whether its tokens come from the caller."""
        return self.request.driven

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_to_schedule(self) -> int:
        """Tokens that could be computed now; 0 while the next one is still in flight."""
        if self.num_output_tokens + self.num_pending >= self.max_tokens:
            return 0
        return len(self.tokens) + self.num_pending - self.num_scheduled
