"""Spans as a collector gets them, and a collector that does not take them."""

import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from mooncake.config.sections import TracingConfig
from mooncake.errors import ConfigError
from mooncake.messages.requests import SpanContext
from mooncake.tracing import losses
from mooncake.tracing.opening import open_tracer
from mooncake.tracing.spans import EndedSpan, SpanEvent
from mooncake.tracing.tracer import Tracer
from tests.collector import Collector, running_collector
from tests.ports import free_port

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = SpanContext(f"00-{TRACE}-{PARENT}-01", "a=b")
HANGING = socket.create_server(("127.0.0.1", 0))
"""Accepts connections and never answers, to the end of the tests: its end would be another trouble."""
NOT_SAMPLED = SpanContext(f"00-{TRACE}-{PARENT}-00")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


def work(name: str = "work", **fields: object) -> EndedSpan:
    now_s = time.monotonic()
    return EndedSpan(name, now_s - 2, now_s - 1, **fields)  # type: ignore[arg-type]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the product has logged."""
    return [record.getMessage() for record in caplog.records if record.name == losses.__name__]


def test_recorded_work_arrives_below_its_parent(collector: Collector) -> None:
    tracer = Tracer(collector.url, 0.0, "prefill-0")
    began_s = time.monotonic() - 3
    with tracer.exporting():
        open_span = tracer.begin("request", SAMPLED, began_s)
        part = work("part", error="it has failed")
        attributes = {"tokens": 3, "names": ["x", "y"], "unknown": None}
        event = SpanEvent(began_s + 1, "first token", {"choice": 0})
        tracer.record(work(attributes=attributes, events=[event], parts=[part]), open_span.context)
        tracer.end(open_span, EndedSpan("request", began_s, time.monotonic()))
    request, work_span, part_span = map(collector.wait_for, ("request", "work", "part"))
    assert {(span.trace_id, span.trace_state) for span in collector.spans} == {(TRACE, "a=b")}
    assert (request.parent_id, work_span.parent_id) == (PARENT, request.span_id)
    assert part_span.parent_id == work_span.span_id
    assert (request.process, request.service) == ("prefill-0", "mooncake-serve")
    assert work_span.attributes == {"tokens": 3, "names": ["x", "y"]}
    assert work_span.events == {"first token": {"choice": 0}}
    assert (work_span.error, part_span.error) == ("", "it has failed")
    assert work_span.ended_ns - work_span.began_ns == pytest.approx(1e9, abs=1e3)
    assert request.began_ns < work_span.began_ns < work_span.ended_ns < request.ended_ns <= time.time_ns()


def test_a_clock_that_is_set_changes_no_duration(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, began_s, time_ns = Tracer(collector.url, 1.0, "front"), time.monotonic(), time.time_ns
    with tracer.exporting():
        open_span = tracer.begin("request", SAMPLED, began_s)
        monkeypatch.setattr(time, "time_ns", lambda: time_ns() - 3600 * 10**9)
        tracer.end(open_span, EndedSpan("request", began_s, began_s + 1))
        monkeypatch.undo()
    request = collector.wait_for("request")
    assert request.ended_ns - request.began_ns == pytest.approx(1e9, abs=1e3)


def test_work_that_took_no_time_ends_when_it_began(collector: Collector) -> None:
    now_s = time.monotonic()
    at_once = [EndedSpan(f"part {number}", now_s, now_s) for number in range(20)]
    tracer = Tracer(collector.url, 1.0, "prefill-0")
    with tracer.exporting():
        tracer.record(EndedSpan("work", now_s, now_s, parts=at_once), SAMPLED)
    collector.wait_for("work")
    assert len({at_ns for span in collector.spans for at_ns in (span.began_ns, span.ended_ns)}) == 1


def test_what_is_not_sampled_is_passed_on_and_not_sent(collector: Collector) -> None:
    tracer = Tracer(collector.url, 0.0, "prefill-0")
    with tracer.exporting():
        for parent in (NOT_SAMPLED, None):
            open_span = tracer.begin("request", parent, time.monotonic())
            assert open_span.context is not None
            assert not open_span.context.is_sampled
            tracer.record(work("below it"), open_span.context)
            tracer.end(open_span, work("request"))
        tracer.record(work("sent"), SAMPLED)
    collector.wait_for("sent")
    assert [span.name for span in collector.spans] == ["sent"]


@pytest.mark.parametrize(
    "traceparent", ["", "00-x-y-01", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"]
)
def test_a_malformed_parent_is_none(collector: Collector, traceparent: str) -> None:
    tracer = Tracer(collector.url, 1.0, "front")
    context = tracer.begin("request", SpanContext(traceparent), time.monotonic()).context
    assert context is not None
    assert context.is_sampled
    assert TRACE not in context.traceparent


def test_the_environment_names_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=host-7,deployment=test")
    tracer = Tracer(collector.url, 1.0, "front")
    with tracer.exporting():
        tracer.record(work(), SAMPLED)
    span = collector.wait_for("work")
    assert (span.service, span.process) == ("chat", "host-7")


def test_nothing_is_traced_where_the_environment_forbids_it(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracer = Tracer(collector.url, 1.0, "front")
    with tracer.exporting():
        open_span = tracer.begin("request", None, time.monotonic())
        assert open_span.context is None
        tracer.record(work(), open_span.context)
        tracer.end(open_span, work())
    assert collector.spans == []


def test_a_dead_collector_is_told_of_once_and_one_that_is_back_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2.5")  # two tries
    caplog.set_level(logging.INFO)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    tracer = Tracer(url, 1.0, "front")
    with contextlib.ExitStack() as later, tracer.exporting():
        tracer.record(work(), SAMPLED)
        while not said(caplog):
            pass
        for _ in range(100):  # more than the queue has room for
            tracer.record(work(), SAMPLED)
        [message] = said(caplog)
        assert message.startswith(f"spans do not reach {url}, and are lost meanwhile: ")
        assert "refused" in message
        monkeypatch.setattr(losses, "QUIET_S", 0.0)
        later.enter_context(running_collector(port)).wait_for("work")
        while len(said(caplog)) < 2:
            tracer.record(work(), SAMPLED)
        assert said(caplog)[1] == f"spans reach {url} again"


def test_a_slow_collector_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    sdk_log = logging.getLogger("opentelemetry.sdk._shared_internal")
    monkeypatch.setattr(sdk_log, "filters", [])  # all that it has to say, also if another test had it say so
    tracer = Tracer(collector.url, 1.0, "front")
    with tracer.exporting():
        for number in range(1, 6):
            with collector.changed:  # its answers wait
                for _ in range(100):
                    tracer.record(work(), SAMPLED)
            tracer.record(work(f"last {number}"), SAMPLED)
            collector.wait_for(f"last {number}")
            assert len(said(caplog)) == 1
        monkeypatch.setattr(losses, "QUIET_S", 0.0)
        while len(said(caplog)) < 2:
            tracer.record(work(), SAMPLED)
    lost, over = said(caplog)[:2]
    assert lost.startswith(f"spans do not reach {collector.url}, and are lost meanwhile: Queue full")
    assert over == f"spans reach {collector.url} again"


def test_a_collector_that_hangs_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100000")
    tracer = Tracer(f"http://127.0.0.1:{HANGING.getsockname()[1]}", 1.0, "front")
    with tracer.exporting():
        tracer.record(work(), SAMPLED)


def test_there_is_a_tracer_only_with_a_collector() -> None:
    assert open_tracer(TracingConfig(), "front") is None
    config = TracingConfig(otlp_endpoint="http://127.0.0.1:4318")
    assert open_tracer(config, "front") is not None


def test_a_missing_sdk_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mooncake.tracing.tracer")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint.*'\.\[tracing\]'"):
        open_tracer(TracingConfig(otlp_endpoint="http://127.0.0.1:4318"), "front")
    assert open_tracer(TracingConfig(), "front") is None


def test_a_wrong_variable_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "9999")  # more than there may be in the queue
    with pytest.raises(ConfigError, match=r"OTEL_\*"), Tracer("http://127.0.0.1:1", 1.0, "front").exporting():
        pass
