"""The choice of requests that yield to another one, by their priority and by their tenant's work.

A request that would be rejected may preempt requests that have not begun. Requests with the highest priority
number yield first. If priorities are equal, requests of the tenant with the most work yield, provided that
this tenant keeps at least as much work as the preempting request's tenant. Each such step leads towards
max-min fairness. Of one tenant the latest request yields first.

Owns: the order. Does not know: how many requests are enough, where preempted requests go.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from conductor.admission.overload import NOTHING, Freed
from conductor.requests.lifecycle import TrackedRequest
from conductor.requests.registry import Requests
from conductor.view.placement import Placement
from mooncake.messages.aging import aged_priority


class Contender(NamedTuple):
    """A request that needs room, or a request that may yield its room."""

    tracked: TrackedRequest
    level: int
    """The priority number, which aging lowers while the request waits."""
    device_s: float
    """Predicted device seconds that the request takes."""

    @property
    def tenant(self) -> str:
        """The tenant of the request."""
        return self.tracked.request.tenant


def preemptible(
    contender: Contender, not_begun: Iterable[Contender], shares_s: Mapping[str, float]
) -> Iterator[Contender]:
    """Yield the requests that may be preempted for `contender`, in the order of preemption.

    Args:
        contender: The request that needs room.
        not_begun: The requests that may be preempted, oldest first.
        shares_s: The work of each tenant in device seconds, without `contender`'s own.
    """
    left = sorted(not_begun, key=lambda other: other.level)[::-1]
    shares_s = defaultdict(float, shares_s)
    while possible := [other for other in left if _yields(other, contender, shares_s)]:
        lowest = [other for other in possible if other.level == possible[0].level]
        chosen = max(lowest, key=lambda other: shares_s[other.tenant])
        left.remove(chosen)
        shares_s[chosen.tenant] -= chosen.device_s
        yield chosen


def _yields(other: Contender, contender: Contender, shares_s: Mapping[str, float]) -> bool:
    if other.level != contender.level:
        return other.level > contender.level
    if other.tenant == contender.tenant:
        return False
    return shares_s[other.tenant] - other.device_s >= shares_s[contender.tenant] + contender.device_s


class Preemption:
    """Chooses requests to preempt among all accepted requests."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def may_yield(self, tracked: TrackedRequest) -> bool:
        """Return whether the request may be preempted: it has not begun, and it may be rejected."""
        return tracked.may_be_rejected and self._requests.has_not_begun(tracked)

    def first(self, num: int, tracked: TrackedRequest, device_s: float, now_s: float) -> list[TrackedRequest]:
        """Return the `num` placed requests that yield first to the new request `tracked`, or all that yield.

        `device_s`: predicted seconds of the new request's prefill. If even 0 seconds give fewer than `num`
        requests, too few would yield to any prompt.
        """
        victims = self._preemptible(tracked, device_s, now_s, self._requests.by_id.values())
        return [victim.tracked for victim in itertools.islice(victims, num)]

    def enough(
        self,
        tracked: TrackedRequest,
        placement: Placement,
        now_s: float,
        is_enough: Callable[[Freed], bool],
        *,
        elsewhere_too: bool,
    ) -> list[TrackedRequest]:
        """Return the requests to preempt so that `tracked` can be placed.

        Args:
            tracked: The request that needs room.
            placement: The pair that the request would get.
            now_s: The time.
            is_enough: A function that returns whether an amount of freed work suffices.
            elsewhere_too: Whether requests on other prefill instances may be preempted, too.

        Returns:
            The requests to preempt, in order; empty if preempting all of them would not be enough.
        """
        here = placement.prefill.name
        others = [other for other in self._requests.by_id.values() if elsewhere_too or other.prefill == here]
        chosen, freed = [], NOTHING
        for victim in self._preemptible(tracked, placement.prediction.prefill_s, now_s, others):
            other = victim.tracked
            chosen.append(other)
            is_ahead = other.prefill == here and other.request.priority <= tracked.request.priority
            freed = freed.and_of(other.placed, is_ahead=is_ahead)
            if is_enough(freed):
                return chosen
        return []

    def in_order(self, waiting: Iterable[TrackedRequest], now_s: float) -> list[TrackedRequest]:
        """Return the requests sorted by aged priority, then by their tenant's work, then by arrival."""
        shares_s = self._shares_s()
        return sorted(
            waiting,
            key=lambda tracked: (
                _level(tracked, now_s),
                shares_s[tracked.request.tenant],
                tracked.submitted_s,
            ),
        )

    def _preemptible(
        self, tracked: TrackedRequest, device_s: float, now_s: float, others: Iterable[TrackedRequest]
    ) -> Iterator[Contender]:
        tenant, level = tracked.request.tenant, _level(tracked, now_s)
        not_begun = [
            Contender(other, _level(other, now_s), other.placed.device_s)
            for other in others
            # If a tenant sends more than may run, most requests are its own: this skips them cheaply.
            if (other.request.tenant != tenant or _level(other, now_s) != level) and self.may_yield(other)
        ]
        shares_s = self._shares_s() if not_begun else {}
        return preemptible(Contender(tracked, level, device_s), not_begun, shares_s)

    def _shares_s(self) -> Mapping[str, float]:
        """Return the predicted device seconds of each tenant's placed requests."""
        shares_s: defaultdict[str, float] = defaultdict(float)
        for tracked in self._requests.by_id.values():
            if tracked.assignment is not None:
                shares_s[tracked.request.tenant] += tracked.assignment.device_s
        return shares_s


def _level(tracked: TrackedRequest, now_s: float) -> int:
    return aged_priority(tracked.request.priority, now_s - tracked.submitted_s)
