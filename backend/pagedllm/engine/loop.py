"""The thread that an engine lives in.

Owner: the facade (:mod:`pagedllm.llm`). Invariants: the model is loaded, run and freed in
this one thread; other threads only put commands in its queue, so any number of them may
share an engine, and their requests share its batches. The thread holds no reference to
the facade, which can therefore be collected and closed.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pagedllm.engine.engine import Engine
from pagedllm.errors import EngineClosedError
from pagedllm.metrics import StatsLogger

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedllm.config import Config
    from pagedllm.engine.requests import RequestState
    from pagedllm.executors.base import Executor
    from pagedllm.types import ModelInfo

T = TypeVar("T")


class EngineLoop:
    """Starts an engine in a thread of its own and talks to it.

    Args:
        config: a resolved config.
        executor: not yet started.

    Raises:
        whatever starting the executor raises.
    """

    def __init__(self, config: Config, executor: Executor) -> None:
        self._commands: queue.SimpleQueue[Callable[[Engine], Any] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        # Held to put a command in, and to close: so whatever is in the queue is answered.
        self._gate = threading.Lock()
        started: Future[ModelInfo] = Future()
        # A daemon, since an interpreter that exits joins other threads before it runs the
        # finalisers that would stop this one.
        self._thread = threading.Thread(
            target=_run,
            args=(config, executor, self._commands, self._closed, self._gate, started),
            name="pagedllm-engine",
            daemon=True,
        )
        self._thread.start()
        try:
            self.info: ModelInfo = started.result()
        except BaseException:
            self.close()
            raise

    def add(self, state: RequestState, max_tokens: int) -> None:
        """Queue a request. Raises EngineClosedError."""
        self._put(partial(Engine.add, state=state, max_tokens=max_tokens))

    def abort(self, request_id: str) -> None:
        """End a request, if it is still there. A closed engine has ended it already."""
        self.post(partial(Engine.abort, request_id=request_id))

    def post(self, function: Callable[[Engine], Any]) -> None:
        """Run a function in the engine's thread, between two steps, unless it is closed."""
        with self._gate:
            if not self._closed.is_set():
                self._commands.put(function)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function in the engine's thread, between two steps, and return its result.

        Raises:
            EngineClosedError: the engine is closed.
        """
        done: Future[T] = Future()

        def run(engine: Engine) -> None:
            try:
                done.set_result(function(engine))
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                done.set_exception(error)

        self._put(run)
        return done.result()

    def close(self) -> None:
        """Stop the thread and free what it holds; unfinished requests fail. Idempotent."""
        with self._gate:
            self._closed.set()
            self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    def _put(self, command: Callable[[Engine], Any]) -> None:
        with self._gate:
            if self._closed.is_set():
                raise EngineClosedError("the engine is closed; make a new one")
            self._commands.put(command)


def _run(
    config: Config,
    executor: Executor,
    commands: queue.SimpleQueue[Callable[[Engine], Any] | None],
    closed: threading.Event,
    gate: threading.Lock,
    started: Future[ModelInfo],
) -> None:
    try:
        info = executor.start()
        engine = Engine(config, executor, info)
    except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
        executor.close()
        started.set_exception(error)
        return
    started.set_result(info)
    del started
    try:
        _serve(config, engine, commands, closed)
    finally:
        with gate:
            closed.set()
        # Requests put in since the last step must not wait for ever.
        _drain(engine, commands)
        engine.shut_down()
        executor.close()


def _serve(
    config: Config,
    engine: Engine,
    commands: queue.SimpleQueue[Callable[[Engine], Any] | None],
    closed: threading.Event,
) -> None:
    logger = StatsLogger()
    while not closed.is_set():
        if not engine.has_work:
            command = commands.get()
            if command is None:
                return
            command(engine)
            if engine.has_work and config.batch_timeout_ms:
                _wait_for_company(config, engine, commands, closed)
        _drain(engine, commands)
        if engine.has_work:
            engine.step()
            if not config.disable_log_stats and logger.is_due:
                logger.log(engine.stats())


def _drain(engine: Engine, commands: queue.SimpleQueue[Callable[[Engine], Any] | None]) -> None:
    while not commands.empty():  # this thread alone takes from it
        command = commands.get()
        if command is not None:
            command(engine)


def _wait_for_company(
    config: Config,
    engine: Engine,
    commands: queue.SimpleQueue[Callable[[Engine], Any] | None],
    closed: threading.Event,
) -> None:
    deadline = time.monotonic() + config.batch_timeout_ms / 1000
    while engine.num_unfinished < config.max_batch_size and not closed.is_set():
        try:
            command = commands.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        if command is not None:
            command(engine)
