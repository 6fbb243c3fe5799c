"""The engine as the routes see it: ready or not, bounded, with deadlines, counted.

Owner: the server integration; lives in the event loop's thread. Invariants: every request
that is admitted is given back (:meth:`Service.admit` is a context manager), and every run
ends in exactly one entry of the metrics; a run whose consumer stops, or whose time is over,
is aborted in the engine, which frees its pages after the step in flight.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pagedllm import AsyncLLM, EngineError, PagedLLMError, SamplingParams
from pagedllm_server.errors import (
    invalid,
    not_ready,
    overloaded,
    shortened,
    timed_out,
    unsupported,
)
from pagedllm_server.life import BackOff, in_daemon
from pagedllm_server.logs import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from pagedllm import Config, RequestOutput
    from pagedllm.structured import PreparedChat
    from pagedllm_server.metrics import Metrics
    from pagedllm_server.options import ServerOptions
    from pagedllm_server.tracing import Tracer

logger = logging.getLogger(__name__)

Pooling = Literal["mean", "last"]
LONG_TEXT = 2_000
"""Characters from which on a prompt is tokenised in another thread: about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request says about when it is wanted."""

    timeout: float | None = None
    """Seconds after which it is stopped."""
    priority: int = 0
    cache_salt: str = ""
    ttft_target: float | None = None
    """Seconds to the first token, for the engine's deadline policy."""
    e2e_target: float | None = None
    """Seconds to the whole answer."""


class Service:
    """Owns the engine, from before it is loaded until the server stops."""

    def __init__(
        self,
        config: Config,
        options: ServerOptions,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.options = options
        self.metrics = metrics
        self.tracer = tracer
        self.problem: str | None = "the model is loading"
        """Why requests cannot be served now; None when they can."""
        self.failed: Exception | None = None
        """What loading the model at the start raised."""
        self.restarts = 0
        self.draining = False
        self._llm: AsyncLLM | None = None
        self._active = 0
        self._recent_seconds = 1.0
        self._back_off = BackOff()
        self._ready_since = 0.0
        self._watcher: asyncio.Task[None] | None = None

    # -- the engine's life ---------------------------------------------------------

    async def load(self, on_ready: Callable[[], None], on_failure: Callable[[], None]) -> None:
        """Load the model, then watch over its engine; tell how loading ended."""
        try:
            self._llm = await in_daemon(self._make)
        except Exception as error:  # noqa: BLE001 - reported by whoever asked for the start
            self.problem, self.failed = f"the model cannot be loaded: {error}", error
            on_failure()
            return
        self.problem, self._ready_since = None, time.monotonic()
        # What is there now stays: the collector need not look through it while tokens flow.
        gc.collect()
        gc.freeze()
        self._watcher = asyncio.create_task(self._watch())
        on_ready()

    def _make(self) -> AsyncLLM:
        config = self.config
        if config.engine == "auto":
            # A GPU's driver may take its process with it, and there is more for the host to do.
            on_gpu = config.resolve().device.startswith("cuda")
            config = config.replace(engine="process" if on_gpu else "thread")
        llm = AsyncLLM(config)
        if not config.skip_tokenizer_init:
            _ = llm.tokenizer  # loaded in full now, rather than while the first chat waits
        return llm

    async def _watch(self) -> None:
        """Notice an engine that has stopped, and make a new one."""
        while not self.draining:
            await asyncio.sleep(0.25)
            llm = self._llm
            try:
                reason = await asyncio.to_thread(llm.health) if llm else "there is no engine"
            except PagedLLMError as error:
                reason = str(error)
            if reason is not None and not self.draining:
                await self._restart(reason)

    async def _restart(self, reason: str) -> None:
        served = time.monotonic() - self._ready_since
        while not self.draining:
            delay = self._back_off.next(served)
            self.problem = f"the engine stopped and is being restarted in {delay:g} s: {reason}"
            logger.error("%s", self.problem)
            broken, self._llm = self._llm, None
            if broken is not None:
                gc.unfreeze()
                await broken.aclose()
            await asyncio.sleep(delay)
            self.restarts += 1
            try:
                self._llm = await in_daemon(self._make)
            except Exception as error:  # noqa: BLE001 - tried again, ever more slowly
                reason, served = str(error), 0.0
            else:
                self.problem, self._ready_since = None, time.monotonic()
                logger.warning("the engine is back after restart %d", self.restarts)
                return

    async def close(self) -> None:
        """Stop the engine; what still runs fails."""
        self.draining, self.problem = True, "the server is shutting down"
        if self._watcher is not None:
            self._watcher.cancel()
        llm, self._llm = self._llm, None
        if llm is not None:
            await llm.aclose()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    @property
    def llm(self) -> AsyncLLM:
        """The engine. Raises ApiError (503) when it cannot serve."""
        if self._llm is None or self.problem is not None:
            raise not_ready(self.problem or "there is no engine")
        return self._llm

    @property
    def loaded(self) -> AsyncLLM:
        """The engine, also while it takes no new requests. Raises ApiError (503): none."""
        if self._llm is None:
            raise not_ready(self.problem or "there is no engine")
        return self._llm

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        names = self.options.served_model_name
        return names[0] if names else self.config.model

    async def stats(self) -> Any:
        """The engine's statistics, or None while there is no engine."""
        llm = self._llm
        if llm is None:
            return None
        try:
            return await asyncio.to_thread(llm.stats)
        except EngineError:
            return None

    async def page_states(self) -> bytes:
        """The state of each page of the cache. Raises ApiError (503): there is no engine."""
        try:
            return await asyncio.to_thread(self.loaded.page_states)
        except EngineError as error:
            raise not_ready(str(error)) from error

    # -- prompts -------------------------------------------------------------------

    async def tokenize(self, text: str) -> list[int]:
        """Return a prompt's token ids."""
        llm = self.llm
        if len(text) < LONG_TEXT:
            return llm.tokenize(text)
        return await asyncio.to_thread(llm.tokenize, text)

    async def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, **options: Any
    ) -> PreparedChat:
        """Format a conversation, and add what its tools ask for to its parameters."""
        llm = self.llm
        size = sum(len(str(message.get("content"))) for message in messages)
        if size < LONG_TEXT and not options.get("tools"):
            return llm.prepare_chat(messages, params, **options)
        return await asyncio.to_thread(llm.prepare_chat, messages, params, **options)

    def check_prompt(self, num_tokens: int, name: str) -> None:
        """Refuse a prompt above the server's own limit."""
        limit = self.options.max_input_tokens
        if limit is not None and num_tokens > limit:
            raise invalid(
                f"{name}: the prompt has {num_tokens} tokens and max_input_tokens is {limit}",
                name,
                "context_length_exceeded",
            )

    def check_params(self, params: SamplingParams, names: Mapping[str, str]) -> None:
        """Refuse what the server's limits do not allow; ``names`` are the route's own."""
        options = self.options
        for name, value, limit, option in (
            ("n", params.n, options.max_best_of, "max_best_of"),
            ("stop", len(params.stop), options.max_stop_sequences, "max_stop_sequences"),
            ("logprobs", params.logprobs or 0, options.max_top_n_tokens, "max_top_n_tokens"),
        ):
            shown = names.get(name, name)
            if value > limit:
                raise invalid(
                    f"{shown}: {value} is more than this server's {option}, {limit}", shown
                )
        for spec in params.logits_processors:
            asked = spec["name"] if isinstance(spec, dict) else spec
            if asked not in options.logits_processors:
                allowed = ", ".join(options.logits_processors) or "none"
                raise unsupported(
                    "logits_processors",
                    f"this server lets requests name {allowed}, not {str(asked)[:80]!r} "
                    "(--logits-processors)",
                )
        if params.structured_output is not None and options.disable_grammar_support:
            shown = names.get("structured_output", "response_format")
            raise unsupported(shown, "this server was started with --disable-grammar-support")

    # -- running -------------------------------------------------------------------

    @contextmanager
    def admit(self, number: int = 1) -> Iterator[None]:
        """Hold a place for ``number`` prompts. Raises ApiError (429, 503)."""
        if self.draining:
            raise not_ready("the server is shutting down")
        _ = self.llm
        limit = self.options.max_concurrent_requests
        if number > self.options.max_client_batch_size:
            raise invalid(
                f"the request has {number} prompts and max_client_batch_size is "
                f"{self.options.max_client_batch_size}; send them in several requests",
                "prompt",
            )
        if self._active + number > limit:
            self.metrics.refused.inc()
            raise overloaded(
                f"{self._active} requests run or wait, and max_concurrent_requests is {limit}; "
                f"try again later",
                max(1, math.ceil(self._recent_seconds / 2)),
            )
        self._active += number
        self.metrics.active.set(self._active)
        try:
            yield
        finally:
            self._active -= number
            self.metrics.active.set(self._active)

    async def start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        limits: Limits,
        size: int,
        pooling: Pooling | None = None,
    ) -> Run:
        """Check a request and start it.

        Args:
            prompt: token ids, or text.
            params: within the server's limits.
            limits: when the request is wanted.
            size: characters of the prompt, which decide where it is checked.
            pooling: embed the prompt, instead of generating with ``params``.

        Raises:
            ApiError: the engine cannot serve.
            ValidationError: nor could it ever serve this request.
        """
        llm = self.llm
        identity = new_id("run")

        def prepare() -> Any:
            if pooling is not None:
                return llm.prepare_embedding(
                    prompt,
                    pooling=pooling,
                    request_id=identity,
                    priority=limits.priority,
                    cache_salt=limits.cache_salt,
                )
            return llm.prepare(
                prompt,
                params,
                request_id=identity,
                priority=limits.priority,
                cache_salt=limits.cache_salt,
                ttft_target=limits.ttft_target,
                e2e_target=limits.e2e_target,
            )

        started = time.monotonic()
        constrained = params is not None and params.structured_output is not None
        if params is not None:
            size += sum(map(len, params.bad_words))
        # What a plugin makes of a processor's name may take time, too.
        named = params is not None and bool(params.logits_processors)
        heavy = size >= LONG_TEXT or constrained or named
        try:
            request = await asyncio.to_thread(prepare) if heavy else prepare()
        except (ValueError, TypeError, OverflowError) as error:
            # A schema may hold what its compiler never thought of, such as numbers of any size.
            if isinstance(error, PagedLLMError) or not constrained:
                raise
            raise invalid(f"the constraint cannot be used: {shortened(str(error))}") from error
        if params is not None:
            self.metrics.observe("max_new", params.max_tokens)
        timeout = limits.timeout if limits.timeout is not None else self.options.timeout
        return Run(self, llm, request, timeout, started)

    def ended(self, seconds: float) -> None:
        """A run took this long; a guess at the next one's time is made of it."""
        self._recent_seconds += 0.1 * (seconds - self._recent_seconds)


class Run:
    """A request in the engine.

    Args:
        service: that started it.
        llm: the engine.
        request: prepared.
        timeout: seconds after which to stop it.
        started: seconds of ``time.monotonic()``.
    """

    def __init__(
        self, service: Service, llm: AsyncLLM, request: Any, timeout: float | None, started: float
    ) -> None:
        self._service = service
        self._llm = llm
        self._timeout = timeout
        self._started = started
        self._late = False
        self._closed = False
        self._last: RequestOutput | None = None
        self._failure: BaseException | None = None
        self._watch = service.metrics.watch(started)
        self._stream = llm.submit(request)  # first, since it may raise
        self._span = service.tracer.start(request) if service.tracer is not None else None
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._stop)

    def _stop(self) -> None:
        self._late = True
        self._abort = asyncio.ensure_future(self._llm.abort(self._stream.request_id))

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Yield the growing output.

        Raises:
            ApiError: the timeout passed.
            EngineError: the request failed.
        """
        try:
            async for output in self._stream:
                self._last = output
                self._watch.saw(output)
                if self._late and self._timeout is not None and not _complete(output):
                    count = sum(len(answer.token_ids) for answer in output.outputs)
                    raise timed_out(self._timeout, count)
                if any(answer.finish_reason == "abort" for answer in output.outputs):
                    raise EngineError("the request was aborted")
                yield output
        except BaseException as error:
            self._failure = error
            raise
        finally:
            await self.aclose()

    async def finished(self) -> RequestOutput:
        """Return the whole output. Raises as :meth:`outputs`."""
        last: RequestOutput | None = None
        async for output in self.outputs():
            last = output
        if last is None or not last.finished:
            raise EngineError("the request ended without a result")
        return last

    async def aclose(self) -> None:
        """Abort the request, unless it has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._stream.aclose()
        self._watch.ended(self._last)
        if self._span is not None and self._service.tracer is not None:
            self._service.tracer.end(self._span, self._last, self._failure)
        self._service.ended(time.monotonic() - self._started)


def _complete(output: RequestOutput) -> bool:
    return output.finished and all(a.finish_reason in ("stop", "length") for a in output.outputs)
