"""Finished answers as bytes, and bytes as answers that are given out again.

Owner: :mod:`pagedllm.response_cache`. Invariants: the bytes hold no code and read back to
equal answers; a consumer that streams gets a stored answer in pieces, as it got the original.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagedllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagedllm.engine.requests import Cursor, RequestState

FORMAT = 1
"""The first byte of what is stored; another one is not read."""
PIECES = 32
"""Most snapshots that a stored answer is streamed in, so that a long one costs no more."""
_Entries = list[list[tuple[int, float, int, str | None]] | None]


def pack(output: RequestOutput) -> bytes:
    """Return a finished output's answers: a byte that says the format, then deflated JSON."""
    plain = {
        "answers": [
            {
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "text_offsets": list(answer.text_offsets),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "cumulative_logprob": answer.cumulative_logprob,
                "logprobs": _plain_logprobs(answer.logprobs),
            }
            for answer in output.outputs
        ],
        "prompt_logprobs": _plain_logprobs(output.prompt_logprobs),
    }
    return bytes([FORMAT]) + zlib.compress(json.dumps(plain, separators=(",", ":")).encode(), 1)


def unpack(stored: bytes, state: RequestState) -> RequestOutput:
    """Return stored answers as the output of a request that has just ended.

    Raises:
        ValueError, KeyError, TypeError, zlib.error: these are not bytes of :func:`pack`.
    """
    if stored[:1] != bytes([FORMAT]):
        raise ValueError("another format")
    plain = json.loads(zlib.decompress(stored[1:]))
    request, now = state.request, time.monotonic()
    if len(plain["answers"]) != request.params.n:
        raise ValueError("another number of answers")
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=_logprobs(plain["prompt_logprobs"]),
        outputs=[_completion(index, answer) for index, answer in enumerate(plain["answers"])],
        finished=True,
        from_response_cache=True,
        metrics=RequestMetrics(
            arrival_time=request.arrival_time, first_token_time=now, finished_time=now
        ),
    )


def _completion(index: int, answer: dict[str, Any]) -> CompletionOutput:
    logprobs = _logprobs(answer.pop("logprobs"))
    return CompletionOutput(
        index=index,
        logprobs=logprobs,  # type: ignore[arg-type]  # None only in those of a prompt
        text_delta=answer["text"],
        new_token_ids=answer["token_ids"],
        **answer,
    )


class Replay:
    """A stored answer in place of what the engine would have written; a state's ``replay``."""

    def __init__(self, whole: RequestOutput) -> None:
        self._whole = whole
        self._length = max(len(answer.token_ids) for answer in whole.outputs)
        self._piece = -(-self._length // PIECES)

    def snapshot(self, state: RequestState, cursor: Cursor | None) -> RequestOutput:
        """Return everything, or with a cursor as much as is next; then tell the listener."""
        if cursor is None:
            return self._whole
        read = max((tokens for _, tokens in cursor.read.values()), default=0)
        end = read + self._piece
        outputs = [_part(answer, cursor, end) for answer in self._whole.outputs]
        if end >= self._length:
            return replace(self._whole, outputs=outputs)
        state.listener(state)
        metrics = self._whole.metrics
        return replace(
            self._whole,
            outputs=outputs,
            finished=False,
            metrics=metrics and replace(metrics, finished_time=None),
        )


def _part(answer: CompletionOutput, cursor: Cursor, end: int) -> CompletionOutput:
    """Return the answer as it stood after ``end`` tokens, and advance the cursor."""
    characters, tokens = cursor.read.get(answer.index, (0, 0))
    if end < len(answer.token_ids):
        logprobs = answer.logprobs and answer.logprobs[:end]
        cumulative = None
        if logprobs is not None:
            pairs = zip(answer.token_ids[:end], logprobs, strict=True)
            cumulative = sum(entry[token].logprob for token, entry in pairs)
        answer = replace(
            answer,
            text=answer.text[: answer.text_offsets[end - 1]],
            token_ids=answer.token_ids[:end],
            text_offsets=answer.text_offsets[:end],
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            finish_reason=None,
            stop_reason=None,
        )
    cursor.read[answer.index] = (len(answer.text), len(answer.token_ids))
    return replace(
        answer, text_delta=answer.text[characters:], new_token_ids=answer.token_ids[tokens:]
    )


def _plain_logprobs(
    logprobs: Sequence[Mapping[int, Logprob] | None] | None,
) -> _Entries | None:
    if logprobs is None:
        return None
    return [
        None
        if entry is None
        else [(token, each.logprob, each.rank, each.decoded_token) for token, each in entry.items()]
        for entry in logprobs
    ]


def _logprobs(plain: _Entries | None) -> list[Mapping[int, Logprob] | None] | None:
    if plain is None:
        return None
    return [
        None
        if entry is None
        else {token: Logprob(logprob, rank, text) for token, logprob, rank, text in entry}
        for entry in plain
    ]
