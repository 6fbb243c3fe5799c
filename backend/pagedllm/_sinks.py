"""Hands the engine's metrics to what plugins have registered to receive them.

Owner: the facade. Invariants: a sink is called in a thread of its own, so one that is slow or
hangs holds up neither a step, nor a request, nor another sink, and closing waits for it a
bounded time; whatever it raises is one warning, and it is called again at the next interval.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from pagedllm._named import make
from pagedllm.errors import ConfigError, PagedLLMError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedllm.config import Config
    from pagedllm.hookspecs import MetricsSink
    from pagedllm.metrics import EngineStats

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""For the last reports of all sinks together."""


class Reporter:
    """One sink and its thread."""

    def __init__(self, sink: MetricsSink, name: str, config: Config) -> None:
        self._sink = sink
        self._name = name
        self._model = config.model
        self._interval = config.metrics_interval
        self._stop = threading.Event()
        self._warned = False
        self._thread: threading.Thread | None = None

    def start(self, stats: Callable[[], EngineStats]) -> None:
        """Report every interval from now on."""
        self._thread = threading.Thread(
            target=self._run, args=(stats,), name="pagedllm-metrics", daemon=True
        )
        self._thread.start()

    def _run(self, stats: Callable[[], EngineStats]) -> None:
        last = False
        while not last:
            last = self._stop.wait(self._interval)
            try:
                # Between two steps, as every other caller's questions are answered.
                found = dataclasses.asdict(stats())
            except PagedLLMError:
                continue  # the engine is gone or being started again
            self._call("write", {"time": time.time(), "model": self._model, **found})
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self._sink, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - any plugin's
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            logger.log(level, "The metrics sink %r failed in %s(): %s", self._name, method, text)

    def stop(self) -> None:
        """Ask for the last report."""
        self._stop.set()

    def wait(self, deadline: float) -> None:
        """Wait for it until a time of ``time.monotonic()``."""
        if self._thread is None or threading.current_thread() is self._thread:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "The metrics sink %r takes too long; its last report is lost", self._name
            )


def make_reporters(config: Config) -> tuple[Reporter, ...]:
    """Make the sinks that the configuration names. Raises ConfigError."""
    found = []
    for spec in config.metrics_sinks:
        name = spec if isinstance(spec, str) else spec["name"]
        sink = make("pagedllm_metrics_sinks", "metrics_sinks", spec, config, config)
        for method in ("write", "close"):
            if not callable(getattr(sink, method, None)):
                raise ConfigError(
                    f"metrics_sinks: '{name}' made {type(sink).__name__}, which has no {method}()",
                    "metrics_sinks",
                )
        found.append(Reporter(sink, name, config))
    return tuple(found)


def close_after(reporters: Sequence[Reporter], close: Callable[[], None]) -> None:
    """Have the last reports written, as far as there is time, and then call ``close``."""
    for reporter in reporters:
        reporter.stop()
    deadline = time.monotonic() + CLOSE_SECONDS
    for reporter in reporters:
        reporter.wait(deadline)
    close()
