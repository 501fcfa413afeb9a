"""Spans of requests, as a real Conductor decides them."""

import msgspec
import pytest

from conductor.effects import Effect, ToConductor
from conductor.policy import Conductor
from conductor.settings import Limits
from conductor.telemetry.history import History
from conductor.telemetry.request_spans import RequestSpans
from mooncake.messages.fronts import Cancel, Continue, Interrupted, Resume, Submit
from mooncake.messages.operators import Migrate
from mooncake.messages.requests import FinishReason, Request, SpanContext
from mooncake.messages.workers import Finished, Leave, Prefill, Prefilled, Reserve, Reserved, Role, WorkFailed
from mooncake.tracing.spans import EndedSpan
from tests.conductor.small_cluster import (
    B0,
    D0,
    FRONT,
    GRANT,
    P0,
    move_at_the_second_try,
    new_conductor,
    ref,
    registration,
    request,
    two_decode_instances,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
OF_FRONT = SpanContext(f"00-{TRACE}-b7ad6b7169203331-01")
NOT_SAMPLED = SpanContext(f"00-{TRACE}-b7ad6b7169203331-00")


class OpenSpan:
    def __init__(self, number: int) -> None:
        self.context = SpanContext(f"00-{TRACE}-{number:016x}-01")


class Tracer:
    """Keeps what begins and ends."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, SpanContext | None, float]] = []
        self.ended: list[EndedSpan] = []

    def begin(self, name: str, parent: SpanContext | None, at_s: float) -> OpenSpan:
        self.begun.append((name, parent, at_s))
        return OpenSpan(len(self.begun))

    def end(self, _: OpenSpan, work: EndedSpan) -> None:
        self.ended.append(work)


class Traced:
    """A Conductor whose requests are traced. A decision takes 0.001 s."""

    def __init__(self, limits: Limits | None = None, conductor: Conductor | None = None) -> None:
        self.conductor: Conductor = conductor or new_conductor(limits)
        self.tracer, self.history = Tracer(), History()
        self.spans = RequestSpans(self.tracer, self.conductor, "kvcache_centric")  # type: ignore[arg-type]
        self.history.on_end = self.spans.ended

    def hear(self, sender: bytes, message: ToConductor, now_s: float) -> list[Effect]:
        message = self.spans.enter(message, now_s)
        effects = self.conductor.handle(sender, message, now_s)
        self.spans.observe(effects, now_s + 0.001)
        self.history.observe(sender, message, effects, now_s)
        return effects


@pytest.fixture
def traced() -> Traced:
    return Traced()


def traced_request(request_id: str = "r", span: SpanContext | None = OF_FRONT) -> Request:
    return msgspec.structs.replace(request(request_id), span=span)


def spans_in(effects: list[Effect]) -> list[SpanContext | None]:
    """Those that go with orders."""
    return [e.message.request.span for e in effects if isinstance(e.message, Reserve | Prefill)]


def test_a_span_tells_the_decision_and_each_step(traced: Traced) -> None:
    ordered = traced.hear(FRONT, Submit(traced_request()), 1.0)
    ordered += traced.hear(D0, Reserved(ref(), GRANT), 2.0)
    traced.hear(P0, Prefilled(ref(), 42, 8), 4.0)
    assert traced.tracer.ended == []
    traced.hear(D0, Finished(ref(), FinishReason.STOP, 5), 6.0)
    assert traced.tracer.begun == [("conductor.request", OF_FRONT, 1.0)]
    assert spans_in(ordered) == [OpenSpan(1).context] * 2
    [span] = traced.tracer.ended
    assert (span.name, span.began_s, span.ended_s, span.error) == ("conductor.request", 1.0, 6.0, "")
    assert span.attributes["mooncake.end"] == "finished"
    assert span.attributes["mooncake.output_tokens"] == 5
    steps = [(event.at_s, event.name, event.attributes["mooncake.instance"]) for event in span.events]
    assert steps == [
        (1.0, "queued", None),
        (1.0, "reserving", "d0"),
        (2.0, "prefilling", "p0"),
        (4.0, "transferring", "d0"),
        (6.0, "finished", None),
    ]
    [place] = span.parts
    assert (place.name, place.began_s, place.ended_s) == ("conductor.place", 1.0, 1.001)
    chosen = place.attributes
    assert (chosen["mooncake.prefill"], chosen["mooncake.decode"]) == ("p0", "d0")
    assert chosen["mooncake.rule"] == "kvcache_centric"
    predicted = [chosen[f"mooncake.predicted.{of}_s"] for of in ("queue", "transfer", "prefill", "beside")]
    assert sum(predicted) == pytest.approx(chosen["mooncake.predicted.ttft_s"])  # type: ignore[arg-type]


def test_a_rejection_tells_its_reason() -> None:
    traced = Traced(Limits(max_running_requests=1))
    traced.hear(FRONT, Submit(request("other")), 0.5)
    traced.hear(FRONT, Submit(traced_request()), 1.0)
    [span] = traced.tracer.ended
    [place] = span.parts
    assert place.attributes["mooncake.rejection"] == "max_running_requests"
    assert place.attributes["http.response.status_code"] == 429
    assert "the limit is 1" in place.error
    assert span.error == place.error


def test_each_attempt_has_its_decision(traced: Traced) -> None:
    traced.hear(FRONT, Submit(traced_request()), 1.0)
    traced.hear(D0, WorkFailed(ref(), "no luck", retryable=True), 2.0)
    traced.hear(D0, Reserved(ref(2), GRANT), 3.0)
    traced.hear(FRONT, Cancel("r"), 4.0)
    [span] = traced.tracer.ended
    assert [(place.began_s, place.ended_s) for place in span.parts] == [(1.0, 1.001), (2.0, 2.001)]
    assert span.attributes["mooncake.placements"] == 2
    assert {"mooncake.instance": None, "mooncake.note": "d0: no luck"} in [e.attributes for e in span.events]
    assert (span.attributes["mooncake.end"], span.error) == ("aborted", "")


def test_each_migration_tells_its_reason_and_outcome() -> None:
    traced = Traced(conductor=two_decode_instances(Limits()))
    traced.hear(FRONT, Submit(traced_request()), 0.0)
    move_at_the_second_try(traced.hear)
    [span] = traced.tracer.ended
    refused, moved = [part for part in span.parts if part.name == "conductor.migrate"]
    assert (refused.began_s, refused.ended_s, refused.error) == (3.0, 4.001, "refused")
    assert (moved.began_s, moved.ended_s, moved.error) == (5.0, 9.001, "")
    assert moved.attributes == {
        "mooncake.reason": "by_hand",
        "mooncake.outcome": "moved",
        "mooncake.source": "d0",
        "mooncake.destination": "d1",
        "mooncake.rounds": 1,
        "mooncake.loaded_tokens": 8,
    }


def test_a_migration_ends_with_its_request() -> None:
    traced = Traced(conductor=two_decode_instances(Limits()))
    traced.hear(FRONT, Submit(traced_request()), 0.0)
    traced.hear(D0, Reserved(ref(), GRANT), 1.0)
    traced.hear(P0, Prefilled(ref(), 1, 0), 2.0)
    traced.hear(FRONT, Migrate(1, "r", "d1"), 3.0)
    traced.hear(D0, Finished(ref(), FinishReason.STOP, 4), 4.0)
    [span] = traced.tracer.ended
    [migration] = [part for part in span.parts if part.name == "conductor.migrate"]
    assert (migration.attributes["mooncake.outcome"], migration.error) == ("ended", "")


def test_a_request_that_continues_stays_below_the_conductors_span(traced: Traced) -> None:
    traced.hear(B0, registration("b0", Role.BOTH), 0.5)
    traced.hear(P0, Leave(), 0.6)
    traced.hear(D0, Leave(), 0.7)
    traced.hear(FRONT, Submit(traced_request()), 1.0)
    traced.hear(B0, Reserved(ref(), GRANT), 2.0)
    traced.hear(B0, Prefilled(ref(), 42, 8), 3.0)
    [effect] = [e for e in traced.hear(B0, WorkFailed(ref(), "no luck", True), 4.0) if e.peer == FRONT]
    assert isinstance(effect.message, Interrupted)
    again = traced.hear(FRONT, Continue(traced_request().continued([42], 4)), 5.0)
    assert spans_in(again) == [OpenSpan(1).context]
    assert len(traced.tracer.begun) == 1


def test_another_conductor_begins_a_span_of_its_own(traced: Traced) -> None:
    traced.hear(FRONT, Resume(traced_request(), 3.0), 10.0)
    assert traced.tracer.begun == [("conductor.request", OF_FRONT, 10.0)]
    traced.hear(FRONT, Cancel("r"), 12.0)
    [span] = traced.tracer.ended
    assert (span.began_s, span.ended_s) == (10.0, 12.0)


@pytest.mark.parametrize("span", [None, NOT_SAMPLED])
def test_a_request_that_is_not_sampled_has_no_span(traced: Traced, span: SpanContext | None) -> None:
    ordered = traced.hear(FRONT, Submit(traced_request(span=span)), 1.0)
    assert spans_in(ordered) == [span]
    traced.hear(FRONT, Cancel("r"), 2.0)
    assert traced.tracer.begun == traced.tracer.ended == []


def test_a_wait_in_which_the_request_was_aborted_is_told() -> None:
    traced = Traced(Limits(return_grace_s=10.0))
    traced.conductor.peer_gone(D0, 0.5)
    traced.hear(FRONT, Submit(traced_request()), 1.0)
    traced.hear(FRONT, Cancel("r"), 3.0)
    [span] = traced.tracer.ended
    [place] = span.parts
    assert (place.name, place.began_s, place.ended_s) == ("conductor.place", 1.0, 3.0)
    assert place.error == span.events[-1].attributes["mooncake.note"]


def test_a_duplicate_does_not_end_the_span_of_the_request_that_runs(traced: Traced) -> None:
    traced.hear(FRONT, Submit(traced_request()), 1.0)
    traced.hear(FRONT, Submit(traced_request()), 2.0)
    assert traced.tracer.ended == []
    traced.hear(FRONT, Cancel("r"), 3.0)
    [span] = traced.tracer.ended
    assert [place.attributes.get("mooncake.rejection") for place in span.parts] == [None]
