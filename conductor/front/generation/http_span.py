"""The span of an HTTP request for generation, which begins a trace or continues the client's trace.

Owns: the span's attributes and events, which never have text. Does not know: spans of the Conductor and of
workers.
"""

import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.front.requests.validation import ApiEndpoint, Job
from mooncake.messages.requests import SpanContext
from mooncake.tracing.spans import EndedSpan, SpanEvent, Value, why_ended

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer

_OPERATIONS = {ApiEndpoint.CHAT: "chat", ApiEndpoint.COMPLETION: "text_completion"}
"""The name of each endpoint's operation in OpenTelemetry's conventions."""
_HEADERS = _PARENT, _STATE = b"traceparent", b"tracestate"
_ENDS = frozenset({"stop", "length", "aborted"})


class TracedRequests:
    """ASGI middleware that gives each POST request for one of `paths` an `HttpSpan`.

    The span is in `scope["state"]["span"]`.
    """

    def __init__(self, app: ASGIApp, tracer: "Tracer", paths: frozenset[str], model_name: str) -> None:
        self._app, self._tracer, self._paths, self._model_name = app, tracer, paths, model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        client = _span_of_client(scope["headers"])
        span = state["span"] = HttpSpan(self._tracer, scope["path"], client, self._model_name)

        async def noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_status)
        except BaseException as error:
            span.error = why_ended(error)
            raise
        finally:
            span.end(state["request_id"])


def _span_of_client(headers: list[tuple[bytes, bytes]]) -> SpanContext | None:
    given = {name: value.decode("latin-1") for name, value in headers if name in _HEADERS}
    return SpanContext(given[_PARENT], given.get(_STATE, "")) if _PARENT in given else None


class HttpSpan:
    """The span of one HTTP request.

    `status` is the HTTP status; None until the response has started. `error` says why the request failed; it
    is empty if the request did not fail.
    """

    def __init__(self, tracer: "Tracer", path: str, client: SpanContext | None, model_name: str) -> None:
        self._tracer, self._began_s, self._name = tracer, time.monotonic(), f"POST {path}"
        self._open = tracer.begin(self._name, client, self._began_s, is_server=True)
        self._attributes: dict[str, Value | None] = {
            "http.request.method": "POST",
            "http.route": path,
            "gen_ai.request.model": model_name,
        }
        self._events: list[SpanEvent] = []
        self._ends: list[str] = []
        self.status: int | None = None
        self.error = ""

    @property
    def context(self) -> SpanContext | None:
        """The context for spans of the request's work; None if the environment has disabled the SDK."""
        return self._open.context

    def submitted(self, job: Job) -> None:
        """Record the attributes of the job that was submitted to the cluster."""
        sampling = job.sampling[0]
        self._attributes |= {
            "gen_ai.operation.name": _OPERATIONS[job.endpoint],
            "gen_ai.response.id": job.id,
            "gen_ai.request.choice.count": len(job.sampling),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "mooncake.stream": job.stream,
            "mooncake.tenant": job.tenant or None,
            "mooncake.slo_class": job.slo_class or None,
        }

    def choice_ended(self, index: int, how: str, first_s: float | None, last_s: float | None) -> None:
        """Record how a choice has ended: its finish reason, "aborted", or an error.

        `first_s` and `last_s` are the times of the choice's first and last token; None if it has no tokens.
        """
        self._ends.append(how if how in _ENDS else "error")
        if how not in _ENDS:
            self.error = how
        for name, at_s in (("first token", first_s), ("last token", last_s)):
            if at_s is not None:
                self._events.append(SpanEvent(at_s, name, {"mooncake.choice": index}))

    def used(self, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> None:
        """Record the token counts of all choices."""
        self._attributes |= {
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.output_tokens": num_output_tokens,
            "mooncake.cached_tokens": num_cached_tokens,
        }

    def end(self, request_id: str) -> None:
        """End the span. `request_id` is the id in the response's header.

        A status from 400 to 499 is no error of the span, as the server did not fail.
        """
        is_refusal = self.status is not None and 400 <= self.status < 500
        error = self.error or (
            f"HTTP {self.status}" if self.status is not None and self.status >= 500 else ""
        )
        last = {
            "http.response.status_code": self.status,
            "gen_ai.response.finish_reasons": self._ends or None,
            "mooncake.http_request_id": request_id,
            "mooncake.refusal": self.error if is_refusal and self.error else None,
        }
        self._tracer.end(
            self._open,
            EndedSpan(
                self._name,
                self._began_s,
                time.monotonic(),
                self._attributes | last,
                self._events,
                error="" if is_refusal else error,
            ),
        )
