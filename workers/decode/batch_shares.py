"""Equal parts of a decode batch: who has more of it than others, and yields to them.

Tenants have equal parts, and of a tenant's part its answers do, however many choices each has. A part is
counted in what it takes most of, slots or pages (dominant resource fairness, Ghodsi et al., NSDI 2011). A
sequence that waits takes from a tenant that still has no less than its own then: a step towards max-min
fairness, as at the Conductor (`conductor.requests.preemption`). So an idle slot is anybody's, and nobody
is swapped out and in again without a change.

Owns: that rule. Does not know: who is admitted when, pages, time.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from mooncake.messages.requests import Flow
from workers.decode.sequence import Sequence

_Party = str | Flow
"""a tenant, or one of its answers"""


class Parts(NamedTuple):
    """What a tenant has of the batch, and what the answer has that is looked at. 1 is the whole batch."""

    tenant: float
    answer: float


class BatchShares:
    """Of the sequences in a batch of at most `num_slots` sequences and `num_pages` pages."""

    def __init__(self, sequences: Iterable[Sequence], num_slots: int, num_pages: int) -> None:
        self._num_slots, self._num_pages = num_slots, num_pages
        self._slots: Counter[_Party] = Counter()
        self._pages: Counter[_Party] = Counter()
        for sequence in sequences:
            self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """It is not in the batch any more."""
        self._count(sequence, -1)

    def parts(self, sequence: Sequence) -> Parts:
        """Of its tenant and its answer; what it would take itself is not included while it waits."""
        flow = sequence.request.flow
        return Parts(self._part(flow.tenant), self._part(flow))

    def yields(self, other: Sequence, claim: Sequence, num_slots: int, num_pages: int) -> bool:
        """Whether `other`, which is in the batch, yields to `claim`, which wants so much more.

        Nobody yields to a higher priority number.
        """
        if other.request.priority < claim.request.priority:
            return False
        owner, claimant = other.request.flow, claim.request.flow
        if owner == claimant:
            return False
        of_tenants = owner.tenant != claimant.tenant
        rest = self._part(owner.tenant if of_tenants else owner, -1, -len(other.pages))
        return rest >= self._part(claimant.tenant if of_tenants else claimant, num_slots, num_pages)

    def _part(self, party: _Party, more_slots: int = 0, more_pages: int = 0) -> float:
        slots, pages = self._slots[party] + more_slots, self._pages[party] + more_pages
        return max(slots / self._num_slots, pages / self._num_pages)

    def _count(self, sequence: Sequence, sign: int) -> None:
        flow = sequence.request.flow
        for party in (flow.tenant, flow):
            self._slots[party] += sign
            self._pages[party] += sign * len(sequence.pages)
