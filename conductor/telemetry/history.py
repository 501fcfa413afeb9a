"""The timelines of requests, and the latest rejections.

The history sees every message to the Conductor with its effects, and decides nothing. Pure: no clock.

Owns: the latest timelines and rejections, the numbers of ends and rejections, the time spent in each step.
Does not know: reasons of the Conductor that are in none of its messages.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from conductor.effects import Effect, ToConductor
from conductor.telemetry.changes import InstanceChanges
from conductor.view.rejection import Reason
from mooncake.messages.fronts import Cancel, Ended, Failed, InFlight, Rejected, Resume, Submit
from mooncake.messages.heartbeats import Heartbeat, Joining
from mooncake.messages.migration import TakeOver
from mooncake.messages.requests import Held, HeldStep, Ref
from mooncake.messages.workers import (
    Abort,
    Decode,
    DecodeRefused,
    Finished,
    Prefill,
    Prefilled,
    Register,
    Reserve,
    Reserved,
    WorkFailed,
)

NUM_ENDED = 500
NUM_REJECTIONS = 100
QUEUED, RESERVING, PREFILLING, INLINED = "queued", "reserving", "prefilling", "inlined"
TRANSFERRING, LOADING, DECODING = "transferring", "loading", "decoding"
STEPS = (QUEUED, RESERVING, PREFILLING, INLINED, TRANSFERRING, LOADING, DECODING)
"""The steps of a request between two moments of its timeline.

In the step `loading` the request's KVCache is in the decode instance's pool, or the request waits for its
turn in the double check. It has not joined the batch yet.
"""
ENDS = FINISHED, ABORTED, FAILED, REJECTED, REFUSED = "finished", "aborted", "failed", "rejected", "refused"
"""The ways in which a request ends."""


class Moment(NamedTuple):
    """A moment at which a request entered a step, or ended."""

    at_s: float
    step: str
    instance: str | None = None
    """The instance that does the step; None if no instance does."""
    note: str = ""
    """The reason for an unusual step; empty for the usual next step."""


class _Decoded(NamedTuple):
    """An attempt of a request, and the instance that decodes it."""

    attempt: int
    instance: str


@dataclass(slots=True)
class RequestTimeline:
    """The moments of one request, in order of time. If `is_over`, the last moment is the request's end."""

    request_id: str
    front: bytes
    num_prompt_tokens: int
    moments: list[Moment]
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    attempt: int = 0
    """The number of the current attempt. It can be larger than `num_attempts + num_moves`.

    Migrations that ended without a move, and attempts under an earlier Conductor, have taken numbers, too.
    """
    num_attempts: int = 0
    """The number of placements."""
    num_moves: int = 0
    """The number of times that another decode instance has taken over the request."""
    prefill: str | None = None
    decode: str | None = None
    is_over: bool = False
    num_unlisted: int = 0
    """Consecutive heartbeats of the request's front that did not name the request."""

    @property
    def is_inlined(self) -> bool:
        """Whether one instance computes the prompt and decodes."""
        return self.prefill is not None and self.prefill == self.decode

    @property
    def last(self) -> Moment:
        """The latest moment."""
        return self.moments[-1]


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A rejected request."""

    at_s: float
    request_id: str
    reason: str
    """The value of the `Reason` for the rejection."""
    status: int
    message: str
    prompt_len: int | None = None
    """The length of the prompt in tokens; None if the request's id was in use."""


@dataclass(slots=True)
class History:
    """Timelines of live and recently ended requests, recent rejections, changes of instances, and totals."""

    live: dict[str, RequestTimeline] = field(default_factory=dict)
    ended: OrderedDict[str, RequestTimeline] = field(default_factory=OrderedDict)
    rejections: deque[FailedRequest] = field(default_factory=lambda: deque(maxlen=NUM_REJECTIONS))
    changes: InstanceChanges = field(default_factory=InstanceChanges)
    num_rejected: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(map(str, Reason), 0)))
    """The number of rejections by reason."""
    num_ended: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ENDS, 0)))
    """The number of requests by the way in which they ended."""
    step_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    """The seconds that requests have spent in each step."""
    num_steps: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(STEPS, 0)))
    on_end: Callable[[RequestTimeline], None] = lambda _: None
    """A callback that gets each timeline that is over."""
    _held: dict[str, "_Decoded"] = field(default_factory=dict)
    """Requests of an earlier Conductor, by id, that an instance decodes and no front has reported yet."""

    def find(self, request_id: str) -> RequestTimeline | None:
        """Return the timeline of a request that is live or ended lately; None for an unknown id.

        The id of an answer is taken as the id of its first choice.
        """
        for known in (request_id, f"{request_id}-0"):
            if (timeline := self.live.get(known) or self.ended.get(known)) is not None:
                return timeline
        return None

    def observe(
        self, sender: bytes, message: ToConductor | None, effects: Iterable[Effect], now_s: float
    ) -> None:
        """Record a message of `sender` and its effects.

        `message` is None for the effects of a tick, or of the loss of a peer.
        """
        match message:
            case Submit(request) if request.request_id not in self.live:
                self.live[request.request_id] = RequestTimeline(
                    request.request_id, sender, len(request.token_ids), [Moment(now_s, QUEUED)]
                )
            case Submit(request):
                self._reject_duplicates(effects, now_s)
                return
            case Resume() if message.request.request_id not in self.live:
                self._resume(sender, message, now_s)
            case InFlight(request_ids):
                self._end_unlisted(sender, set(request_ids), now_s)
            case Register(held=held):
                for one in held:
                    self._hold(one, _instance(sender), now_s)
            case DecodeRefused(ref=ref, reason=reason) | WorkFailed(ref=ref, reason=reason):
                self._again(ref, f"{_instance(sender)}: {reason}", now_s)
            case Reserved(ref=ref):
                if (timeline := self._current(ref)) is not None and timeline.is_inlined:
                    self._enter(ref, Moment(now_s, INLINED, timeline.decode))
            case Prefilled(ref=ref, num_cached_tokens=num_cached_tokens):
                if (timeline := self._current(ref)) is not None and timeline.is_inlined:
                    timeline.num_cached_tokens = num_cached_tokens
                    self._enter(ref, Moment(now_s, DECODING, timeline.decode))
            case Heartbeat(joining=joining):
                for of_request in joining:
                    self._join(of_request)
            case Finished():
                self._join(message)
            case Cancel(request_id) if (timeline := self.live.get(request_id)) and timeline.front == sender:
                self._end(timeline, Moment(now_s, ABORTED, note="the client has gone, or has all it wants"))
        for effect in effects:
            self._see(effect, now_s)

    def _end_unlisted(self, front: bytes, listed: set[str], now_s: float) -> None:
        """Record the end of requests that two heartbeats of their front in a row have not listed.

        The Conductor ends these requests at the same time.
        """
        for timeline in [of for of in self.live.values() if of.front == front]:
            timeline.num_unlisted = 0 if timeline.request_id in listed else timeline.num_unlisted + 1
            if timeline.num_unlisted > 1:
                self._end(timeline, Moment(now_s, ABORTED, note="its front does not have it any more"))

    def _resume(self, front: bytes, resume: Resume, now_s: float) -> None:
        """Record a request of an earlier Conductor that its front reports.

        An instance may have reported the request before.
        """
        request = resume.request
        submitted = Moment(now_s - resume.waited_s, QUEUED, note="an earlier conductor had it")
        timeline = RequestTimeline(request.request_id, front, request.num_prompt_tokens, [submitted])
        self.live[request.request_id] = timeline
        decoded = self._held.pop(request.request_id, None)
        if decoded is not None:
            self._go_on(timeline, decoded, now_s)

    def _hold(self, held: Held, instance: str, now_s: float) -> None:
        """Record that an instance decodes a request of an earlier Conductor. Other steps are not recorded.

        The request's front may have reported the request before.
        """
        if held.step is HeldStep.DECODING:
            timeline = self.live.get(held.ref.request_id)
            if timeline is None:
                self._held[held.ref.request_id] = _Decoded(held.ref.attempt, instance)
            elif timeline.last.step == QUEUED:
                self._go_on(timeline, _Decoded(held.ref.attempt, instance), now_s)

    def _go_on(self, timeline: RequestTimeline, decoded: "_Decoded", now_s: float) -> None:
        timeline.attempt, timeline.decode = decoded
        self._append(timeline, Moment(now_s, DECODING, timeline.decode, "it has gone on there"))

    def _see(self, effect: Effect, now_s: float) -> None:
        match effect.message:
            case Abort(ref=ref):
                self._held.pop(ref.request_id, None)
                if (timeline := self._current(ref)) is not None and timeline.last.step != QUEUED:
                    self._append(timeline, Moment(now_s, QUEUED, note="taken off its instances"))
            case Reserve(ref=ref, inline=inline):
                if (timeline := self.live.get(ref.request_id)) is not None:
                    timeline.decode = _instance(effect.peer)
                    timeline.attempt, timeline.prefill = ref.attempt, timeline.decode if inline else None
                    timeline.num_attempts += 1
                    self._enter(ref, Moment(now_s, RESERVING, timeline.decode))
            case Prefill(ref=ref):
                if (timeline := self._current(ref)) is not None:
                    timeline.prefill = _instance(effect.peer)
                    self._enter(ref, Moment(now_s, PREFILLING, timeline.prefill))
            case Decode(ref=ref, num_cached_tokens=num_cached_tokens):
                if (timeline := self._current(ref)) is not None:
                    timeline.num_cached_tokens = num_cached_tokens
                    self._enter(ref, Moment(now_s, TRANSFERRING, timeline.decode))
            case TakeOver(ref=ref):
                if (timeline := self.live.get(ref.request_id)) is not None:
                    source, timeline.decode = timeline.decode, _instance(effect.peer)
                    timeline.attempt = ref.attempt
                    timeline.num_moves += 1
                    self._append(timeline, Moment(now_s, DECODING, timeline.decode, f"moved from {source}"))
            case Ended(request_id, num_output_tokens) if timeline := self.live.get(request_id):
                timeline.num_output_tokens = num_output_tokens
                self._end(timeline, Moment(now_s, FINISHED))
            case Failed(request_id, reason) as failed if timeline := self.live.get(request_id):
                self._end(timeline, Moment(now_s, REFUSED if failed.is_refused else FAILED, note=reason))
            case Rejected(request_id, reason, status, text) if timeline := self.live.get(request_id):
                self._reject(
                    FailedRequest(now_s, request_id, reason, status, text, timeline.num_prompt_tokens)
                )
                self._end(timeline, Moment(now_s, REJECTED, note=text))

    def _reject_duplicates(self, effects: Iterable[Effect], now_s: float) -> None:
        """Record rejections of requests whose id is in use. The running request with that id goes on."""
        for effect in effects:
            if isinstance(effect.message, Rejected):
                told = effect.message
                self._reject(FailedRequest(now_s, told.request_id, told.reason, told.status, told.message))

    def _reject(self, rejection: FailedRequest) -> None:
        self.rejections.append(rejection)
        self.num_rejected[rejection.reason] += 1

    def _current(self, ref: Ref) -> RequestTimeline | None:
        timeline = self.live.get(ref.request_id)
        return timeline if timeline is not None and timeline.attempt == ref.attempt else None

    def _again(self, ref: Ref, note: str, now_s: float) -> None:
        """Record that a request waits for another attempt."""
        self._enter(ref, Moment(now_s, QUEUED, note=note))

    def _enter(self, ref: Ref, moment: Moment) -> None:
        timeline = self._current(ref)
        if timeline is not None:
            self._append(timeline, moment)

    def _join(self, report: Joining | Finished) -> None:
        """Record that the request entered `loading`, and that it joined the batch.

        `loading` begins `arrival_s` after the order to decode. So a wait for the turn of the double check is
        a part of `loading`.
        """
        timeline = self._current(report.ref)
        if timeline is None:
            return
        ways = ((TRANSFERRING, LOADING, report.arrival_s), (LOADING, DECODING, report.joining_s))
        for before, step, wait_s in ways:
            if timeline.last.step == before and wait_s is not None:
                self._append(timeline, Moment(timeline.last.at_s + wait_s, step, timeline.decode))

    def _append(self, timeline: RequestTimeline, moment: Moment) -> None:
        last = timeline.last
        if last.step in self.num_steps:
            self.step_s[last.step] += moment.at_s - last.at_s
            self.num_steps[last.step] += 1
        timeline.moments.append(moment)

    def _end(self, timeline: RequestTimeline, moment: Moment) -> None:
        self._append(timeline, moment)
        timeline.is_over = True
        del self.live[timeline.request_id]
        self.num_ended[moment.step] += 1
        self.ended.pop(timeline.request_id, None)
        self.ended[timeline.request_id] = timeline
        if len(self.ended) > NUM_ENDED:
            self.ended.popitem(last=False)
        self.on_end(timeline)


def _instance(identity: bytes) -> str:
    """Return the instance's name in a worker's socket identity."""
    return identity.decode(errors="replace").rpartition("#")[0]
