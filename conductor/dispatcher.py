"""Where accepted requests are: placed on a pair of instances, or waiting for one, until they end.

Owns: the life of every accepted request, its pair, who is told what about it. Does not know: fronts' and
instances' comings and goings, how a pair is chosen (`conductor.scheduling`), which requests are too many
(`conductor.overload`).
"""

from collections.abc import Iterable

from conductor.assignments import Assignments
from conductor.cluster_view import ClusterView
from conductor.displacement import Displacement
from conductor.effects import Effect
from conductor.instances import Instance, Instances
from conductor.lateness import Lateness
from conductor.lifecycle import NOT_PLACED, RequestState, TrackedRequest
from conductor.outcomes import Outcomes
from conductor.overload import NOTHING, Admission, Freed, forecast_of
from conductor.placement import Placement, Reason, Rejection, why_too_large
from conductor.rules import Limits, Rules, SLOs
from conductor.scheduling import Scheduler
from mooncake.messages import (
    Abort,
    Decode,
    Ended,
    Failed,
    Finished,
    Interrupted,
    Prefill,
    Prefilled,
    Refused,
    Rejected,
    Reserve,
    Reserved,
    WorkFailed,
)
from mooncake.pools import Grant
from mooncake.requests import Ref, Request

FromWork = Reserved | Prefilled | Finished | Refused | WorkFailed


class Dispatcher:
    """All accepted requests. `instances` and `view` are the Conductor's own."""

    def __init__(
        self, instances: Instances, view: ClusterView, limits: Limits, rules: Rules, outcomes: Outcomes
    ) -> None:
        self._instances, self._view, self._limits, self._outcomes = instances, view, limits, outcomes
        forecast, lateness = forecast_of(rules.overload), Lateness()
        self._scheduler = Scheduler(view, rules)
        self._admission = Admission(view, forecast, lateness, rules.overload)
        self._assignments = Assignments(view, forecast, lateness, outcomes, rules)
        self.requests: dict[str, TrackedRequest] = {}
        self._displacement = Displacement(self.requests, self._assignments)
        self._room: dict[str, TrackedRequest] = {}
        """those that wait for load to fall"""
        self._num_released = 0
        """of all placements, when those that wait were last tried"""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for load to fall, while their TTFT SLO allows it."""
        return len(self._room)

    def placement_of(self, request_id: str) -> Placement | None:
        """Where a request is, and what was predicted; None while it waits."""
        return self._assignments.placement_of(request_id)

    # -- what others ask for ------------------------------------------------------------------------

    def submit(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """It has been accepted, unless its SLOs say otherwise."""
        self.requests[tracked.request_id] = tracked
        if not self._room or self._limits.slos_of(tracked.request).ttft_s is None:
            return self._place_or_wait(tracked, now_s)
        self._room[tracked.request_id] = tracked
        return self._place_those_that_wait(now_s) + self._reject_the_last(tracked, now_s)

    def make_place(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """There are as many requests as there may be: one gives way, or (no effect) nobody does."""
        other = self._displacement.first(tracked, now_s)
        if other is None:
            return []
        self._outcomes.num_displaced += 1
        message = "it gave way to a request of a higher class, or of a tenant that has less"
        return self._reject(other, Reason.TOO_MANY, message)

    def go_on(self, tracked: TrackedRequest, request: Request, now_s: float) -> list[Effect]:
        """The front has said how far the answer of an interrupted one has come."""
        tracked.request = request
        tracked.move_to(RequestState.WAITING)
        return self._place_or_wait(tracked, now_s)

    def place_waiting(self, now_s: float) -> list[Effect]:
        """Time has passed, or there is another instance."""
        effects = self._place_those_that_wait(now_s, reject=True)
        for tracked in list(self.requests.values()):
            if tracked.state is RequestState.WAITING and tracked.request_id not in self._room:
                effects += self._place_or_wait(tracked, now_s)
        return effects

    def use_room(self, now_s: float) -> list[Effect]:
        """Call after every event: if a placement has ended by it, those that wait are tried."""
        if self._num_released == self._assignments.num_released:
            return []
        effects = self._place_those_that_wait(now_s)
        self._num_released = self._assignments.num_released
        return effects

    def ask_again(self) -> list[Effect]:
        """The fronts that have not said how far an answer has come."""
        return [
            Effect(tracked.front, Interrupted(tracked.request_id))
            for tracked in self.requests.values()
            if tracked.state is RequestState.INTERRUPTED
        ]

    def abort(self, tracked: TrackedRequest) -> list[Effect]:
        """Nobody wants it any more."""
        effects = self._release_pair(tracked)
        self._end(tracked, RequestState.ABORTED)
        return effects

    def fail(self, tracked: TrackedRequest, reason: str) -> list[Effect]:
        """It cannot be finished."""
        effects = self._release_pair(tracked)
        self._end(tracked, RequestState.FAILED)
        return [*effects, Effect(tracked.front, Failed(tracked.request_id, reason))]

    def rejected(
        self, front: bytes, request_id: str, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> Effect:
        """A request is turned away, accepted before or not."""
        self._outcomes.rejected(reason)
        if reason.status in (429, 503) and retry_after_s is None:
            retry_after_s = self._limits.retry_after_s
        return Effect(front, Rejected(request_id, reason.status, message, retry_after_s))

    # -- instances that lose their work -------------------------------------------------------------

    def lose(self, instance: Instance, reason: str, now_s: float) -> list[Effect]:
        """It is gone, with all that it had."""
        effects = []
        for request_id in list(instance.requests):
            tracked = self.requests.get(request_id)
            if tracked is not None and instance.name in (tracked.prefill, tracked.decode):
                effects += self._on_work_failed(tracked, f"{instance.name} {reason}", True, now_s)
        return effects

    def hand_back(self, instance: Instance, now_s: float) -> list[Effect]:
        """It drains: what waits there goes elsewhere if anybody has room for it; the rest ends there."""
        effects = []
        here = [self.requests[request_id] for request_id in instance.requests]
        queued = [tracked for tracked in here if self._displacement.is_queued(tracked)]
        for tracked in queued:
            tracked.is_promised = True  # before the first one goes: it must not displace the next
        for tracked in queued:
            if self._schedule(tracked, now_s) is not None:
                effects += self._take_back(tracked, now_s)
                placement = self._schedule(tracked, now_s)  # now it is not in a queue before itself
                assert placement is not None
                effects += self._assign(tracked, placement, now_s)
        return effects

    # -- what workers say ---------------------------------------------------------------------------

    def heard(self, sender: Instance, message: FromWork, now_s: float) -> list[Effect]:
        """A step of a request, done or failed."""
        tracked = self._current(message.ref)
        if tracked is None:
            return [] if isinstance(message, Finished) else [Effect(sender.identity, Abort(message.ref))]
        match message:
            case Reserved() if tracked.state is RequestState.RESERVING:
                return self._on_reserved(tracked, sender, message, now_s)
            case Prefilled() if tracked.state is RequestState.PREFILLING:
                return self._on_prefilled(tracked, message, now_s)
            case Finished() if tracked.state is RequestState.DECODING:
                self._assignments.end_decode(tracked.request_id, now_s, message.num_output_tokens)
                self._end(tracked, RequestState.FINISHED)
                return [Effect(tracked.front, Ended(tracked.request_id, message.num_output_tokens))]
            case Refused():
                return self._on_refused(tracked, sender, message, now_s)
            case WorkFailed():
                return self._on_work_failed(tracked, message.reason, message.retryable, now_s)
        return []  # a duplicate of a step already taken

    def _current(self, ref: Ref) -> TrackedRequest | None:
        """The request that `ref` is the running attempt of."""
        tracked = self.requests.get(ref.request_id)
        if tracked is None or tracked.ref != ref or tracked.state in NOT_PLACED:
            return None
        return tracked

    def _on_reserved(
        self, tracked: TrackedRequest, decode: Instance, reserved: Reserved, now_s: float
    ) -> list[Effect]:
        if reserved.inlined:
            self._prefill_is_done(tracked, now_s, None)
            return []
        prefill = self._instances.get(tracked.prefill)
        assert prefill is not None
        tracked.move_to(RequestState.PREFILLING)
        num_held_blocks = _num_held_blocks(tracked.request, reserved.grant)
        time_left_s = self._time_left_s(tracked, now_s)
        source = self._assignments.order_prefill(
            tracked.request_id, decode, num_held_blocks, time_left_s, now_s
        )
        order = Prefill(tracked.ref, tracked.request, reserved.grant, time_left_s, source)
        return [Effect(prefill.identity, order)]

    def _time_left_s(self, tracked: TrackedRequest, now_s: float) -> float | None:
        """Until the first token is due."""
        ttft_slo_s = self._limits.slos_of(tracked.request).ttft_s
        return None if ttft_slo_s is None else tracked.submitted_s + ttft_slo_s - now_s

    def _on_prefilled(self, tracked: TrackedRequest, prefilled: Prefilled, now_s: float) -> list[Effect]:
        decode = self._instances.get(tracked.decode)
        assert decode is not None
        if not tracked.may_have_begun:
            num_tokens = len(tracked.request.token_ids)
            rejection = self._admission.check_decode(decode, num_tokens, self._slos(tracked))
            if rejection is not None:
                return self._reject_by_slo(tracked, rejection, now_s)
        self._prefill_is_done(tracked, now_s, prefilled.num_cached_tokens)
        order = Decode(
            tracked.ref, prefilled.first_token, prefilled.num_cached_tokens, prefilled.first_logprobs
        )
        return [Effect(decode.identity, order)]

    def _prefill_is_done(self, tracked: TrackedRequest, now_s: float, num_cached_tokens: int | None) -> None:
        """What is left is its messenger's work. `num_cached_tokens` is None for an inlined prompt."""
        tracked.move_to(RequestState.DECODING)
        tracked.may_have_begun = True
        prefill = self._instances.get(tracked.prefill)
        assert prefill is not None
        prefill.requests.pop(tracked.request_id, None)
        self._assignments.end_prefill(tracked.request_id, now_s, num_cached_tokens)

    def _on_refused(
        self, tracked: TrackedRequest, instance: Instance, refused: Refused, now_s: float
    ) -> list[Effect]:
        """The double check of section 3: place it where it has not been refused, or reject it."""
        if tracked.state is RequestState.DECODING:
            self._admission.refused(instance, refused.predicted_tbt_s, now_s)
        effects = self._release_pair(tracked)
        tracked.refused_by.add(instance.name)
        tracked.may_have_begun = False  # its first token would have left after the check
        tracked.last_failure, tracked.waiting_since_s = refused.reason, now_s
        tracked.move_to(RequestState.WAITING)
        effects += self._place_or_wait(tracked, now_s)
        if tracked.request_id in self._room:
            self._num_released = self._assignments.num_released  # whoever refuses has no room
        return effects

    def _on_work_failed(
        self, tracked: TrackedRequest, reason: str, retryable: bool, now_s: float
    ) -> list[Effect]:
        """Run it again elsewhere: from its beginning, or behind what the front has of the answer."""
        tracked.num_failures += 1
        if not retryable or tracked.num_failures >= self._limits.max_attempts:
            return self.fail(tracked, reason)
        effects = self._release_pair(tracked)
        tracked.refused_by.clear()
        tracked.is_promised = True
        tracked.last_failure, tracked.waiting_since_s = reason, now_s
        if tracked.may_have_begun:
            tracked.move_to(RequestState.INTERRUPTED)
            return [*effects, Effect(tracked.front, Interrupted(tracked.request.request_id))]
        tracked.move_to(RequestState.WAITING)
        return effects + self._place_or_wait(tracked, now_s)

    # -- placing ------------------------------------------------------------------------------------

    def _place_or_wait(
        self, tracked: TrackedRequest, now_s: float, *, may_displace: bool = True
    ) -> list[Effect]:
        placement = self._schedule(tracked, now_s)
        if placement is not None:
            if tracked.must_meet_slos and (rejection := self._check(tracked, placement, now_s)) is not None:
                if may_displace and (others := self._who_gives_way(tracked, placement, rejection, now_s)):
                    return self._displace(others, tracked, now_s)
                if rejection.reason is Reason.TBT and self._may_wait(tracked, placement, now_s):
                    return []
                return self._reject_by_slo(tracked, rejection, now_s)
            return self._assign(tracked, placement, now_s)
        if tracked.refused_by:
            placement = self._scheduler.schedule(tracked.request, now_s)
            if placement is not None:
                if self._may_wait(tracked, placement, now_s):
                    tracked.refused_by.clear()
                    return []
                return self._reject(tracked, Reason.DOUBLE_CHECK, tracked.last_failure)
        if (too_large := why_too_large(tracked.request, self._instances)) is not None:
            return self._give_up(tracked, Reason.TOO_LARGE, too_large)
        if now_s - tracked.waiting_since_s > self._limits.placement_timeout_s:
            why = f" ({tracked.last_failure})" if tracked.last_failure else ""
            message = f"no pair of instances came back in time{why}"
            return self._give_up(tracked, Reason.NEVER_PLACED, message)
        return []

    def _check(
        self, tracked: TrackedRequest, placement: Placement, now_s: float, freed: Freed = NOTHING
    ) -> Rejection | None:
        waited_s = now_s - tracked.submitted_s
        return self._admission.check_arrival(
            tracked.request, placement, self._slos(tracked), waited_s, now_s, freed
        )

    def _slos(self, tracked: TrackedRequest) -> SLOs:
        """Its own, and the TBT of the strictest with which it would share a batch."""
        slos = self._limits.slos_of(tracked.request)
        if not self._limits.slo_classes:
            return slos
        all_s = (slos.tbt_s, self._assignments.strictest_tbt_slo_s)
        return slos._replace(tbt_s=min((tbt_s for tbt_s in all_s if tbt_s is not None), default=None))

    # -- waiting for load to fall -------------------------------------------------------------------

    def _may_wait(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> bool:
        """Section 7: within its TTFT slack, if there is room; then it does."""
        ttft_slo_s = self._limits.slos_of(tracked.request).ttft_s
        first_token_s = now_s + placement.prediction.ttft_s
        if ttft_slo_s is None or first_token_s > tracked.submitted_s + ttft_slo_s:
            return False
        if tracked.request_id not in self._room and len(self._room) >= self._limits.max_waiting:
            return False
        self._room[tracked.request_id] = tracked
        return True

    def _place_those_that_wait(self, now_s: float, *, reject: bool = False) -> list[Effect]:
        """In order, up to the first one that cannot be placed; and `reject` those whose slack is over."""
        if not self._room:
            return []
        effects: list[Effect] = []
        is_blocked = False
        for tracked in self._displacement.in_order(self._room.values(), now_s):
            if is_blocked:
                effects += self._reject_if_late(tracked, now_s)
                continue
            effects += self._place_or_wait(tracked, now_s)
            if tracked.request_id in self._room:
                if not reject:
                    break
                is_blocked = True
        return effects

    def _reject_if_late(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        placement = self._schedule(tracked, now_s)
        if placement is not None and tracked.must_meet_slos:
            rejection = self._check(tracked, placement, now_s)
            if rejection is not None and not self._may_wait(tracked, placement, now_s):
                return self._reject_by_slo(tracked, rejection, now_s)
        return []

    def _reject_the_last(self, newest: TrackedRequest, now_s: float) -> list[Effect]:
        """If one more waits than may: of those that have not been promised anything, in the same order."""
        most = self._limits.max_waiting
        if len(self._room) <= most:
            return []
        unpromised = [tracked for tracked in self._room.values() if tracked.must_meet_slos]
        last = self._displacement.in_order(unpromised, now_s)[-1]
        self._outcomes.num_displaced += last is not newest
        message = f"{most} requests wait for load to fall, the limit is {most}"
        return self._reject(last, Reason.TOO_MANY_WAIT, message)

    # -- giving way ---------------------------------------------------------------------------------

    def _who_gives_way(
        self, tracked: TrackedRequest, placement: Placement, rejection: Rejection, now_s: float
    ) -> list[TrackedRequest]:
        """Enough for `tracked` to meet its SLOs; nobody if that cannot be."""

        def is_enough(freed: Freed) -> bool:
            return self._check(tracked, placement, now_s, freed) is None

        elsewhere_too = rejection.reason is not Reason.TTFT
        return self._displacement.enough(tracked, placement, now_s, is_enough, elsewhere_too=elsewhere_too)

    def _displace(self, others: list[TrackedRequest], tracked: TrackedRequest, now_s: float) -> list[Effect]:
        effects = [effect for other in others for effect in self._take_back(other, now_s)]
        self._outcomes.num_displaced += len(others)
        placement = self._schedule(tracked, now_s)
        assert placement is not None
        effects += self._assign(tracked, placement, now_s)
        for other in others:
            effects += self._place_or_wait(other, now_s, may_displace=False)
        return effects

    def _displace_those_that_are_late(
        self, tracked: TrackedRequest, placement: Placement, now_s: float
    ) -> list[Effect]:
        """Prompts of a lower class stand behind it now, and some of them too long."""
        if not self._view.loads.has_several_priorities:
            return []
        late = []
        for request_id in placement.prefill.requests:
            other = self.requests[request_id]
            if other.request.priority > tracked.request.priority and self._displacement.may_give_way(other):
                assignment = self._assignments.get(request_id)
                assignment.delay_s += placement.prediction.prefill_s
                ttft_slo_s = self._limits.slos_of(other.request).ttft_s
                if ttft_slo_s is not None and assignment.first_token_s > other.submitted_s + ttft_slo_s:
                    late.append(other)
        self._outcomes.num_displaced += len(late)
        effects = [effect for other in late for effect in self._take_back(other, now_s)]
        for other in late:
            effects += self._place_or_wait(other, now_s, may_displace=False)
        return effects

    def _take_back(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """It has not begun: it waits for another pair."""
        effects = self._release_pair(tracked)
        tracked.waiting_since_s = now_s
        tracked.move_to(RequestState.WAITING)
        return effects

    # -- pairs --------------------------------------------------------------------------------------

    def _schedule(self, tracked: TrackedRequest, now_s: float) -> Placement | None:
        return self._scheduler.schedule(tracked.request, now_s, tracked.refused_by)

    def _give_up(self, tracked: TrackedRequest, reason: Reason, message: str) -> list[Effect]:
        """Reject it if the client has read nothing; else it has failed."""
        if tracked.may_have_begun:
            return self.fail(tracked, message)
        return self._reject(tracked, reason, message)

    def _reject(
        self, tracked: TrackedRequest, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> list[Effect]:
        effects = self._release_pair(tracked)
        self._end(tracked, RequestState.FAILED)
        return [*effects, self.rejected(tracked.front, tracked.request_id, reason, message, retry_after_s)]

    def _reject_by_slo(self, tracked: TrackedRequest, rejection: Rejection, now_s: float) -> list[Effect]:
        """Algorithm 1, line 26: HTTP 429."""
        self._admission.note(tracked.request, rejection, now_s)
        return self._reject(tracked, rejection.reason, rejection.message, rejection.retry_after_s)

    def _assign(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> list[Effect]:
        self._room.pop(tracked.request_id, None)
        tracked.attempt += 1
        tracked.prefill, tracked.decode = placement.prefill.name, placement.decode.name
        num_tokens = len(tracked.request.token_ids)
        for instance in (placement.prefill, placement.decode):
            instance.requests[tracked.request_id] = num_tokens
        tbt_slo_s = self._limits.slos_of(tracked.request).tbt_s
        self._assignments.assign(tracked.request, placement, tbt_slo_s, now_s)
        tracked.move_to(RequestState.RESERVING)
        may_refuse = self._admission.has_double_check and not tracked.may_have_begun
        shares_cores = placement.decode.shares_cores(placement.prefill)
        reserve = Reserve(tracked.ref, tracked.request, self._slos(tracked).tbt_s, may_refuse, shares_cores)
        order = Effect(placement.decode.identity, reserve)
        return [order, *self._displace_those_that_are_late(tracked, placement, now_s)]

    def _release_pair(self, tracked: TrackedRequest) -> list[Effect]:
        """Take the request off its instances and tell those that are alive to stop."""
        effects = []
        self._assignments.release(tracked.request_id)
        for instance in self._pair(tracked):
            instance.requests.pop(tracked.request_id, None)
            effects.append(Effect(instance.identity, Abort(tracked.ref)))
        tracked.prefill = tracked.decode = None
        return effects

    def _end(self, tracked: TrackedRequest, state: RequestState) -> None:
        self._room.pop(tracked.request_id, None)
        self._assignments.release(tracked.request_id)
        for instance in self._pair(tracked):
            instance.requests.pop(tracked.request_id, None)
        tracked.move_to(state)
        del self.requests[tracked.request_id]

    def _pair(self, tracked: TrackedRequest) -> Iterable[Instance]:
        candidates = {tracked.prefill, tracked.decode}
        return [
            instance for name in sorted(filter(None, candidates)) if (instance := self._instances.get(name))
        ]


def _num_held_blocks(request: Request, grant: Grant) -> int:
    """Of the prompt's first blocks, those that the decode side does not lack."""
    missing = [page.block_index for page in grant.pages]
    return min([*missing, len(request.block_keys)])
