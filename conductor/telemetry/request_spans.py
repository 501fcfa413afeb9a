"""The Conductor's spans: one for each traced request, with its placements and migrations as parts.

The Conductor's span of a request is a child of the front's span. It is the parent of the instances' spans, as
the Conductor puts its span's context into the messages that it passes on. The span's events are the request's
timeline (`conductor.telemetry.history`).

Owns: traced requests that have not ended, and the decisions about them. Does not know: clocks, the reasons of
decisions.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from conductor.effects import Effect, ToConductor
from conductor.policy import Conductor
from conductor.requests.migration import Migration
from conductor.telemetry.history import ABORTED, FAILED, QUEUED, REFUSED, REJECTED, RESERVING, RequestTimeline
from conductor.view.decision_stats import MigrationOutcome
from conductor.view.placement import Placement
from mooncake.messages.fronts import Continue, Rejected, Resume, Submit
from mooncake.messages.migration import PreCopy
from mooncake.messages.requests import Ref
from mooncake.messages.workers import Reserve
from mooncake.tracing.spans import Attributes, EndedSpan, SpanEvent

if TYPE_CHECKING:
    from mooncake.tracing.tracer import OpenSpan, Tracer

REQUEST, PLACE, MIGRATE = "conductor.request", "conductor.place", "conductor.migrate"


class Verdict(NamedTuple):
    """The decision about a request: a placement, or its rejection."""

    at_s: float
    """The time at which the decision was made."""
    attributes: Attributes


@dataclass(slots=True)
class _Traced:
    span: "OpenSpan"
    began_s: float
    placements: list[Verdict] = field(default_factory=list)
    """The request's placements, in order."""
    rejection: Verdict | None = None
    migrations: list[EndedSpan] = field(default_factory=list)
    """The request's ended migrations."""


class RequestSpans:
    """The spans of sampled requests. `rule` is the name of the scheduling policy."""

    def __init__(self, tracer: "Tracer", conductor: Conductor, rule: str) -> None:
        self._tracer, self._conductor, self._rule = tracer, conductor, rule
        self._traced: dict[str, _Traced] = {}
        self._migrating: dict[str, Migration] = {}
        """The migrations in progress, by request."""

    def enter(self, message: ToConductor, now_s: float) -> ToConductor:
        """Return `message` with the Conductor's span of the request instead of the front's span."""
        if not isinstance(message, Submit | Resume | Continue) or not message.request.is_traced:
            return message
        request = message.request
        traced = self._traced.get(request.request_id)
        if traced is None and isinstance(message, Continue):
            return message  # the request is not known here
        if traced is None:
            span = self._tracer.begin(REQUEST, request.span, now_s)
            traced = self._traced[request.request_id] = _Traced(span, now_s)
        request = msgspec.structs.replace(request, span=traced.span.context)
        return msgspec.structs.replace(message, request=request)

    def observe(self, effects: list[Effect], decided_s: float) -> None:
        """Record the decisions in `effects`, which were made at the time `decided_s`.

        The caller must call it before the history records the effects.
        """
        if not self._traced:
            return
        self._end_migrations(decided_s)
        for effect in effects:
            match effect.message:
                case PreCopy(ref=ref) if ref.request_id in self._traced:
                    tracked = self._conductor.requests.get(ref.request_id)
                    if tracked is not None and tracked.migration is not None:
                        self._migrating[ref.request_id] = tracked.migration
                case Reserve(ref=ref) if traced := self._traced.get(ref.request_id):
                    traced.placements.append(Verdict(decided_s, self._chosen(ref)))
                case Rejected(request_id, reason, status) if traced := self._traced.get(request_id):
                    rejected: Attributes = {"mooncake.rejection": reason, "http.response.status_code": status}
                    traced.rejection = Verdict(decided_s, rejected)

    def _end_migrations(self, now_s: float) -> None:
        """Add the spans of migrations that have ended to their requests."""
        for request_id, migration in list(self._migrating.items()):
            tracked = self._conductor.requests.get(request_id)
            if tracked is None or tracked.migration is not migration:
                del self._migrating[request_id]
                if (traced := self._traced.get(request_id)) is not None:
                    traced.migrations.append(_migration_span(migration, now_s))

    def _chosen(self, ref: Ref) -> Attributes:
        rule: Attributes = {"mooncake.rule": self._rule}
        tracked = self._conductor.requests.get(ref.request_id)
        if tracked is None or tracked.ref != ref or tracked.assignment is None:
            return rule  # the request has already lost its pair again
        return {**rule, **_chosen(tracked.assignment.placement)}

    def ended(self, timeline: RequestTimeline) -> None:
        """Send the span of a request that has ended. Does nothing for a request that is not traced."""
        traced = self._traced.pop(timeline.request_id, None)
        if traced is not None:
            self._tracer.end(traced.span, _request_span(timeline, traced))


def _request_span(timeline: RequestTimeline, traced: _Traced) -> EndedSpan:
    """Return the span of a request that is over."""
    last = timeline.last
    return EndedSpan(
        REQUEST,
        traced.began_s,
        last.at_s,
        {
            "mooncake.request_id": timeline.request_id,
            "mooncake.end": last.step,
            "mooncake.prefill": timeline.prefill,
            "mooncake.decode": timeline.decode,
            "mooncake.placements": timeline.num_attempts,
            "mooncake.moves": timeline.num_moves,
            "mooncake.prompt_tokens": timeline.num_prompt_tokens,
            "mooncake.cached_tokens": timeline.num_cached_tokens,
            "mooncake.output_tokens": timeline.num_output_tokens,
        },
        [
            SpanEvent(
                moment.at_s,
                moment.step,
                {"mooncake.instance": moment.instance, "mooncake.note": moment.note or None},
            )
            for moment in timeline.moments
        ],
        error=last.note if last.step in (FAILED, REJECTED, REFUSED) else "",
        parts=[*_placings(timeline, traced), *traced.migrations],
    )


def _placings(timeline: RequestTimeline, traced: _Traced) -> list[EndedSpan]:
    """Return the spans of the request's placements and rejection, each with the wait before it.

    A wait in which the request ended has a span of its own.
    """
    parts, verdicts = list[EndedSpan](), iter(traced.placements)
    for moment, following in pairwise(timeline.moments):
        waited = moment.step == QUEUED and moment.at_s < following.at_s
        verdict = None
        if following.step == RESERVING:
            verdict = next(verdicts, None)
        elif following.step == REJECTED:
            verdict = traced.rejection
        elif following.step in (ABORTED, FAILED) and waited:
            verdict = Verdict(following.at_s, {})
        if verdict is not None:
            began_s = moment.at_s if moment.step == QUEUED else following.at_s
            ended_s = max(following.at_s, verdict.at_s)
            parts.append(EndedSpan(PLACE, began_s, ended_s, verdict.attributes, error=following.note))
    return parts


def _migration_span(migration: Migration, now_s: float) -> EndedSpan:
    """Return the span of a migration that ended at `now_s`.

    If the migration has not moved the request, its outcome is the span's error, except if the request itself
    has ended.
    """
    outcome = migration.outcome
    has_failed = outcome not in (MigrationOutcome.MOVED, MigrationOutcome.ENDED)
    return EndedSpan(
        MIGRATE,
        migration.began_s,
        now_s,
        {
            "mooncake.reason": migration.reason,
            "mooncake.outcome": outcome,
            "mooncake.source": migration.destination.source.name,
            "mooncake.destination": migration.destination.instance.name,
            "mooncake.rounds": migration.num_rounds,
            "mooncake.loaded_tokens": migration.num_loaded_tokens,
        },
        error=outcome or "" if has_failed else "",
    )


def _chosen(placement: Placement) -> Attributes:
    """Return span attributes of the chosen pair, the source of its prefix, and the predicted times."""
    prediction = placement.prediction
    return {
        "mooncake.prefill": placement.prefill.name,
        "mooncake.decode": placement.decode.name,
        "mooncake.inlined": placement.is_inlined,
        "mooncake.prefix": placement.reuse,
        "mooncake.prefix_source": None if placement.source is None else placement.source.name,
        "mooncake.local_blocks": placement.num_local_blocks,
        "mooncake.coming_blocks": placement.num_coming_blocks,
        "mooncake.fetched_blocks": placement.num_fetched_blocks if placement.source is not None else 0,
        "mooncake.predicted.ttft_s": prediction.ttft_s,
        "mooncake.predicted.queue_s": prediction.queue_s,
        "mooncake.predicted.transfer_s": prediction.transfer_s,
        "mooncake.predicted.prefill_s": prediction.prefill_s,
        "mooncake.predicted.beside_s": prediction.beside_s,
        "mooncake.predicted.gap_s": prediction.gap_s,
    }
