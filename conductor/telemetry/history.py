"""What has become of requests: their timelines, and the latest rejections.

It sees what the Conductor sees, every message together with its effects, and decides nothing. Pure: no clock.

Owns: the latest timelines and rejections, how many there were, how long each step has taken. Does not know:
why the Conductor does something, beyond what its messages say.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from conductor.effects import Effect, ToConductor
from mooncake.messages.fronts import Cancel, Ended, Failed, Rejected, Submit
from mooncake.messages.requests import Ref
from mooncake.messages.workers import (
    Abort,
    Decode,
    Finished,
    Heartbeat,
    Joining,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    WorkFailed,
)

NUM_ENDED = 500
NUM_REJECTIONS = 100
REASONS = {400: "too_large", 409: "duplicate", 429: "overloaded", 503: "unavailable"}
"""of a rejection, by its HTTP status"""
QUEUED, RESERVING, PREFILLING, INLINED = "queued", "reserving", "prefilling", "inlined"
TRANSFERRING, LOADING, DECODING = "transferring", "loading", "decoding"
STEPS = (QUEUED, RESERVING, PREFILLING, INLINED, TRANSFERRING, LOADING, DECODING)
"""what a request is doing from one moment of its timeline to the next; `loading`: its KVCache has arrived"""
FINISHED, ABORTED, FAILED, REJECTED = "finished", "aborted", "failed", "rejected"


class Moment(NamedTuple):
    """A request entered `step`, or ended. `instance` is where that is done; `note` says why, if it was not
    what comes next."""

    at_s: float
    step: str
    instance: str | None = None
    note: str = ""


@dataclass(slots=True)
class Timeline:
    """One request. Its moments are in order of time; the last is its end once `is_over`."""

    request_id: str
    front: bytes
    num_prompt_tokens: int
    moments: list[Moment]
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    attempt: int = 0
    prefill: str | None = None
    decode: str | None = None
    is_over: bool = False

    @property
    def last(self) -> Moment:
        return self.moments[-1]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that got no token. `prompt_len` in tokens, None if the request is not known."""

    at_s: float
    request_id: str
    status: int
    message: str
    prompt_len: int | None = None

    @property
    def reason(self) -> str:
        """One of few, for counting."""
        return REASONS.get(self.status, str(self.status))


@dataclass(slots=True)
class History:
    """`live` requests, the latest that have `ended`, the latest `rejections`; totals since the start."""

    live: dict[str, Timeline] = field(default_factory=dict)
    ended: OrderedDict[str, Timeline] = field(default_factory=OrderedDict)
    rejections: deque[Rejection] = field(default_factory=lambda: deque(maxlen=NUM_REJECTIONS))
    num_rejected: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS.values(), 0)))
    """by reason"""
    num_ended: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys((FINISHED, ABORTED, FAILED, REJECTED), 0))
    )
    """by how they ended"""
    step_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    """seconds that requests have spent in each step"""
    num_steps: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(STEPS, 0)))

    def find(self, request_id: str) -> Timeline | None:
        """A request that is running, or ended lately; the id of an answer stands for its first choice."""
        for known in (request_id, f"{request_id}-0"):
            if (timeline := self.live.get(known) or self.ended.get(known)) is not None:
                return timeline
        return None

    def observe(
        self, sender: bytes, message: ToConductor | None, effects: Iterable[Effect], now_s: float
    ) -> None:
        """`message` of `sender` (None: time has passed, or a peer is gone) had these effects."""
        match message:
            case Submit(request) if request.request_id not in self.live:
                self.live[request.request_id] = Timeline(
                    request.request_id, sender, len(request.token_ids), [Moment(now_s, QUEUED)]
                )
            case Submit(request):
                self._reject_duplicates(effects, now_s)
                return
            case Refused(ref=ref, reason=reason) | WorkFailed(ref=ref, reason=reason):
                self._again(ref, f"{_instance(sender)}: {reason}", now_s)
            case Reserved(ref=ref, inlined=True):
                self._enter(ref, Moment(now_s, INLINED, _instance(sender)))
            case Heartbeat(joining=joining):
                for of_request in joining:
                    self._join(of_request)
            case Finished():
                self._join(message)
            case Cancel(request_id) if (timeline := self.live.get(request_id)) and timeline.front == sender:
                self._end(timeline, Moment(now_s, ABORTED, note="the client has gone, or has all it wants"))
        for effect in effects:
            self._see(effect, now_s)

    def _see(self, effect: Effect, now_s: float) -> None:
        match effect.message:
            case Abort(ref=ref):
                if (timeline := self._current(ref)) is not None and timeline.last.step != QUEUED:
                    self._append(timeline, Moment(now_s, QUEUED, note="taken off its instances"))
            case Reserve(ref=ref):
                if (timeline := self.live.get(ref.request_id)) is not None:
                    timeline.attempt, timeline.prefill = ref.attempt, None
                    timeline.decode = _instance(effect.peer)
                    self._enter(ref, Moment(now_s, RESERVING, timeline.decode))
            case Prefill(ref=ref):
                if (timeline := self._current(ref)) is not None:
                    timeline.prefill = _instance(effect.peer)
                    self._enter(ref, Moment(now_s, PREFILLING, timeline.prefill))
            case Decode(ref=ref, num_cached_tokens=num_cached_tokens):
                if (timeline := self._current(ref)) is not None:
                    timeline.num_cached_tokens = num_cached_tokens
                    self._enter(ref, Moment(now_s, TRANSFERRING, timeline.decode))
            case Ended(request_id, num_output_tokens) if timeline := self.live.get(request_id):
                timeline.num_output_tokens = num_output_tokens
                self._end(timeline, Moment(now_s, FINISHED))
            case Failed(request_id, reason) if timeline := self.live.get(request_id):
                self._end(timeline, Moment(now_s, FAILED, note=reason))
            case Rejected(request_id, status, text) if timeline := self.live.get(request_id):
                self._reject(Rejection(now_s, request_id, status, text, timeline.num_prompt_tokens))
                self._end(timeline, Moment(now_s, REJECTED, note=text))

    def _reject_duplicates(self, effects: Iterable[Effect], now_s: float) -> None:
        """The request that has the id goes on."""
        for effect in effects:
            if isinstance(effect.message, Rejected):
                rejected = effect.message
                self._reject(Rejection(now_s, rejected.request_id, rejected.status, rejected.message))

    def _reject(self, rejection: Rejection) -> None:
        self.rejections.append(rejection)
        self.num_rejected[rejection.reason] += 1

    def _current(self, ref: Ref) -> Timeline | None:
        timeline = self.live.get(ref.request_id)
        return timeline if timeline is not None and timeline.attempt == ref.attempt else None

    def _again(self, ref: Ref, note: str, now_s: float) -> None:
        """It waits to be placed again."""
        self._enter(ref, Moment(now_s, QUEUED, note=note))

    def _enter(self, ref: Ref, moment: Moment) -> None:
        timeline = self._current(ref)
        if timeline is not None:
            self._append(timeline, moment)

    def _join(self, word: Joining | Finished) -> None:
        """The decode instance says when the KVCache had arrived, and the request joined the batch."""
        timeline = self._current(word.ref)
        if timeline is None:
            return
        ways = ((TRANSFERRING, LOADING, word.arrival_s), (LOADING, DECODING, word.joining_s))
        for before, step, wait_s in ways:
            if timeline.last.step == before and wait_s is not None:
                self._append(timeline, Moment(timeline.last.at_s + wait_s, step, timeline.decode))

    def _append(self, timeline: Timeline, moment: Moment) -> None:
        last = timeline.last
        if last.step in self.num_steps:
            self.step_s[last.step] += moment.at_s - last.at_s
            self.num_steps[last.step] += 1
        timeline.moments.append(moment)

    def _end(self, timeline: Timeline, moment: Moment) -> None:
        self._append(timeline, moment)
        timeline.is_over = True
        del self.live[timeline.request_id]
        self.num_ended[moment.step] += 1
        self.ended.pop(timeline.request_id, None)
        self.ended[timeline.request_id] = timeline
        if len(self.ended) > NUM_ENDED:
            self.ended.popitem(last=False)


def _instance(identity: bytes) -> str:
    """The name in a worker's socket identity."""
    return identity.decode(errors="replace").rpartition("#")[0]
