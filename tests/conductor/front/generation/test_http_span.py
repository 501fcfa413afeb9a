"""Spans of HTTP requests, as a collector gets them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mooncake.messages.requests import Request
from mooncake.tracing.tracer import Tracer
from tests.collector import CollectedSpan, Collector, running_collector
from tests.conductor.front.fakes import MODEL_NAME, FakeCluster, Running, byte_model, running_front
from tests.deadline import DEADLINE_S

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = "/v1/chat/completions"
SECRET = "what nobody else may read"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def _traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        tracer = Tracer(collector.url, 1.0, "front")
        with running_front(tmp_path_factory.mktemp("front"), byte_model(), tracer=tracer) as front:
            yield front


@pytest.fixture
def traced(_traced: Running, collector: Collector) -> Running:
    _traced.cluster.reset()
    _traced.publish(_traced.cluster.state)
    collector.spans.clear()
    return _traced


def ask(front: Running, flags: str = "01", path: str = CHAT, **more: Any) -> httpx.Response:
    content = {"model": MODEL_NAME, "messages": [{"role": "user", "content": SECRET}], **more}
    headers = {"traceparent": f"00-{TRACE}-{CLIENT}-{flags}", "tracestate": "a=b"}
    return httpx.post(f"{front.url}{path}", json=content, headers=headers, timeout=DEADLINE_S)


def span_of(collector: Collector) -> CollectedSpan:
    span = collector.wait_for(f"POST {CHAT}")
    assert SECRET not in str(span)
    return span


def test_a_span_tells_of_all_choices(traced: Running, collector: Collector) -> None:
    answer = ask(traced, n=2, max_tokens=20, temperature=0.5)
    span = span_of(collector)
    assert (span.trace_id, span.parent_id, span.trace_state) == (TRACE, CLIENT, "a=b")
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL_NAME,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 14,
        "mooncake.cached_tokens": 16,
        "mooncake.stream": False,
        "mooncake.http_request_id": TRACE,
    }
    assert span.error == ""
    assert set(span.events) == {"first token", "last token"}
    sent = [request.span for request in traced.cluster.submitted]
    assert {of.traceparent for of in sent if of is not None} == {f"00-{TRACE}-{span.span_id}-01"}
    assert {of.tracestate for of in sent if of is not None} == {"a=b"}


def test_a_request_that_its_client_does_not_sample_is_passed_on_so(
    traced: Running, collector: Collector
) -> None:
    ask(traced, flags="00")
    [unsampled] = traced.cluster.submitted
    assert unsampled.span is not None
    assert unsampled.span.traceparent.startswith(f"00-{TRACE}-")
    assert not unsampled.is_traced
    ask(traced)
    span_of(collector)
    assert len(collector.spans) == 1


def test_a_refusal_has_its_reason_and_is_no_error(traced: Running, collector: Collector) -> None:
    async def reject(cluster: FakeCluster, request: Request) -> None:
        await cluster.reject(request, 429, "all instances are busy", 1.0)

    traced.cluster.behaviour = reject
    ask(traced)
    span = span_of(collector)
    assert span.attributes["http.response.status_code"] == 429
    assert span.attributes["mooncake.refusal"] == "all instances are busy"
    assert span.error == ""


def test_an_invalid_request_has_a_span(traced: Running, collector: Collector) -> None:
    ask(traced, temperature="hot")
    span = span_of(collector)
    assert (span.attributes["http.response.status_code"], span.error) == (400, "")


def test_a_failure_is_an_error(traced: Running, collector: Collector) -> None:
    async def fail(cluster: FakeCluster, request: Request) -> None:
        await cluster.fail(request, "both instances are lost")

    traced.cluster.behaviour = fail
    ask(traced)
    span = span_of(collector)
    assert (span.attributes["http.response.status_code"], span.error) == (500, "both instances are lost")


@contextmanager
def begun_stream(front: Running) -> Iterator[Iterator[str]]:
    """Lines of an answer behind the first, of which no end comes by itself."""

    async def begin(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, list(b"Hel"))

    front.cluster.behaviour = begin
    content = {"model": MODEL_NAME, "messages": [{"role": "user", "content": SECRET}], "stream": True}
    with httpx.stream("POST", f"{front.url}{CHAT}", json=content, timeout=DEADLINE_S) as response:
        lines = response.iter_lines()
        assert next(lines)
        yield lines


def test_a_failure_within_a_stream_is_an_error(traced: Running, collector: Collector) -> None:
    with begun_stream(traced) as lines:
        failing = traced.cluster.fail(traced.cluster.submitted[0], "both instances are lost")
        asyncio.run_coroutine_threadsafe(failing, traced.cluster.loop).result(DEADLINE_S)
        assert "both instances are lost" in "".join(lines)
    span = span_of(collector)
    assert (span.attributes["http.response.status_code"], span.error) == (200, "both instances are lost")
    assert span.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_a_client_that_hangs_up_is_told(traced: Running, collector: Collector) -> None:
    with begun_stream(traced):
        pass
    span = span_of(collector)
    assert span.attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert span.parent_id == ""


def test_only_what_generates_is_traced(traced: Running, collector: Collector) -> None:
    assert httpx.get(f"{traced.url}/health", timeout=DEADLINE_S).status_code == 200
    assert ask(traced, path="/tokenize", prompt="x").status_code in (200, 400)
    ask(traced)
    span_of(collector)
    assert len(collector.spans) == 1
