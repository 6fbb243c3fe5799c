"""Metrics under the names that TGI's, vLLM's and our own dashboards read.

Owner: the server integration. Invariants: a registry per server, never the process's; what
the engine counts is read from its statistics at the moment of a scrape, what a client feels
is measured here; no metric's labels come from what clients send.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter as Tally
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pagedllm_server.heap import allocated_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedllm import RequestOutput

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0
)  # fmt: skip
TOKENS = tuple(float(2**power) for power in range(16))
FAILURES = ("validation", "overloaded", "generation", "incomplete_generation")
"""Values of TGI's label ``err``: refused, refused with 429, not ended, refused with 5xx."""


@dataclass(slots=True)
class Asked:
    """What an HTTP request has led to so far."""

    runs: int = 0


asked: ContextVar[Asked | None] = ContextVar("asked", default=None)
"""Of the request that the running code serves."""


class Metrics:
    """Everything that one server counts."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.stats: Any = None
        """The engine's statistics, set before a scrape; None when there are none."""
        self.restarts = 0
        self.tgi: Tally[str] = Tally()
        self.failures: Tally[str] = Tally()
        self.finished: Tally[str] = Tally()
        self.recent_ttft: deque[float] = deque(maxlen=256)
        self.recent_itl: deque[float] = deque(maxlen=256)
        registry = self.registry
        self.active = Gauge(
            "pagedllm_active_requests", "Prompts that were admitted", registry=registry
        )
        self.refused = Counter(
            "pagedllm_refused_requests", "Requests answered with 429", registry=registry
        )

        def both(
            name: str, vllm: str | None, tgi: str | None, text: str, buckets: Any
        ) -> list[Any]:
            made: list[Any] = []
            if vllm is not None:
                family = Histogram(
                    f"vllm:{vllm}", text, ["model_name"], registry=registry, buckets=buckets
                )
                made.append(family.labels(model_name))
            if tgi is not None:
                made.append(
                    Histogram(f"tgi_request_{tgi}", text, registry=registry, buckets=buckets)
                )
            self._times[name] = made
            return made

        self._times: dict[str, list[Any]] = {}
        both("ttft", "time_to_first_token_seconds", None, "Arrival to first token", SECONDS)
        both("itl", "inter_token_latency_seconds", None, "Between tokens", SECONDS)
        both("per_token", None, "mean_time_per_token_duration", "Seconds per token", SECONDS)
        both("e2e", "e2e_request_latency_seconds", "duration", "Arrival to end", SECONDS)
        both("queue", "request_queue_time_seconds", "queue_duration", "Waiting", SECONDS)
        both("prefill", "request_prefill_time_seconds", None, "First step to first token", SECONDS)
        both("decode", "request_decode_time_seconds", None, "First token to end", SECONDS)
        both(
            "inference", "request_inference_time_seconds", "inference_duration", "Running", SECONDS
        )
        both("validation", None, "validation_duration", "Checking the request", SECONDS)
        both("generated", "request_generation_tokens", "generated_tokens", "Tokens given", TOKENS)
        both("prompt", "request_prompt_tokens", "input_length", "Tokens of the prompt", TOKENS)
        both("max_new", None, "max_new_tokens", "Tokens asked for", TOKENS)
        registry.register(_EngineCollector(self))

    def observe(self, name: str, value: float | None) -> None:
        """Add to the histograms of one quantity, under all of its names."""
        if value is not None:
            for histogram in self._times[name]:
                histogram.observe(value)

    def watch(self, started: float) -> Watch:
        """Begin to measure a run."""
        self.tgi["count"] += 1
        if (request := asked.get()) is not None:
            request.runs += 1
        return Watch(self, started)

    def turned_away(self, status: int) -> None:
        """A request to generate was refused, with this status, before anything of it ran."""
        self.tgi["count"] += 1
        if status == 429:
            self.failures["overloaded"] += 1
        else:
            self.failures["validation" if status < 500 else "incomplete_generation"] += 1

    def render(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def recent(self) -> dict[str, float | None]:
        """Medians of the latest times, in milliseconds."""

        def median(values: deque[float]) -> float | None:
            return round(1000 * statistics.median(values), 2) if values else None

        return {"ttft_ms": median(self.recent_ttft), "itl_ms": median(self.recent_itl)}


class Watch:
    """Measures one run as its consumer sees it."""

    __slots__ = ("_first", "_last", "_metrics", "_started")

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._first: float | None = None
        self._last = started
        metrics.observe("validation", time.monotonic() - started)

    def saw(self, output: RequestOutput) -> None:
        """An output has come."""
        new = max((len(answer.new_token_ids) for answer in output.outputs), default=0)
        if not new:
            return
        now = time.monotonic()
        metrics = self._metrics
        if self._first is None:
            self._first = now
            metrics.observe("ttft", now - self._started)
            metrics.recent_ttft.append(now - self._started)
            new -= 1
        if new:
            # Tokens that came together: the reader was slow, or the engine quicker than it.
            gap = (now - self._last) / new
            metrics.recent_itl.append(gap)
            for _ in range(new):
                metrics.observe("itl", gap)
        self._last = now

    def ended(self, output: RequestOutput | None) -> None:
        """Nothing more will come; ``output`` is the last one, if there was one."""
        metrics = self._metrics
        whole = output is not None and output.finished
        if whole:
            metrics.tgi["success"] += 1
        else:
            metrics.failures["generation"] += 1
        if output is None or not whole:
            metrics.finished["abort"] += 1
            return
        for answer in output.outputs:
            metrics.finished[str(answer.finish_reason)] += 1
        metrics.observe("generated", sum(len(answer.token_ids) for answer in output.outputs))
        metrics.observe("prompt", len(output.prompt_token_ids))
        times = output.metrics
        if times is None or times.finished_time is None:
            return
        metrics.observe("e2e", times.e2e_time)
        metrics.observe("queue", times.queue_time)
        if times.first_scheduled_time is not None:
            inference = times.finished_time - times.first_scheduled_time
            metrics.observe("inference", inference)
            longest = max((len(answer.token_ids) for answer in output.outputs), default=0)
            metrics.observe("per_token", inference / longest if longest else None)
            if times.first_token_time is not None:
                metrics.observe("prefill", times.first_token_time - times.first_scheduled_time)
                metrics.observe("decode", times.finished_time - times.first_token_time)


class _EngineCollector:
    """What the engine counts, in everyone's words."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield a family per metric."""
        metrics = self._metrics
        for name in ("count", "success"):
            yield _plain(f"tgi_request_{name}", f"Requests: {name}", metrics.tgi[name])
        failures = Metric("tgi_request_failure", "Requests: failure", "unknown")
        for kind in FAILURES:
            failures.add_sample(failures.name, {"err": kind}, metrics.failures[kind])
        yield failures
        success = CounterMetricFamily(
            "vllm:request_success", "Finished answers", labels=["model_name", "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric([metrics.model_name, reason], metrics.finished[reason])
        yield success
        yield CounterMetricFamily(
            "pagedllm_engine_restarts", "Engines that had to be replaced", metrics.restarts
        )
        if metrics.stats is not None:
            yield from self._engine(metrics.stats)
        yield from _held()
        yield from _devices()

    def _engine(self, stats: Any) -> Iterator[Metric]:
        cache = stats.cache
        pages = cache.pages_used + cache.pages_cached + cache.pages_free
        used = cache.pages_used / pages
        for name, text, value in (
            ("num_requests_running", "Sequences in the batch", stats.running),
            ("num_requests_waiting", "Sequences that wait", stats.waiting),
            ("kv_cache_usage_perc", "Used part of the page cache, 0 to 1", used),
        ):
            yield self._gauge(f"vllm:{name}", text, value)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Tokens looked up", cache.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found", cache.prefix_hits),
            ("vllm:prompt_tokens", "Tokens of prompts", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", stats.generated_tokens),
            ("vllm:num_preemptions", "Sequences that gave way", stats.preemptions),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._metrics.model_name], value)
            yield family
        yield _plain("tgi_queue_size", "Sequences that wait", stats.waiting)
        yield _plain("tgi_batch_current_size", "Sequences in the batch", stats.running)
        yield _plain("tgi_batch_current_max_tokens", "Tokens that fit", pages * cache.page_size)
        yield _plain("tgi_batch_inference_count", "Steps", stats.steps)
        yield _plain("tgi_batch_inference_success", "Steps", stats.steps)
        yield _histogram("tgi_batch_next_size", "Sequences in a step", stats.step_rows)
        for name in ("inference_duration", "forward_duration", "decode_duration"):
            yield _histogram(f"tgi_batch_{name}", "Seconds of a step", stats.step_seconds)
        states = GaugeMetricFamily("pagedllm_pages", "Pages of the cache", labels=["state"])
        for state in ("used", "cached", "free"):
            states.add_metric([state], getattr(cache, f"pages_{state}"))
        yield states
        yield GaugeMetricFamily(
            "pagedllm_internal_fragmentation_percent",
            "Part of the used pages' room that holds no token",
            cache.internal_fragmentation,
        )
        for name, text, value in (
            ("prefix_hit_tokens", "Prompt tokens found in the cache", cache.prefix_hits),
            ("prefix_query_tokens", "Prompt tokens looked up there", cache.prefix_queries),
            ("preemptions", "Sequences that gave way", stats.preemptions),
            ("computed_tokens", "Tokens through the model", stats.computed_tokens),
            ("generated_tokens", "Tokens generated", stats.generated_tokens),
            ("steps", "Steps of the engine", stats.steps),
        ):
            yield CounterMetricFamily(f"pagedllm_{name}", text, value)
        if (known := stats.response_cache) is not None:
            for name, text in (
                ("lookups", "Requests that the response cache might know"),
                ("hits", "Requests that it answered"),
                ("stored", "Answers put into it"),
            ):
                yield CounterMetricFamily(
                    f"pagedllm_response_cache_{name}", text, getattr(known, name)
                )
            yield GaugeMetricFamily(
                "pagedllm_response_cache_down", "1 while requests go on without it", known.down
            )
        yield GaugeMetricFamily("pagedllm_running", "Sequences in the batch", stats.running)
        yield GaugeMetricFamily("pagedllm_waiting", "Sequences that wait", stats.waiting)
        yield _histogram("pagedllm_step_seconds", "Seconds of a step", stats.step_seconds)
        yield _histogram("pagedllm_batch_size", "Sequences in a step", stats.step_rows)
        yield _histogram("pagedllm_step_tokens", "Tokens in a step", stats.step_tokens)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._metrics.model_name], value)
        return family


def _plain(name: str, text: str, value: float) -> Metric:
    """A sample of exactly this name: the client library would add ``_total`` to a counter's."""
    family = Metric(name, text, "unknown")
    family.add_sample(name, {}, value)
    return family


def _histogram(name: str, text: str, found: Any) -> Metric:
    running, buckets = 0, []
    for bound, count in zip([*map(str, found.bounds), "+Inf"], found.counts, strict=True):
        running += count
        buckets.append((bound, running))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.total)


def _held() -> Iterator[Metric]:
    """What this process has allocated, as its allocators count it.

    Resident memory also has what they keep though it is free, and so says little of leaks.
    """
    yield GaugeMetricFamily(
        "pagedllm_python_blocks", "Blocks that Python's objects hold", sys.getallocatedblocks()
    )
    allocated = allocated_bytes()
    if allocated is not None:
        yield GaugeMetricFamily("pagedllm_allocated_bytes", "Other memory in use", allocated)


def _devices() -> Iterator[Metric]:
    """Memory and load of NVIDIA devices, where there are any and nvidia-ml-py is installed."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        used = GaugeMetricFamily("pagedllm_device_memory_bytes", "In use", labels=["device"])
        load = GaugeMetricFamily("pagedllm_device_utilisation", "0 to 1", labels=["device"])
        for index, handle in enumerate(handles):
            used.add_metric([str(index)], pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            load.add_metric([str(index)], pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    except Exception:  # noqa: BLE001 - no library, no driver or no device: then no such metric
        return
    yield used
    yield load
