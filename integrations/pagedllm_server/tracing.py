"""A span for every prompt that runs, sent to an OpenTelemetry collector.

Owner: the server integration. Invariants: nothing of a prompt or an answer is in a span, only
counts, settings and times; exporting happens in a thread of the library's own, with a bounded
queue, so that a collector that is slow or gone loses spans and delays nobody. Names are those of
the semantic conventions for generative AI; the conventions have none for the parts of a
request's time, and there they are vLLM's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pagedllm import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagedllm import RequestOutput

EXPORT_SECONDS = 5.0
"""What a batch of spans may take, also when the server stops."""
OPERATIONS = {"chat": "chat", "responses": "chat", "embeddings": "embeddings"}
"""The conventions' names by a part of the path; all else is ``text_completion``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run comes from: the path, and the headers that name the caller's span."""

    path: str = ""
    carrier: Mapping[str, str] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        """What the conventions call it."""
        parts = self.path.split("/")
        return next((name for key, name in OPERATIONS.items() if key in parts), "text_completion")


NOWHERE = Origin()
origin: ContextVar[Origin] = ContextVar("origin", default=NOWHERE)
"""Of the request that the running code serves."""


class Tracer:
    """Makes spans and sends them.

    Args:
        endpoint: of the collector, over HTTP; without a path, OpenTelemetry's own is used.
        service: name of this service.
        model: name of the model.

    Raises:
        ConfigError: the library is not installed, or the endpoint is no URL.
    """

    def __init__(self, endpoint: str, service: str, model: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"otlp_endpoint: {endpoint!r} is no URL of a collector; give one such as "
                f"http://localhost:4318",
                "otlp_endpoint",
            )
        for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            if not _is_there(name):
                raise ConfigError(
                    "otlp_endpoint: traces need OpenTelemetry: pip install 'pagedllm[otel]'",
                    "otlp_endpoint",
                )
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pagedllm_server")
        self._model = model

    def start(self, request: Any) -> Any:
        """Begin the span of a run that begins now."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        where, params = origin.get(), request.params
        operation = where.operation
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pagedllm",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        }
        if operation != "embeddings":
            attributes |= {
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.choice.count": params.n,
            }
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return self._tracer.start_span(
            f"{operation} {self._model}",
            context=TraceContextTextMapPropagator().extract(where.carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

    def end(self, span: Any, output: RequestOutput | None, error: BaseException | None) -> None:
        """End a run's span; ``output`` is the last of it, if there was one."""
        from opentelemetry.trace import Status, StatusCode

        if output is not None:
            span.set_attribute(
                "gen_ai.usage.output_tokens", sum(len(a.token_ids) for a in output.outputs)
            )
            reasons = [a.finish_reason for a in output.outputs if a.finish_reason is not None]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", output.num_cached_tokens)
            times = output.metrics
            if times is not None:
                for name, seconds in (
                    ("time_to_first_token", times.ttft),
                    ("time_in_queue", times.queue_time),
                    ("e2e", times.e2e_time),
                ):
                    if seconds is not None:
                        span.set_attribute(f"gen_ai.latency.{name}", seconds)
        if isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            span.set_attribute("error.type", "cancelled")
            span.set_status(Status(StatusCode.ERROR, "nobody waited for the rest"))
        elif error is not None:
            kind = getattr(error, "code", None) or type(error).__name__
            span.set_attribute("error.type", str(kind))
            span.set_status(Status(StatusCode.ERROR, " ".join(str(error).split())[:200]))
        span.end(time.time_ns())

    def close(self) -> None:
        """Send what is left, and stop; takes :data:`EXPORT_SECONDS` at most."""
        # The library's own bound is half a minute, which it spends on a collector that is gone.
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(EXPORT_SECONDS)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False
