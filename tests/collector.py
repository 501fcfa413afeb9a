"""An OpenTelemetry collector that keeps the spans that it gets by OTLP over HTTP, in JSON."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.deadline import DEADLINE_S


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as the collector got it. `parent_id` is empty for a span that begins a trace.

    Ids are hexadecimal digits, times nanoseconds since 1970.
    """

    process: str
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    began_ns: int
    ended_ns: int
    error: str
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    """The attributes of each event, by the event's name."""


@dataclass(slots=True)
class Collector:
    """The spans that a running collector has received, at `url`."""

    url: str
    spans: list[CollectedSpan] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, body: bytes) -> None:
        request = json.loads(body)
        with self.changed:
            for of_process in request["resourceSpans"]:
                resource = _attributes(of_process["resource"])
                for of_scope in of_process["scopeSpans"]:
                    self.spans += [_span(resource, span) for span in of_scope["spans"]]
            self.changed.notify_all()

    def wait_for(self, name: str, trace_id: str | None = None, **attributes: object) -> CollectedSpan:
        """Wait for a span with this name, trace and attributes, and return the first one."""

        def found() -> CollectedSpan | None:
            for span in self.spans:
                is_of_trace = trace_id is None or span.trace_id == trace_id
                if span.name == name and is_of_trace and span.attributes.items() >= attributes.items():
                    return span
            return None

        with self.changed:
            span = self.changed.wait_for(found, DEADLINE_S)
            assert span is not None, f"{name} is not among {sorted(span.name for span in self.spans)}"
        return span

    def of_trace(self, trace_id: str) -> list[CollectedSpan]:
        """Return the spans of a trace that have arrived so far."""
        with self.changed:
            return [span for span in self.spans if span.trace_id == trace_id]


def _span(resource: dict[str, Any], span: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        resource["service.instance.id"],
        resource["service.name"],
        span["name"],
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId", ""),
        span.get("traceState", ""),
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        span.get("status", {}).get("message", ""),
        _attributes(span),
        {event["name"]: _attributes(event) for event in span.get("events", ())},
    )


def _attributes(of: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in of.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    [(kind, content)] = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in content["values"]]
    return int(content) if kind == "intValue" else content


@contextmanager
def running_collector(port: int = 0) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/json")
            collector.add(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        serving = threading.Thread(target=server.serve_forever, args=[0.01])
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
