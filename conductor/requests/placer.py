"""Decisions about accepted requests: a pair of instances, the admission queue, preemption, rejection.

Owns: these decisions, and the order in which requests are placed. Does not know: the messages of fronts and
workers (`endings`), how a pair is chosen (`conductor.scheduling.algorithm1`), which requests are too many
(`conductor.admission.overload`).
"""

import math

from conductor.admission.overload import NOTHING, Admission, Freed
from conductor.effects import Effect
from conductor.requests.endings import Endings
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.preemption import Preemption
from conductor.requests.registry import Requests
from conductor.scheduling.algorithm1 import Scheduler
from conductor.view.instances import Instance
from conductor.view.placement import Placement, why_too_large
from conductor.view.rejection import Reason, Rejection
from mooncake.messages.workers import STAGES


class Placer:
    """Places, queues, preempts and rejects the requests of the registry."""

    def __init__(
        self, requests: Requests, scheduler: Scheduler, admission: Admission, endings: Endings
    ) -> None:
        self._requests, self._scheduler, self._admission = requests, scheduler, admission
        self._endings = endings
        self._instances, self._limits, self._stats = requests.instances, requests.limits, requests.stats
        self._preemption = Preemption(requests)
        self._num_released = 0
        """The registry's number of released pairs at the latest try of the admission queue."""

    # -- new requests -------------------------------------------------------------------------------

    def submit(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Accept a new request, and place, queue or reject it."""
        self._requests.accept(tracked)
        if not self._requests.admission_queue or tracked.slos.ttft_s is None:
            return self.place(tracked, now_s)
        self._requests.enqueue(tracked)
        return self._place_queued(now_s) + self._shorten_queue(tracked, now_s)

    def reject_for(self, tracked: TrackedRequest, num: int, now_s: float) -> list[Effect]:
        """Reject `num` running requests in favour of a new one, because of the limit of running requests.

        Returns no effects if fewer requests yield, or if the new request would still get no pair.
        """
        if len(self._preemption.first(num, tracked, 0.0, now_s)) < num:
            return []  # too few yield even to a prompt of 0 seconds: this check is cheaper than a placement
        placement = self._schedule(tracked, now_s)
        if placement is None:
            return []
        placement, rejection = self._checked(tracked, placement, now_s)
        victims = [] if rejection is None else self._victims(tracked, placement, rejection, now_s)
        if rejection is not None and not victims:
            return []
        others = victims[:num]  # the new request needs their room, too
        for other in self._preemption.first(num, tracked, placement.prediction.prefill_s, now_s):
            if len(others) < num and all(other is not victim for victim in others):
                others.append(other)
        if len(others) < num:
            return []
        self._stats.num_preempted += num
        message = "it gave way to a request of a higher class, or of a tenant that has less"
        rejected = [self._endings.reject(other, Reason.TOO_MANY, message, now_s) for other in others]
        return [effect for effects in rejected for effect in effects]

    # -- one request --------------------------------------------------------------------------------

    def place(self, tracked: TrackedRequest, now_s: float, *, may_preempt: bool = True) -> list[Effect]:
        """Place the request on a pair, let it wait, or reject it.

        If there are no effects, the request waits: QUEUED if it is in the admission queue, for load to fall
        or for a pair with room; otherwise WAITING for a pair with room.

        `may_preempt`: whether requests that have not begun may be preempted if this one would miss an SLO.
        """
        placement = self._schedule(tracked, now_s)
        if placement is None:
            return self._wait_for_instances(tracked, now_s)
        if self._has_no_other_try(tracked, placement, now_s):
            if self._enqueue_if_in_time(tracked, placement, now_s):
                tracked.refused_by.clear()
                return []
            return self._endings.reject(tracked, Reason.DOUBLE_CHECK, tracked.last_failure, now_s)
        placement, rejection = self._checked(tracked, placement, now_s)
        if rejection is None:
            return self._assign(tracked, placement, now_s)
        if may_preempt and (others := self._victims(tracked, placement, rejection, now_s)):
            return self._preempt(others, tracked, now_s)
        if rejection.reason is Reason.TBT and self._enqueue_if_in_time(tracked, placement, now_s):
            return []
        return self._endings.reject_by_slo(tracked, rejection, now_s)

    def place_after_refusal(
        self, tracked: TrackedRequest, decode: Instance, reason: str, now_s: float
    ) -> list[Effect]:
        """Place a request again after the decode instance `decode` has refused it (double check, section 3).

        If all decode instances have refused the request, or another one would be too late, the request waits
        in the admission queue or is rejected.
        """
        effects = self._requests.release(tracked, RequestState.WAITING, now_s)
        tracked.refused_by.add(decode.name)
        tracked.may_have_begun = False  # its first token would have left after the check
        tracked.last_failure = reason
        effects += self.place(tracked, now_s)
        if tracked.state is RequestState.QUEUED:
            self._num_released = self._requests.num_released  # an instance that refuses has no room
        return effects

    def drain(self, instance: Instance, now_s: float) -> list[Effect]:
        """Move requests that have not begun from an instance that is being emptied.

        They move only to instances with room. From now on no prediction may reject them, even if they stay.
        """
        effects = []
        here = [self._requests.by_id[request_id] for request_id in instance.requests]
        not_begun = [tracked for tracked in here if self._requests.has_not_begun(tracked)]
        for tracked in not_begun:
            tracked.is_promised = True  # before the first one is placed: it must not preempt the next
        for tracked in not_begun:
            placement = self._schedule(tracked, now_s)
            if placement is None or placement.decode.name in tracked.refused_by:
                continue
            effects += self._requests.release(tracked, RequestState.WAITING, now_s)
            # The request's own load is gone now, so another pair may be better.
            placement = self._schedule(tracked, now_s) or placement
            effects += self._assign(tracked, placement, now_s)
        return effects

    def _schedule(
        self,
        tracked: TrackedRequest,
        now_s: float,
        *,
        may_compute_again: bool = False,
        inlined: bool | None = None,
    ) -> Placement | None:
        if self._requests.suspicion.must_wait(tracked.request_id):
            return None
        tbt_slo_s = self._requests.slos_in_batch(tracked).tbt_s
        return self._scheduler.schedule(
            tracked.request,
            now_s,
            tracked.refused_by,
            tbt_slo_s,
            may_compute_again=may_compute_again,
            inlined=inlined,
        )

    def _checked(
        self, tracked: TrackedRequest, placement: Placement, now_s: float
    ) -> tuple[Placement, Rejection | None]:
        """Return the best placement for the request, and the rejection if that placement misses an SLO.

        The best placement is `placement` if it meets the TTFT SLO. Otherwise others are tried in this order:

        1. If the prompt would wait for blocks that other prompts compute: the placement with the soonest
           first token, even if it computes the blocks again. It replaces `placement` in any case.
        2. If there are inlining instances: inlined instead of a pair, or a pair instead of inlined. It is
           taken only if it meets both SLOs.

        Returns:
            The chosen placement, and the rejection for the SLO that it misses. None instead of the rejection
            if it misses no SLO, or if no prediction may reject the request any more.
        """
        if not tracked.may_be_rejected:
            return placement, None
        rejection = self._check(tracked, placement, now_s)
        if rejection is not None and rejection.reason is Reason.TTFT and placement.num_coming_blocks:
            soonest = self._schedule(tracked, now_s, may_compute_again=True)
            assert soonest is not None
            placement, rejection = soonest, self._check(tracked, soonest, now_s)
        if (
            rejection is not None
            and rejection.reason is Reason.TTFT
            and self._requests.view.loads.inlines.any()
        ):
            other = self._schedule(tracked, now_s, may_compute_again=True, inlined=not placement.is_inlined)
            if other is not None and self._check(tracked, other, now_s) is None:
                return other, None
        return placement, rejection

    def _check(
        self, tracked: TrackedRequest, placement: Placement, now_s: float, freed: Freed = NOTHING
    ) -> Rejection | None:
        waited_s = now_s - tracked.submitted_s
        slos = self._requests.slos_in_batch(tracked)
        return self._admission.check_arrival(tracked.request, placement, slos, waited_s, now_s, freed)

    def _assign(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> list[Effect]:
        order = self._requests.assign(tracked, placement, now_s)
        return [order, *self._preempt_late(tracked, placement, now_s)]

    def _has_no_other_try(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> bool:
        """Return whether a refused request has no further decode instance to try, or no time to try one."""
        if not (tracked.refused_by and tracked.may_be_refused):
            return False
        if placement.decode.name in tracked.refused_by:
            return True
        return tracked.is_late(now_s + placement.prediction.ttft_s)

    def _wait_for_instances(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Let a request wait for a pair with room, or end it if no such pair can be expected."""
        if (too_large := why_too_large(tracked.request, self._instances)) is not None:
            return self._endings.give_up(
                tracked, Reason.TOO_LARGE, f"{too_large}{tracked.why_it_waits}", now_s
            )
        missing = next((stage for stage in STAGES if self._instances.lacks(stage)), None)
        if missing is not None and not tracked.may_have_begun:
            message = f"{self._instances.why_none(missing)}{tracked.why_it_waits}"
            return self._endings.reject(tracked, Reason.UNREADY, message, now_s)
        if now_s - tracked.waiting_since_s > self._limits.placement_timeout_s:
            message = f"no pair of instances came back in time{tracked.why_it_waits}"
            return self._endings.give_up(tracked, Reason.NEVER_PLACED, message, now_s)
        return self._reject_if_overdue(tracked, now_s)

    def _reject_if_overdue(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Reject a request without a pair if it has waited for longer than its TTFT SLO allows."""
        if not tracked.may_be_rejected:
            return []
        rejection = self._admission.check_wait(tracked.slos, now_s - tracked.submitted_s)
        if rejection is None:
            return []
        return self._endings.reject(
            tracked, rejection.reason, rejection.message, now_s, rejection.retry_after_s
        )

    # -- the admission queue ------------------------------------------------------------------------

    def retry_waiting(self, now_s: float) -> list[Effect]:
        """Try to place all waiting requests, after time has passed or an instance has joined."""
        effects = self._place_queued(now_s, reject=True)
        for tracked in list(self._requests.by_id.values()):
            if tracked.state is RequestState.WAITING:
                effects += self.place(tracked, now_s)
        return effects

    def retry_queued(self, now_s: float) -> list[Effect]:
        """Try to place queued requests, if requests have left their pairs since the latest try.

        The caller must call it after every message.
        """
        if self._num_released == self._requests.num_released:
            return []
        effects = self._place_queued(now_s)
        self._num_released = self._requests.num_released
        return effects

    def _enqueue_if_in_time(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> bool:
        """Enqueue the request if its first token would be in time and the queue is not full (section 7).

        A request without a TTFT SLO is not enqueued. Returns whether the request is in the queue now.
        """
        if tracked.slos.ttft_s is None or tracked.is_late(now_s + placement.prediction.ttft_s):
            return False
        is_full = len(self._requests.admission_queue) >= self._limits.max_waiting
        if is_full and tracked.state is not RequestState.QUEUED:
            return False
        self._requests.enqueue(tracked)
        return True

    def _place_queued(self, now_s: float, *, reject: bool = False) -> list[Effect]:
        """Place the queued requests in order, if there is room for them.

        A request without room holds up later requests that need at least as much room: those with the same
        TBT SLO and a prompt of at least the same length. `reject`: also reject requests that are held up and
        have no slack left.
        """
        if not self._requests.admission_queue:
            return []
        effects: list[Effect] = []
        blocked: dict[float | None, int] = {}
        """The tokens of the shortest prompt for which there was no room, by TBT SLO."""
        for tracked in self._preemption.in_order(self._requests.admission_queue.values(), now_s):
            num_tokens, tbt_slo_s = len(tracked.request.token_ids), tracked.slos.tbt_s
            if num_tokens >= blocked.get(tbt_slo_s, math.inf):
                effects += self._reject_if_late(tracked, now_s) if reject else []
                continue
            effects += self.place(tracked, now_s)
            if tracked.state is RequestState.QUEUED:
                blocked[tbt_slo_s] = num_tokens
        return effects

    def _reject_if_late(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Reject a queued request that is held up, if it has no slack left."""
        placement = self._schedule(tracked, now_s)
        if placement is None:
            return self._reject_if_overdue(tracked, now_s)
        placement, rejection = self._checked(tracked, placement, now_s)
        if rejection is not None and not self._enqueue_if_in_time(tracked, placement, now_s):
            return self._endings.reject_by_slo(tracked, rejection, now_s)
        return []

    def _shorten_queue(self, newest: TrackedRequest, now_s: float) -> list[Effect]:
        """Reject the last request in the queue's order that may be rejected, if the queue is too long.

        `newest` is the request that has just been submitted.
        """
        most, queue = self._limits.max_waiting, self._requests.admission_queue
        if len(queue) <= most:
            return []
        unpromised = [tracked for tracked in queue.values() if tracked.may_be_rejected]
        last = self._preemption.in_order(unpromised, now_s)[-1]
        self._stats.num_preempted += last is not newest
        message = f"{most} requests wait for load to fall, the limit is {most}"
        return self._endings.reject(last, Reason.TOO_MANY_WAIT, message, now_s)

    # -- preemption ---------------------------------------------------------------------------------

    def _victims(
        self, tracked: TrackedRequest, placement: Placement, rejection: Rejection, now_s: float
    ) -> list[TrackedRequest]:
        """Return the requests to preempt so that `tracked` meets its SLOs; none if preemption cannot help."""

        def is_enough(freed: Freed) -> bool:
            return self._check(tracked, placement, now_s, freed) is None

        elsewhere_too = rejection.reason is not Reason.TTFT
        return self._preemption.enough(tracked, placement, now_s, is_enough, elsewhere_too=elsewhere_too)

    def _preempt(self, others: list[TrackedRequest], tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Release `others`, place `tracked`, and then place `others` again."""
        effects = self._release_all(others, now_s)
        placement = self._schedule(tracked, now_s, may_compute_again=True)
        assert placement is not None
        effects += self._assign(tracked, placement, now_s)
        return effects + self._place_all(others, now_s)

    def _preempt_late(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> list[Effect]:
        """Place again the requests of lower classes that are late now, as `tracked` goes before them."""
        if not self._requests.view.loads.has_several_priorities:
            return []
        late = []
        for request_id in placement.prefill.requests:
            other = self._requests.by_id[request_id]
            if other.request.priority > tracked.request.priority and self._preemption.may_yield(other):
                other.placed.delay_s += placement.prediction.prefill_s
                if other.is_late(other.placed.first_token_s):
                    late.append(other)
        return self._release_all(late, now_s) + self._place_all(late, now_s)

    def _release_all(self, others: list[TrackedRequest], now_s: float) -> list[Effect]:
        self._stats.num_preempted += len(others)
        released = [self._requests.release(other, RequestState.WAITING, now_s) for other in others]
        return [effect for effects in released for effect in effects]

    def _place_all(self, others: list[TrackedRequest], now_s: float) -> list[Effect]:
        placed = [self.place(other, now_s, may_preempt=False) for other in others]
        return [effect for effects in placed for effect in effects]
