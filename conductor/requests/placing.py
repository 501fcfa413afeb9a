"""Which accepted requests get a pair of instances, wait for load to fall, give way to others, are rejected.

Owns: the accepted requests, in which order they are placed. Does not know: what fronts and workers say, how a
pair is chosen (`conductor.scheduling.algorithm1`), which requests are too many
(`conductor.admission.overload`).
"""

from collections import Counter

from conductor.admission.overload import NOTHING, Admission, Freed
from conductor.effects import Effect
from conductor.requests.displacement import Displacement
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.pairs import Pairs
from conductor.requests.suspicion import Suspicion
from conductor.rules import Limits, Rules
from conductor.scheduling.native import new_scheduler
from conductor.view.assignments import Assignments
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance, Instances
from conductor.view.outcomes import Outcomes
from conductor.view.placement import Placement, Reason, Rejection, why_too_large
from mooncake.messages.fronts import Failed, Rejected
from mooncake.messages.workers import Role


class Placing:
    """`requests`: all that have been accepted. `instances` and `view` are the Conductor's own."""

    def __init__(
        self,
        instances: Instances,
        view: ClusterView,
        limits: Limits,
        rules: Rules,
        admission: Admission,
        assignments: Assignments,
        pairs: Pairs,
        outcomes: Outcomes,
        suspicion: Suspicion,
    ) -> None:
        self._instances, self._view, self._limits, self._outcomes = instances, view, limits, outcomes
        self._admission, self._assignments, self._pairs = admission, assignments, pairs
        self._suspicion = suspicion
        self._scheduler = new_scheduler(view, rules)
        self.requests: dict[str, TrackedRequest] = {}
        self._displacement = Displacement(self.requests, assignments)
        self._room: dict[str, TrackedRequest] = {}
        """those that wait for load to fall"""
        self._num_released = 0
        """of all placements, when those that wait were last tried"""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for load to fall, while their TTFT SLO allows it."""
        return len(self._room)

    def submit(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """It has been accepted, unless its SLOs say otherwise."""
        self.requests[tracked.request_id] = tracked
        if not self._room or self._limits.slos_of(tracked.request).ttft_s is None:
            return self.place(tracked, now_s)
        self._room[tracked.request_id] = tracked
        return self._place_those_that_wait(now_s) + self._reject_the_last(tracked, now_s)

    def make_place(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """There are as many requests as there may be: one gives way, or (no effect) nobody does."""
        other = self._displacement.first(tracked, now_s)
        if other is None:
            return []
        self._outcomes.num_displaced += 1
        message = "it gave way to a request of a higher class, or of a tenant that has less"
        return self._reject(other, Reason.TOO_MANY, message, now_s)

    def is_owed_a_place(self, tenant: str) -> bool:
        """Whether the tenant stays within an equal part of the places with one more request.

        Then it is accepted although nobody can give way: those that have begun end some time. So there are at
        most `max_running_requests` times 1 + 1/2 + 1/3 ... of as many terms as there are tenants.
        """
        nums = Counter(tracked.request.tenant for tracked in self.requests.values())
        nums[tenant] += 1
        return nums[tenant] * len(nums) <= self._limits.max_running_requests

    def place(self, tracked: TrackedRequest, now_s: float, *, may_displace: bool = True) -> list[Effect]:
        """It gets a pair, waits, or is rejected."""
        placement = self._schedule(tracked, now_s)
        if placement is not None:
            if tracked.refused_by and self._is_refused(tracked, placement, now_s):
                if self._may_wait(tracked, placement, now_s):
                    tracked.refused_by.clear()
                    return []
                return self._reject(tracked, Reason.DOUBLE_CHECK, tracked.last_failure, now_s)
            if tracked.must_meet_slos and (rejection := self._check(tracked, placement, now_s)) is not None:
                if may_displace and (others := self._who_gives_way(tracked, placement, rejection, now_s)):
                    return self._displace(others, tracked, now_s)
                if rejection.reason is Reason.TBT and self._may_wait(tracked, placement, now_s):
                    return []
                return self.reject_by_slo(tracked, rejection, now_s)
            return self._assign(tracked, placement, now_s)
        if (too_large := why_too_large(tracked.request, self._instances)) is not None:
            return self._give_up(tracked, Reason.TOO_LARGE, too_large, now_s)
        if not tracked.may_have_begun and (role := self._role_that_is_gone) is not None:
            message = f"{self._instances.why_none(role)}{tracked.why_it_waits}"
            return self._reject(tracked, Reason.UNREADY, message, now_s)
        if now_s - tracked.waiting_since_s > self._limits.placement_timeout_s:
            message = f"no pair of instances came back in time{tracked.why_it_waits}"
            return self._give_up(tracked, Reason.NEVER_PLACED, message, now_s)
        return []

    @property
    def _role_that_is_gone(self) -> Role | None:
        """A role of which no instance takes requests, nor is expected back."""
        return next((role for role in Role if self._instances.largest(role) is None), None)

    def place_elsewhere(
        self, tracked: TrackedRequest, decode: Instance, reason: str, now_s: float
    ) -> list[Effect]:
        """The double check of section 3: `decode` has refused it. Reject it if all others have."""
        effects = self._pairs.release(tracked, now_s)
        tracked.refused_by.add(decode.name)
        tracked.may_have_begun = False  # its first token would have left after the check
        tracked.last_failure, tracked.waiting_since_s = reason, now_s
        tracked.move_to(RequestState.WAITING)
        effects += self.place(tracked, now_s)
        if tracked.request_id in self._room:
            self._num_released = self._assignments.num_released  # whoever refuses has no room
        return effects

    def _is_refused(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> bool:
        """Whether no decode instance is left for it, or no time to try another one."""
        if placement.decode.name in tracked.refused_by:
            return True
        return not tracked.is_promised and self._is_late(tracked, placement, now_s)

    def hand_back(self, instance: Instance, now_s: float) -> list[Effect]:
        """It drains: what waits there goes elsewhere if anybody has room for it; the rest ends there."""
        effects = []
        here = [self.requests[request_id] for request_id in instance.requests]
        queued = [tracked for tracked in here if self._displacement.is_queued(tracked)]
        for tracked in queued:
            tracked.is_promised = True  # before the first one goes: it must not displace the next
        for tracked in queued:
            if self._suspicion.must_wait(tracked.request_id):
                continue
            if self._scheduler.has_room(tracked.request, tracked.refused_by):
                effects += self._take_back(tracked, now_s)
                placement = self._schedule(tracked, now_s)
                assert placement is not None
                effects += self._assign(tracked, placement, now_s)
        return effects

    def _check(
        self, tracked: TrackedRequest, placement: Placement, now_s: float, freed: Freed = NOTHING
    ) -> Rejection | None:
        waited_s = now_s - tracked.submitted_s
        return self._admission.check_arrival(
            tracked.request, placement, self._pairs.slos(tracked), waited_s, now_s, freed
        )

    # -- waiting for load to fall -----------------------------------------------------------------------

    def place_waiting(self, now_s: float) -> list[Effect]:
        """Time has passed, or there is another instance."""
        effects = self._place_those_that_wait(now_s, reject=True)
        for tracked in list(self.requests.values()):
            if tracked.state is RequestState.WAITING and tracked.request_id not in self._room:
                effects += self.place(tracked, now_s)
        return effects

    def use_room(self, now_s: float) -> list[Effect]:
        """Call after every event: if a placement has ended by it, those that wait are tried."""
        if self._num_released == self._assignments.num_released:
            return []
        effects = self._place_those_that_wait(now_s)
        self._num_released = self._assignments.num_released
        return effects

    def _may_wait(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> bool:
        """Section 7: within its TTFT slack, if there is room; then it does."""
        ttft_slo_s = self._limits.slos_of(tracked.request).ttft_s
        if ttft_slo_s is None or self._is_late(tracked, placement, now_s):
            return False
        if tracked.request_id not in self._room and len(self._room) >= self._limits.max_waiting:
            return False
        self._room[tracked.request_id] = tracked
        return True

    def _is_late(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> bool:
        ttft_slo_s = self._limits.slos_of(tracked.request).ttft_s
        first_token_s = now_s + placement.prediction.ttft_s
        return ttft_slo_s is not None and first_token_s > tracked.submitted_s + ttft_slo_s

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
            effects += self.place(tracked, now_s)
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
                return self.reject_by_slo(tracked, rejection, now_s)
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
        return self._reject(last, Reason.TOO_MANY_WAIT, message, now_s)

    # -- giving way -------------------------------------------------------------------------------------

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
            effects += self.place(other, now_s, may_displace=False)
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
            effects += self.place(other, now_s, may_displace=False)
        return effects

    def _take_back(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """It has not begun: it waits for another pair."""
        effects = self._pairs.release(tracked, now_s)
        tracked.waiting_since_s = now_s
        tracked.move_to(RequestState.WAITING)
        return effects

    def _schedule(self, tracked: TrackedRequest, now_s: float) -> Placement | None:
        if self._suspicion.must_wait(tracked.request_id):
            return None
        return self._scheduler.schedule(tracked.request, now_s, tracked.refused_by)

    def _assign(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> list[Effect]:
        self._room.pop(tracked.request_id, None)
        order = self._pairs.assign(tracked, placement, now_s)
        return [order, *self._displace_those_that_are_late(tracked, placement, now_s)]

    # -- ends -------------------------------------------------------------------------------------------

    def end(self, tracked: TrackedRequest, state: RequestState, now_s: float) -> None:
        """Nobody follows it any more."""
        self._room.pop(tracked.request_id, None)
        self._pairs.leave(tracked, now_s)
        tracked.move_to(state)
        del self.requests[tracked.request_id]
        self._suspicion.ended(tracked.request_id, has_finished=state is RequestState.FINISHED)

    def fail(self, tracked: TrackedRequest, reason: str, now_s: float) -> list[Effect]:
        """It cannot be finished."""
        effects = self._pairs.release(tracked, now_s)
        self.end(tracked, RequestState.FAILED, now_s)
        return [*effects, Effect(tracked.front, Failed(tracked.request_id, reason))]

    def _give_up(self, tracked: TrackedRequest, reason: Reason, message: str, now_s: float) -> list[Effect]:
        """Reject it if the client has read nothing; else it has failed."""
        if tracked.may_have_begun:
            return self.fail(tracked, message, now_s)
        return self._reject(tracked, reason, message, now_s)

    def rejected(
        self, front: bytes, request_id: str, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> Effect:
        """A request is turned away, accepted before or not."""
        self._outcomes.rejected(reason)
        if reason.status in (429, 503) and retry_after_s is None:
            retry_after_s = self._limits.retry_after_s
        return Effect(front, Rejected(request_id, reason.status, message, retry_after_s))

    def _reject(
        self,
        tracked: TrackedRequest,
        reason: Reason,
        message: str,
        now_s: float,
        retry_after_s: float | None = None,
    ) -> list[Effect]:
        effects = self._pairs.release(tracked, now_s)
        self.end(tracked, RequestState.FAILED, now_s)
        return [*effects, self.rejected(tracked.front, tracked.request_id, reason, message, retry_after_s)]

    def reject_by_slo(self, tracked: TrackedRequest, rejection: Rejection, now_s: float) -> list[Effect]:
        """Algorithm 1, line 26: HTTP 429."""
        self._admission.note(tracked.request, rejection, now_s)
        return self._reject(tracked, rejection.reason, rejection.message, now_s, rejection.retry_after_s)
