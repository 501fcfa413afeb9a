"""Who gives way when there is not room for all: queued work of a lower class, or of who has too much of it.

A request that would be rejected may displace others that have not begun. Those of a higher priority number
go first. Among equals it takes from the tenant with the most work, as long as that still has no less than the
one that asks: a step towards max-min fairness, whatever a single tenant sends. Whoever came last goes first.

Owns: the order. Does not know: what is enough, what becomes of who gives way.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from conductor.admission.overload import NOTHING, Freed
from conductor.requests.lifecycle import NOT_PLACED, RequestState, TrackedRequest
from conductor.view.assignments import Assignments
from conductor.view.placement import Placement
from mooncake.messages.aging import aged_priority


class Claim(NamedTuple):
    """A request's part of the cluster. `level`: its priority, aged. `device_s`: predicted work."""

    request_id: str
    tenant: str
    level: int
    device_s: float


def displaceable(claim: Claim, queued: Iterable[Claim], shares_s: Mapping[str, float]) -> Iterator[Claim]:
    """Of those that are `queued`, oldest first, who gives way to `claim`, one after the other.

    `shares_s`: work of each tenant, that of `claim` not included.
    """
    left = sorted(queued, key=lambda other: other.level)[::-1]
    shares_s = defaultdict(float, shares_s)
    while possible := [other for other in left if _gives_way(other, claim, shares_s)]:
        lowest = [other for other in possible if other.level == possible[0].level]
        chosen = max(lowest, key=lambda other: shares_s[other.tenant])
        left.remove(chosen)
        shares_s[chosen.tenant] -= chosen.device_s
        yield chosen


def _gives_way(other: Claim, claim: Claim, shares_s: Mapping[str, float]) -> bool:
    if other.level != claim.level:
        return other.level > claim.level
    if other.tenant == claim.tenant:
        return False
    return shares_s[other.tenant] - other.device_s >= shares_s[claim.tenant] + claim.device_s


class Displacement:
    """Reads the Conductor's requests, which are in the order in which they came."""

    def __init__(self, requests: Mapping[str, TrackedRequest], assignments: Assignments) -> None:
        self._requests, self._assignments = requests, assignments

    def is_queued(self, tracked: TrackedRequest) -> bool:
        """It has a pair, and nothing of its prompt has been computed there."""
        if tracked.state is RequestState.PREFILLING:
            return not self._assignments.has_begun(tracked.request_id)
        return tracked.state is RequestState.RESERVING

    def may_give_way(self, tracked: TrackedRequest) -> bool:
        """It is queued, and has not been promised that it will be served."""
        return tracked.must_meet_slos and self.is_queued(tracked)

    def first(self, tracked: TrackedRequest, now_s: float) -> TrackedRequest | None:
        """Who gives its place among the running requests to this new one."""
        claim = next(self._displaceable(tracked, 0.0, now_s, self._requests.values()), None)
        return None if claim is None else self._requests[claim.request_id]

    def enough(
        self,
        tracked: TrackedRequest,
        placement: Placement,
        now_s: float,
        is_enough: Callable[[Freed], bool],
        *,
        elsewhere_too: bool,
    ) -> list[TrackedRequest]:
        """Who gives way so that it can be placed so; nobody if all together are not enough.

        Without `elsewhere_too` only those in the queue of its prefill instance.
        """
        here = placement.prefill.name
        others = [other for other in self._requests.values() if elsewhere_too or other.prefill == here]
        chosen, freed = [], NOTHING
        for claim in self._displaceable(tracked, placement.prediction.prefill_s, now_s, others):
            other = self._requests[claim.request_id]
            chosen.append(other)
            is_ahead = other.prefill == here and other.request.priority <= tracked.request.priority
            freed = freed.and_of(self._assignments.get(other.request_id), is_ahead=is_ahead)
            if is_enough(freed):
                return chosen
        return []

    def in_order(self, waiting: Iterable[TrackedRequest], now_s: float) -> list[TrackedRequest]:
        """The lowest priority number first, aged; among equals those of the tenant that has least."""
        shares_s = self._shares_s()
        return sorted(
            waiting,
            key=lambda tracked: (
                aged_priority(tracked.request.priority, now_s - tracked.submitted_s),
                shares_s[tracked.request.tenant],
                tracked.submitted_s,
            ),
        )

    def _displaceable(
        self, tracked: TrackedRequest, device_s: float, now_s: float, others: Iterable[TrackedRequest]
    ) -> Iterator[Claim]:
        queued = [
            self._claim(other, self._assignments.get(other.request_id).device_s, now_s)
            for other in others
            if self.may_give_way(other)
        ]
        return displaceable(self._claim(tracked, device_s, now_s), queued, self._shares_s())

    def _claim(self, tracked: TrackedRequest, device_s: float, now_s: float) -> Claim:
        request = tracked.request
        level = aged_priority(request.priority, now_s - tracked.submitted_s)
        return Claim(tracked.request_id, request.tenant, level, device_s)

    def _shares_s(self) -> Mapping[str, float]:
        """Work of each tenant that has been placed and has not ended."""
        shares_s: defaultdict[str, float] = defaultdict(float)
        for tracked in self._requests.values():
            if tracked.state not in NOT_PLACED:
                shares_s[tracked.request.tenant] += self._assignments.get(tracked.request_id).device_s
        return shares_s
