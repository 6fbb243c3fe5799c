"""A request as its consumers see it: growing outputs, and snapshots of them.

Owner: the engine's thread writes, consumers' threads read under the request's lock.
Invariants: outputs only ever grow, so a consumer needs no queue of its own: it remembers
how far it has read, and one that reads slowly costs no memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagedllm.engine.sequence import SequenceState
    from pagedllm.engine.text import OutputText, TokenDecoder
    from pagedllm.errors import PagedLLMError
    from pagedllm.outputs import FinishReason
    from pagedllm.types import Request, TokenLogprobs


@dataclass(slots=True, eq=False)
class OutputState:
    """One of a request's ``n`` answers, growing."""

    sequence: SequenceState
    writer: OutputText
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    """``len(text)`` after each token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    decoded_logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    """``logprobs`` as consumers see them, as far as one has asked: made once, not per snapshot."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, eq=False)
class Cursor:
    """How far one consumer has read each answer: characters, tokens."""

    read: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in the engine."""

    request: Request
    decoder: TokenDecoder | None
    listener: Callable[[RequestState], None]
    """Called in the engine's thread after every change; must be quick and must not raise."""
    outputs: list[OutputState] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position in the prompt."""
    embedding: tuple[float, ...] | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    error: PagedLLMError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    replay: Callable[[RequestState, Cursor | None], RequestOutput] | None = None
    """Gives the snapshots when the answer was known and the engine did not see the request."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finished_time is not None

    def snapshot(self, cursor: Cursor | None = None) -> RequestOutput:
        """Return all there is, and advance the cursor; safe in any thread."""
        if self.replay is not None:
            return self.replay(self, cursor)
        cursor = Cursor() if cursor is None else cursor
        with self.lock:
            sequences = [output.sequence for output in self.outputs]
            scheduled = [
                s.first_scheduled_time for s in sequences if s.first_scheduled_time is not None
            ]
            return RequestOutput(
                request_id=self.request.request_id,
                prompt=self.request.prompt,
                prompt_token_ids=self.request.prompt_token_ids,
                prompt_logprobs=self._prompt_logprobs(),
                outputs=[self._completion(output, cursor) for output in self.outputs],
                finished=self.finished,
                num_cached_tokens=sequences[0].num_cached_tokens if sequences else 0,
                metrics=RequestMetrics(
                    arrival_time=self.request.arrival_time,
                    first_scheduled_time=min(scheduled, default=None),
                    first_token_time=self.first_token_time,
                    finished_time=self.finished_time,
                    num_preemptions=sum(s.num_preemptions for s in sequences),
                ),
                error=self.error,
                embedding=self.embedding,
            )

    def _completion(self, output: OutputState, cursor: Cursor) -> CompletionOutput:
        index = output.sequence.index
        characters, tokens = cursor.read.get(index, (0, 0))
        cursor.read[index] = (len(output.text), len(output.token_ids))
        logprobs, cumulative = None, None
        if self.request.params.logprobs is not None:
            known = output.decoded_logprobs
            known += [self._decoded(entry) for entry in output.logprobs[len(known) :]]
            logprobs = list(known)
            cumulative = sum(entry.logprob for entry in output.logprobs)
        return CompletionOutput(
            index=index,
            text=output.text,
            token_ids=list(output.token_ids),
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            text_delta=output.text[characters:],
            new_token_ids=output.token_ids[tokens:],
            text_offsets=list(output.text_offsets),
        )

    def _prompt_logprobs(self) -> list[Mapping[int, Logprob] | None] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        length = len(self.request.prompt_token_ids)
        known = self.prompt_logprobs
        return [self._decoded(known[i]) if i in known else None for i in range(length)]

    def _decoded(self, entry: TokenLogprobs) -> Mapping[int, Logprob]:
        found = {
            token: Logprob(logprob, rank, self._decode(token))
            for rank, (token, logprob) in enumerate(
                zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
            )
        }
        if entry.token_id not in found:
            decoded = self._decode(entry.token_id)
            found[entry.token_id] = Logprob(entry.logprob, entry.rank, decoded)
        return found

    def _decode(self, token: int) -> str | None:
        return None if self.decoder is None else self.decoder.decode([token])
