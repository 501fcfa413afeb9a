"""The numbers of running requests, and the limit that they are checked against.

The front of an answer with several choices submits the first choice alone, with the number of choices. If all
have room, the further choices are *announced*: they count as running, so that their room is kept until they
come or the first choice ends.

Owns: these numbers by tenant and by front, announced choices. Does not know: states, pairs, why a request
ends.
"""

from collections import Counter

from conductor.requests.lifecycle import TrackedRequest


class RunningRequests:
    """The numbers of accepted requests that have not ended, announced choices included.

    Args:
        limit: The most requests that run, `max_running_requests`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.number = 0
        """The number of running requests."""
        self._of_tenant: Counter[str] = Counter()
        self._at_front: Counter[tuple[str, bytes]] = Counter()
        """The numbers of running requests, by tenant and front."""
        self._announcing: dict[str, TrackedRequest] = {}
        """The first choices whose answers have announced choices, by the answers' ids."""

    def num_beyond(self, num_more: int) -> int:
        """Return by how many `num_more` further requests would exceed the limit; at least 0."""
        return max(0, self.number + num_more - self._limit)

    def are_within_equal_part(self, tenant: str, num_more: int) -> bool:
        """Return whether `num_more` further requests leave the tenant within an equal part of the limit."""
        num_tenants = len(self._of_tenant) + (tenant not in self._of_tenant)
        return (self._of_tenant[tenant] + num_more) * num_tenants <= self._limit

    def num_elsewhere(self, tenant: str, front: bytes) -> int:
        """Return the number of the tenant's requests at fronts other than `front`."""
        return self._of_tenant[tenant] - self._at_front[tenant, front]

    def begin(self, tracked: TrackedRequest) -> None:
        """Count an accepted request."""
        self._change(tracked, 1)

    def end(self, tracked: TrackedRequest) -> None:
        """Stop counting an accepted request, and the choices that were announced with it."""
        self._change(tracked, -1)
        if tracked.num_announced:
            self._change_announced(tracked, -tracked.num_announced)

    def announce(self, first: TrackedRequest, num_further: int) -> None:
        """Keep room for the further choices of the answer whose first choice is `first`."""
        self._announcing[first.request.answer_id] = first
        self._change_announced(first, num_further)

    def take_announced(self, tracked: TrackedRequest) -> bool:
        """Return whether a new request is an announced choice. If so, it is no longer announced."""
        first = self._announcing.get(tracked.request.answer_id)
        if first is None:
            return False
        self._change_announced(first, -1)
        return True

    def _change_announced(self, first: TrackedRequest, change: int) -> None:
        first.num_announced += change
        self._change(first, change)
        if not first.num_announced:
            del self._announcing[first.request.answer_id]

    def _change(self, tracked: TrackedRequest, change: int) -> None:
        tenant = tracked.request.tenant
        self.number += change
        self._of_tenant[tenant] += change
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._at_front[tenant, tracked.front] += change
        if not self._at_front[tenant, tracked.front]:
            del self._at_front[tenant, tracked.front]
