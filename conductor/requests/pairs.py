"""The pairs of instances that accepted requests have: who is told of them, and who is not any more.

Owns: a request's place on both instances. Does not know: how a pair is chosen, why a request leaves it.
"""

from conductor.effects import Effect
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.suspicion import Suspicion
from conductor.rules import Limits, SLOs
from conductor.view.assignments import Assignments
from conductor.view.instances import Instance, Instances
from conductor.view.placement import Placement
from mooncake.messages.workers import Abort, Reserve


class Pairs:
    """Of all requests. `may_refuse`: decode instances check again when prefill has ended."""

    def __init__(
        self,
        instances: Instances,
        limits: Limits,
        assignments: Assignments,
        suspicion: Suspicion,
        *,
        may_refuse: bool,
    ) -> None:
        self._instances, self._limits, self._assignments = instances, limits, assignments
        self._suspicion = suspicion
        self._may_refuse = may_refuse

    def slos(self, tracked: TrackedRequest) -> SLOs:
        """Its own, and the TBT of the strictest with which it would share a batch."""
        slos = self._limits.slos_of(tracked.request)
        if not self._limits.slo_classes:
            return slos
        all_s = (slos.tbt_s, self._assignments.strictest_tbt_slo_s)
        return slos._replace(tbt_s=min((tbt_s for tbt_s in all_s if tbt_s is not None), default=None))

    def assign(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> Effect:
        """It has this pair from now on: the order to begin with it."""
        tracked.begin_attempt()
        tracked.prefill, tracked.decode = placement.prefill.name, placement.decode.name
        tracked.lives = (placement.prefill.identity, placement.decode.identity)
        num_tokens = len(tracked.request.token_ids)
        for instance in (placement.prefill, placement.decode):
            instance.requests[tracked.request_id] = num_tokens
        slos = self._limits.slos_of(tracked.request)
        self._assignments.assign(tracked.request, placement, slos, now_s)
        tracked.move_to(RequestState.RESERVING)
        may_refuse = self._may_refuse and not tracked.may_have_begun
        shares_cores = placement.decode.shares_cores(placement.prefill)
        alone = self._suspicion.is_suspect(tracked.request_id)
        tbt_slo_s = self.slos(tracked).tbt_s
        reserve = Reserve(tracked.ref, tracked.request, tbt_slo_s, may_refuse, shares_cores, alone)
        return Effect(placement.decode.identity, reserve)

    def release(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Take the request off its instances and tell those that are alive to stop."""
        effects = [Effect(instance.identity, Abort(tracked.ref)) for instance in self.leave(tracked, now_s)]
        tracked.prefill = tracked.decode = None
        return effects

    def leave(self, tracked: TrackedRequest, now_s: float) -> list[Instance]:
        """Take the request off its instances: those of them that are alive."""
        self._assignments.release(tracked.request_id, now_s)
        names = sorted({name for name in (tracked.prefill, tracked.decode) if name is not None})
        pair = [instance for name in names if (instance := self._instances.get(name)) is not None]
        for instance in pair:
            instance.requests.pop(tracked.request_id, None)
        return pair
