"""An engine in a process of its own, used like one in a thread.

Owner: the facade. Invariants: the process is started from this file and imports nobody's
``__main__``, so no script needs a guard; what crosses is pickled plain data, requests one way
and what their outputs gained the other; when the process dies, whoever waits is told at once,
and when this process dies, the engine's reads the end of its input and ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from pagedllm._process_logs import forward, levels, relay
from pagedllm.engine.engine import Engine, describe
from pagedllm.engine.requests import OutputState, RequestState
from pagedllm.engine.sequence import SequenceState
from pagedllm.errors import EngineClosedError, EngineError, PagedLLMError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedllm.config import Config
    from pagedllm.engine.loop import EngineLoop
    from pagedllm.engine.text import OutputText, TokenDecoder
    from pagedllm.outputs import FinishReason
    from pagedllm.types import ModelInfo, Request, TokenLogprobs

T = TypeVar("T")
_CLOSE_SECONDS = 20.0
"""What the process is given to end by itself."""


@dataclass(frozen=True, slots=True)
class _OutputGain:
    """What one answer gained."""

    text: str
    token_ids: list[int]
    text_offsets: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    first_scheduled_time: float | None
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a request gained since its last one; times are the machine's own, not a process's."""

    request_id: str
    outputs: list[_OutputGain]
    prompt_logprobs: dict[int, TokenLogprobs]
    first_token_time: float | None
    finished_time: float | None
    error: Any
    embedding: tuple[float, ...] | None


class RemoteLoop:
    """Starts an engine in a process and talks to it; stands in for an :class:`EngineLoop`.

    Args:
        config: a resolved config.
        make: in the process, called with the config, returns the engine's loop and the decoder
            of tokens; sent there, so it must pickle.

    Raises:
        EngineError: the process ended before it was ready.
        whatever starting the executor there raises.
    """

    def __init__(
        self, config: Config, make: Callable[[Config], tuple[EngineLoop, TokenDecoder | None]]
    ) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # -c, not -m: the process must not be a package's main module.
            command = f"from pagedllm.engine.remote import main; main({theirs.fileno()})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", command], pass_fds=(theirs.fileno(),)
            )
            self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._states: dict[str, RequestState] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._num_calls = 0
        self._closed = threading.Event()
        self._dead: str | None = None
        started: Future[ModelInfo] = Future()
        self._calls[-1] = started
        self._reader = threading.Thread(target=self._read, name="pagedllm-remote", daemon=True)
        self._reader.start()
        try:
            self._connection.send((levels(), config, make))
            self.info: ModelInfo = started.result()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # it ended before it had read this
                raise EngineError(self._dead or "the engine's process did not start") from error
            raise

    # -- what an EngineLoop does ---------------------------------------------------

    def add(self, state: RequestState, max_tokens: int) -> None:
        """Queue a request.

        Raises:
            EngineClosedError, or EngineError when the process died.
            ValidationError: the request cannot be sent there.
        """
        request = state.request
        try:
            packed = pickle.dumps(request)
        except Exception as error:
            raise ValidationError(
                f"logits_processors: they cannot be sent to the engine's own process "
                f"({describe(error)}); define them in a module, name a plugin's, or start the "
                f"engine with engine='thread'",
                "logits_processors",
            ) from error
        for index in range(request.params.n):
            mirror = SequenceState(request, index, 0, 0, max_tokens, [])
            state.outputs.append(OutputState(mirror, cast("OutputText", None)))
        with self._lock:
            self._check()
            if request.request_id in self._states:
                raise EngineError(f"request id {request.request_id!r} is in use; give each its own")
            self._states[request.request_id] = state
            # Packed on its own, so that what cannot be read there fails one request. Where the
            # process has just died, the reader fails this request, too.
            with contextlib.suppress(OSError):
                self._connection.send(("add", request.request_id, packed, max_tokens))

    def abort(self, request_id: str) -> None:
        """End a request, if it is still there."""
        with self._lock, contextlib.suppress(OSError):
            if self._dead is None and not self._closed.is_set():
                self._connection.send(("abort", request_id))

    def post(self, function: Callable[[Engine], Any]) -> None:
        """Not possible here. Raises EngineError."""
        raise EngineError("driving sequences needs the engine in this process: engine='thread'")

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a method of :class:`Engine` there and return its result.

        Raises:
            EngineError: the process died, or the function is not a plain method.
        """
        name = getattr(function, "__name__", "")
        if getattr(Engine, name, None) is not function:
            self.post(function)
        done: Future[T] = Future()
        with self._lock:
            self._check()
            self._num_calls += 1
            self._calls[self._num_calls] = done
            with contextlib.suppress(OSError):  # the reader fails the call
                self._connection.send(("call", self._num_calls, name))
        return done.result()

    def close(self) -> None:
        """Stop the process; unfinished requests fail. Idempotent."""
        with self._lock:
            self._closed.set()
            with contextlib.suppress(OSError):
                self._connection.send(None)
        try:
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join()
            self._connection.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    # -- what comes back -----------------------------------------------------------

    def _check(self) -> None:
        if self._closed.is_set():
            raise EngineClosedError("the engine is closed; make a new one")
        if self._dead is not None:
            raise EngineError(self._dead)

    def _read(self) -> None:
        try:
            while True:
                kind, *content = self._connection.recv()
                if kind == "gains":
                    for gain in content[0]:
                        self._apply(gain)
                elif kind == "logged":
                    relay(content[0])
                else:
                    number, result = content
                    with self._lock:
                        done = self._calls.pop(number)
                    if kind == "result":
                        done.set_result(result)
                    else:
                        done.set_exception(result)
        except (EOFError, OSError):
            self._fail()

    def _apply(self, gain: _Gain) -> None:
        state = self._states.get(gain.request_id)
        if state is None:
            return
        with state.lock:
            # A request that could not even be queued comes back without outputs.
            for output, new in zip(state.outputs, gain.outputs, strict=False):
                output.text += new.text
                output.token_ids += new.token_ids
                output.text_offsets += new.text_offsets
                output.logprobs += new.logprobs
                output.finish_reason = new.finish_reason
                output.stop_reason = new.stop_reason
                output.sequence.first_scheduled_time = new.first_scheduled_time
                output.sequence.num_cached_tokens = new.num_cached_tokens
                output.sequence.num_preemptions = new.num_preemptions
            state.prompt_logprobs.update(gain.prompt_logprobs)
            state.first_token_time = gain.first_token_time
            state.finished_time = gain.finished_time
            state.error = gain.error
            state.embedding = gain.embedding
        if state.finished:
            with self._lock:
                self._states.pop(gain.request_id, None)
        state.listener(state)

    def _fail(self) -> None:
        """The process is gone: end whatever waits for it."""
        status = self.process.wait()
        reason = f"the engine's process ended with status {status}"
        if status < 0:
            reason = f"the engine's process was ended by {signal.Signals(-status).name}"
        error: EngineError = EngineError(reason)
        if self._closed.is_set():
            error = EngineClosedError("the engine was closed before the request finished")
        with self._lock:
            self._dead = reason
            states, self._states = list(self._states.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.set_exception(error)
        for state in states:
            with state.lock:
                state.error = error
                state.finished_time = time.monotonic()
                for output in state.outputs:
                    output.finish_reason = output.finish_reason or "error"
            state.listener(state)


# -- in the engine's process ---------------------------------------------------------------


@dataclass(slots=True)
class _Sent:
    """How far a request has been reported."""

    state: RequestState
    read: list[tuple[int, int]] = field(default_factory=list)
    """Of each answer, characters and tokens."""
    prompt: set[int] = field(default_factory=set)

    def gain(self) -> _Gain:
        """Return what is new, and remember it."""
        state = self.state
        with state.lock:
            gains = []
            for index, output in enumerate(state.outputs):
                if index == len(self.read):
                    self.read.append((0, 0))
                characters, tokens = self.read[index]
                self.read[index] = (len(output.text), len(output.token_ids))
                gains.append(
                    _OutputGain(
                        text=output.text[characters:],
                        token_ids=output.token_ids[tokens:],
                        text_offsets=output.text_offsets[tokens:],
                        logprobs=output.logprobs[tokens:],
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                        first_scheduled_time=output.sequence.first_scheduled_time,
                        num_cached_tokens=output.sequence.num_cached_tokens,
                        num_preemptions=output.sequence.num_preemptions,
                    )
                )
            new = {k: v for k, v in state.prompt_logprobs.items() if k not in self.prompt}
            self.prompt |= new.keys()
            return _Gain(
                state.request.request_id,
                gains,
                new,
                state.first_token_time,
                state.finished_time,
                state.error,
                state.embedding,
            )


_Changed: TypeAlias = "queue.SimpleQueue[RequestState | dict[str, Any] | None]"
"""Requests, lines of the log, and None at the end."""


def main(descriptor: int) -> None:
    """Serve the process at the other end of a socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns this one
    connection = Connection(descriptor)
    lock = threading.Lock()
    changed: _Changed = queue.SimpleQueue()
    sent: dict[str, _Sent] = {}
    writer = threading.Thread(target=_write, args=(connection, lock, changed, sent), daemon=True)
    writer.start()
    try:
        levels, config, make = connection.recv()
        forward(levels, changed.put)
        loop, decoder = make(config)
    except (EOFError, OSError):
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 - raised where the engine was asked for
        changed.put(None)
        writer.join(_CLOSE_SECONDS)
        connection.send(("error", -1, _portable(error)))
        return
    with lock:
        connection.send(("result", -1, loop.info))
    with contextlib.suppress(EOFError, OSError):
        while (command := connection.recv()) is not None:
            _obey(command, loop, decoder, changed, sent, connection, lock)
    loop.close()
    changed.put(None)
    writer.join(_CLOSE_SECONDS)


def _obey(
    command: tuple[Any, ...],
    loop: EngineLoop,
    decoder: TokenDecoder | None,
    changed: _Changed,
    sent: dict[str, _Sent],
    connection: Connection,
    lock: threading.Lock,
) -> None:
    kind, *content = command
    if kind == "add":
        request_id, packed, max_tokens = content
        try:
            request: Request = pickle.loads(packed)
        except Exception as error:  # noqa: BLE001 - somebody's module may do anything
            problem = EngineError(f"the engine's process cannot read it: {describe(error)}")
            gain = _Gain(request_id, [], {}, None, time.monotonic(), problem, None)
            with lock:
                connection.send(("gains", [gain]))
            return
        state = RequestState(request, decoder, changed.put)
        sent[request.request_id] = _Sent(state)
        loop.add(state, max_tokens)
    elif kind == "abort":
        loop.abort(content[0])
    else:
        number, name = content
        try:
            answer = ("result", number, loop.call(getattr(Engine, name)))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            answer = ("error", number, _portable(error))
        with lock:
            connection.send(answer)


def _write(
    connection: Connection, lock: threading.Lock, changed: _Changed, sent: dict[str, _Sent]
) -> None:
    """Report what changed, whatever came together in one message, and what was logged."""
    over = False
    while not over:
        found = [changed.get()]
        while not changed.empty():
            found.append(changed.get())
        messages: list[tuple[str, Any]] = []
        gains: list[_Gain] = []
        for each in {id(each): each for each in found}.values():
            if isinstance(each, dict):
                messages.append(("logged", each))
            elif each is None:
                over = True
            elif (entry := sent.get(each.request.request_id)) is not None:
                gains.append(entry.gain())
                if gains[-1].finished_time is not None:
                    del sent[each.request.request_id]
        with lock, contextlib.suppress(OSError):  # whoever could be told is gone
            for message in (*messages, ("gains", gains)):
                connection.send(message)


def _portable(error: BaseException) -> BaseException:
    """Return an exception that pickles; its cause stays behind."""
    if isinstance(error, PagedLLMError):
        return error
    return EngineError(describe(error))
