"""The step pipeline: schedule, submit, collect, and turn results into outputs.

Owner: :class:`~pagedllm.engine.loop.EngineLoop`, whose thread alone calls it. Invariants:
one loop serves every depth of steps in flight; an exception in a step or in one request's
processing fails the requests concerned and nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pagedllm.cache.manager import CacheManager
from pagedllm.engine.requests import OutputState
from pagedllm.engine.scheduler import Scheduler
from pagedllm.engine.sequence import SequenceState, Status
from pagedllm.engine.text import OutputText
from pagedllm.errors import ConfigError, EngineClosedError, EngineError, RequestAbortedError
from pagedllm.metrics import Counters, EngineStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.config import Config
    from pagedllm.engine.driven import DrivenGroup
    from pagedllm.engine.requests import RequestState
    from pagedllm.engine.scheduler import SequenceUpdate
    from pagedllm.errors import PagedLLMError
    from pagedllm.executors.base import Executor
    from pagedllm.outputs import FinishReason
    from pagedllm.types import ModelInfo

_SEED_MASK = (1 << 64) - 1


class Engine:
    """Runs requests to their end, a step at a time.

    Args:
        config: a resolved config.
        executor: a started executor.
        info: what its ``start`` returned.
    """

    def __init__(self, config: Config, executor: Executor, info: ModelInfo) -> None:
        budget = config.max_num_batched_tokens or 2048
        if budget < config.max_batch_size:
            raise ConfigError(
                f"max_num_batched_tokens={budget} must be at least "
                f"max_batch_size={config.max_batch_size}, one token for each sequence",
                "max_num_batched_tokens",
            )
        self._executor = executor
        self._info = info
        self._seed = config.seed or 0
        self.scheduler = Scheduler(
            CacheManager(
                info.num_pages,
                info.page_size,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_batch_size=config.max_batch_size,
            max_num_batched_tokens=budget,
            policy=config.scheduling_policy,
        )
        self._requests: dict[str, RequestState] = {}
        self._outputs: dict[SequenceState, tuple[RequestState, OutputState]] = {}
        self._touched: dict[str, RequestState] = {}
        self._driven: dict[SequenceState, DrivenGroup] = {}
        self._in_flight = 0
        self._order = 0
        # Nothing can be computed until a caller of driven sequences moves on.
        self._stalled = False
        self._counters = Counters()
        self._fatal: EngineError | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything."""
        if self._stalled:
            return False
        waiting = any(group.awaited for group in self._driven.values())
        return bool(self._requests) or self._in_flight > 0 or waiting

    @property
    def num_unfinished(self) -> int:
        """Requests in the engine."""
        return len(self._requests)

    # -- requests ------------------------------------------------------------------

    def add(self, state: RequestState, max_tokens: int) -> None:
        """Queue a request; one that cannot be queued fails at once."""
        request = state.request
        self._stalled = False
        if self._fatal is not None:
            self._fail_unqueued(state, self._fatal)
            return
        if request.request_id in self._requests:
            self._fail_unqueued(
                state,
                EngineError(f"request id {request.request_id!r} is in use; give each its own"),
            )
            return
        seed = request.params.seed
        if seed is None:
            # Spread by an odd constant, so that no two requests count through the same seeds.
            seed = self._seed + self._order * 0x9E3779B97F4A7C15
        sequences = []
        for index in range(request.params.n):
            sequence = SequenceState(
                request=request,
                index=index,
                seed=(seed + index) & _SEED_MASK,
                order=self._next_order(),
                max_tokens=max_tokens,
                tokens=list(request.prompt_token_ids),
            )
            writer = OutputText(state.decoder, request.prompt_token_ids, request.params)
            output = OutputState(sequence, writer)
            state.outputs.append(output)
            self._outputs[sequence] = (state, output)
            sequences.append(sequence)
        self._requests[request.request_id] = state
        self._counters.requests += 1
        self._counters.prompt_tokens += len(request.prompt_token_ids)
        self.scheduler.add(sequences)

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages; False when it is not (or no longer) here."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        self._stalled = False
        self._end(state, "abort", RequestAbortedError(f"request {request_id!r} was aborted"))
        self._notify()
        return True

    def shut_down(self) -> None:
        """Fail every request because the engine closes."""
        self._fail_all(EngineClosedError("the engine was closed before the request finished"))
        self._notify()

    # -- sequences that a caller drives --------------------------------------------

    def drive(self, group: DrivenGroup) -> None:
        """Compute the prompts of a group's rows; their logits are its result."""
        if self._fatal is not None:
            group.fail(self._fatal)
            return
        for family in group.begin(self._next_order):
            self.scheduler.add(family)
            self._driven.update(dict.fromkeys(family, group))
        self._counters.prompt_tokens += sum(len(s.tokens) for s in group.rows)
        self._stalled = False

    def advance(self, group: DrivenGroup, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Give a group's rows their next tokens; see :meth:`DrivenGroup.plan`."""
        if self._fatal is not None:
            group.fail(self._fatal)
            return
        left = set(group.rows)
        going, forks = group.plan(tokens, parents, self._next_order)
        for parent, child in forks:
            self.scheduler.fork(parent, child)
            self._driven[child] = group
        for sequence, token in going:
            self.scheduler.append(sequence, token)
        for sequence in left.difference(group.rows):
            del self._driven[sequence]
            self.scheduler.remove(sequence)
        self._counters.generated_tokens += len(tokens)
        self._stalled = False

    def leave(self, group: DrivenGroup) -> None:
        """Free a group's pages."""
        group.awaited.clear()
        for sequence in group.rows:
            if self._driven.pop(sequence, None) is not None:
                self.scheduler.remove(sequence)
        self._stalled = False

    # -- steps ---------------------------------------------------------------------

    def step(self) -> None:
        """Submit as many steps as may be in flight, collect the oldest, notify listeners."""
        begin = time.perf_counter()
        try:
            self._submit()
            if self._in_flight:
                output = self._executor.collect()
                self._in_flight -= 1
                self._counters.steps += 1
                for update in self.scheduler.update(output):
                    self._take(update)
                seconds = time.perf_counter() - begin
                self._counters.step_seconds.add(seconds)
                self.scheduler.step_seconds += 0.1 * (seconds - self.scheduler.step_seconds)
            elif self._driven:
                self._stalled = True
            elif self._requests:
                raise EngineError("the scheduler found nothing to compute: a bug in pagedllm")
        except Exception as error:  # noqa: BLE001 - reported to every request; see below
            # Not one step's failure, which comes back as a result: the executor itself is
            # gone, or our own books are wrong. Nothing that runs can be trusted to go on.
            problem = EngineError(f"the engine stopped: {describe(error)}")
            problem.__cause__ = error
            self._fatal = problem
            self._in_flight = 0
            self._fail_all(problem)
        self._notify()

    def _submit(self) -> None:
        while self._in_flight < self._executor.max_steps_in_flight:
            step = self.scheduler.schedule()
            if step is None:
                return
            self._executor.submit(step)
            self._in_flight += 1
            self._counters.computed_tokens += step.num_tokens
            self._counters.step_rows.add(len(step.rows))
            self._counters.step_tokens.add(step.num_tokens)

    def _take(self, update: SequenceUpdate) -> None:
        group = self._driven.get(update.sequence)
        if group is not None:
            if update.error is not None:
                self.leave(group)
                group.fail(_engine_error(update.error))
            else:
                group.take(update.sequence, update.output.logits)
            return
        found = self._outputs.get(update.sequence)
        if found is None:  # another answer of its request failed in this very step
            return
        state, output = found
        self._touched[state.request.request_id] = state
        if update.error is not None:
            self._end(state, "error", _engine_error(update.error))
            return
        try:
            with state.lock:
                finish = self._write(state, output, update)
        except Exception as error:  # noqa: BLE001 - one request's text must not end the others
            self._end(state, "error", _engine_error(error))
            return
        if finish is not None:
            self._finish(state, output, finish)

    def _write(
        self, state: RequestState, output: OutputState, update: SequenceUpdate
    ) -> FinishReason | None:
        """Add a result to an answer; return why the answer ends, if it does."""
        result, sequence = update.output, update.sequence
        if result.embedding is not None:
            state.embedding = result.embedding
            return "stop"
        for offset, entry in enumerate(result.prompt_logprobs, start=update.start + 1):
            state.prompt_logprobs[offset] = entry
        if result.token_id is None:
            return None
        if state.first_token_time is None:
            state.first_token_time = time.monotonic()
        self._counters.generated_tokens += 1
        token = result.token_id
        output.token_ids.append(token)
        if result.logprobs is not None:
            output.logprobs.append(result.logprobs)
        params = state.request.params
        count = len(output.token_ids)
        is_eos = token in state.request.eos_token_ids and not params.ignore_eos
        ends = count >= params.min_tokens and (is_eos or token in params.stop_token_ids)
        new, stop = output.writer.feed(token, ends)
        output.text += new
        output.text_offsets.append(len(output.text))
        if not ends and stop is None:
            if count < sequence.max_tokens:
                return None
            rest, stop = output.writer.finish()
            output.text += rest
            output.text_offsets[-1] = len(output.text)
        output.stop_reason = token if ends and not is_eos else stop
        return "stop" if ends or stop is not None else "length"

    # -- endings -------------------------------------------------------------------

    def _finish(self, state: RequestState, output: OutputState, reason: FinishReason) -> None:
        with state.lock:
            output.finish_reason = reason
            self.scheduler.remove(output.sequence)
            del self._outputs[output.sequence]
            if all(other.finish_reason is not None for other in state.outputs):
                state.finished_time = time.monotonic()
                self._counters.finished[reason] += 1
                del self._requests[state.request.request_id]

    def _end(self, state: RequestState, reason: FinishReason, error: PagedLLMError) -> None:
        """End all of a request's unfinished answers."""
        self._touched[state.request.request_id] = state
        with state.lock:
            state.error = error
            for output in state.outputs:
                if output.finish_reason is None:
                    output.finish_reason = reason
                    if output.sequence.status is not Status.FINISHED:
                        self.scheduler.remove(output.sequence)
                    self._outputs.pop(output.sequence, None)
            state.finished_time = time.monotonic()
            self._counters.finished[reason] += 1
            self._requests.pop(state.request.request_id, None)

    def _fail_unqueued(self, state: RequestState, error: PagedLLMError) -> None:
        with state.lock:
            state.error = error
            state.finished_time = time.monotonic()
        state.listener(state)

    def _fail_all(self, error: PagedLLMError) -> None:
        for state in list(self._requests.values()):
            self._end(state, "error", error)
        for group in set(self._driven.values()):
            self.leave(group)
            group.fail(error)

    def _notify(self) -> None:
        for state in self._touched.values():
            state.listener(state)
        self._touched.clear()

    # -- observation ---------------------------------------------------------------

    def health(self) -> str | None:
        """None when requests can be served, else why not."""
        return str(self._fatal) if self._fatal is not None else self._executor.health()

    def page_states(self) -> bytes:
        """What is with each page at this moment; see :meth:`PagePool.states`."""
        return self.scheduler.cache.pool.states()

    def stats(self) -> EngineStats:
        """Describe the engine at this moment."""
        scheduler = self.scheduler
        cache = scheduler.cache.stats((s.table, s.num_computed) for s in scheduler.running)
        return EngineStats.of(
            self._counters,
            cache,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            preemptions=scheduler.num_preemptions,
        )


def _engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    wrapped = EngineError(f"the request failed in a step: {describe(error)}")
    wrapped.__cause__ = error
    return wrapped


def describe(error: BaseException) -> str:
    """Say what an exception is, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
