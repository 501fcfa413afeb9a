"""The tracer of one process, which makes spans of recorded times and sends them to a collector.

Nothing here waits for the collector. A thread of the SDK sends spans that have ended, and loses the oldest
when its queue is full (`OTEL_BSP_MAX_QUEUE_SIZE`).

OTLP goes over HTTP, as threads of gRPC survive no fork, and a front forks. It goes in JSON, as OTLP's
protobuf package has files of the same names as Envoy's, which the endpoint picker needs.

Owns: the SDK, wall-clock times of spans. Does not know: what is traced, what is logged of lost spans.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    HOST_NAME,
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mooncake.errors import ConfigError
from mooncake.messages.requests import SpanContext
from mooncake.tracing.losses import Losses
from mooncake.tracing.spans import Attributes, EndedSpan, Value

SERVICE = "mooncake-serve"
_LAST_SPANS_S = 0.5
"""Seconds in which the last spans of a process may leave."""
_PROPAGATOR = TraceContextTextMapPropagator()


class OpenSpan:
    """A span that has begun and not ended."""

    def __init__(self, span: Span, zero_ns: int) -> None:
        """Wrap a begun span.

        `zero_ns`: the wall clock minus the monotonic clock, in nanoseconds, measured when the span began.
        """
        self.span, self.zero_ns = span, zero_ns
        self.context = _context_in(set_span_in_context(span))
        """Context for the work below the span; None if the environment has disabled the SDK."""

    @property
    def is_recorded(self) -> bool:
        """Whether the span is sampled."""
        return self.span.is_recording()


class Tracer:
    """The maker of a process's spans. The spans are sent while `exporting` runs.

    Times in its arguments are those of `time.monotonic`, the clock of the event loop.
    """

    def __init__(self, endpoint: str, sample_ratio: float, instance: str) -> None:
        """Open a tracer.

        Args:
            endpoint: The collector's URL, without `/v1/traces`.
            sample_ratio: The share that is sampled of the traces that begin here, from 0 to 1.
            instance: The name of this process. The environment may name the service, and further attributes.
        """
        self._endpoint = endpoint
        own = {
            SERVICE_NAME: SERVICE,
            SERVICE_INSTANCE_ID: instance,
            SERVICE_VERSION: version("mooncake-serve"),
            HOST_NAME: socket.gethostname(),
        }
        self._provider = TracerProvider(
            ParentBasedTraceIdRatio(sample_ratio),
            Resource.create({**own, **OTELResourceDetector().detect().attributes}),
            shutdown_on_exit=False,
        )
        self._tracer = self._provider.get_tracer(SERVICE)

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Make a context in which a thread sends the spans. A fork within the context is not allowed.

        At the end the last spans have `_LAST_SPANS_S` seconds to leave, or no time if the collector did not
        take the spans before them. Raises ConfigError for a variable OTEL_* that the SDK refuses.
        """
        losses = Losses(self._endpoint)
        try:
            exporter = _Exporter(self._endpoint, losses)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:
            raise ConfigError(f"tracing: a variable OTEL_* has a wrong value: {error}") from None
        with losses.heard():
            try:
                yield
            finally:
                if losses.is_refused:
                    exporter.shutdown()
                ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
                ending.start()
                ending.join(_LAST_SPANS_S)

    def begin(
        self, name: str, parent: SpanContext | None, at_s: float, *, is_server: bool = False
    ) -> OpenSpan:
        """Return a begun span, for work whose context is needed before its end.

        Without a parent the span begins a trace, which may not be sampled.
        """
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        zero_ns = _zero_ns()
        began_ns = _wall_ns(at_s, zero_ns)
        span = self._tracer.start_span(name, _as_context(parent), kind=kind, start_time=began_ns)
        return OpenSpan(span, zero_ns)

    def record(self, work: EndedSpan, parent: SpanContext | None) -> None:
        """Record a piece of work below `parent`; nothing without a sampled parent."""
        if parent is not None and parent.is_sampled:
            self._record(work, _as_context(parent), _zero_ns())

    def end(self, open_span: OpenSpan, work: EndedSpan) -> None:
        """End a span with the attributes, parts and error of `work`.

        The span keeps its name and beginning.
        """
        if open_span.is_recorded:
            self._end(open_span.span, work, open_span.zero_ns)

    def _record(self, work: EndedSpan, parent: Context, zero_ns: int) -> None:
        span = self._tracer.start_span(work.name, parent, start_time=_wall_ns(work.began_s, zero_ns))
        self._end(span, work, zero_ns)

    def _end(self, span: Span, work: EndedSpan, zero_ns: int) -> None:
        for part in work.parts:
            self._record(part, set_span_in_context(span), zero_ns)
        span.set_attributes(_given(work.attributes))
        for event in work.events:
            span.add_event(event.name, _given(event.attributes), _wall_ns(event.at_s, zero_ns))
        if work.error:
            span.set_status(StatusCode.ERROR, work.error)
        span.end(_wall_ns(work.ended_s, zero_ns))


class _Exporter(SpanExporter):
    """An exporter that passes spans on, and reports which batches the collector takes."""

    def __init__(self, endpoint: str, losses: Losses) -> None:
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")
        self._losses = losses

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._losses.taken()
        else:
            self._losses.failed()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _as_context(span: SpanContext | None) -> Context:
    carrier = {} if span is None else {"traceparent": span.traceparent, "tracestate": span.tracestate}
    return _PROPAGATOR.extract(carrier, Context())


def _context_in(context: Context) -> SpanContext | None:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return SpanContext(**carrier) if carrier else None


def _given(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def _zero_ns() -> int:
    """Return the wall clock minus the monotonic clock, in nanoseconds: one value for a span and its parts."""
    return time.time_ns() - time.monotonic_ns()


def _wall_ns(at_s: float, zero_ns: int) -> int:
    return zero_ns + round(at_s * 1e9)
