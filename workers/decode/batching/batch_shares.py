"""Fair shares of a decode batch: the rule which sequence is preempted for another one.

Tenants have equal shares, and so have the answers within a tenant, however many choices each has. A share is
the fraction of the slots or of the pages, whichever is larger (dominant resource fairness, Ghodsi et al.,
NSDI 2011). A waiting sequence of tenant A preempts a sequence of tenant B only if B's share is afterwards not
smaller than A's: a step towards max-min fairness, as at the Conductor (`conductor.requests.preemption`). So
any tenant may use an idle slot, and sequences are not swapped back and forth.

Owns: the rule of preemption. Does not know: when a sequence is admitted, pages, time.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from mooncake.messages.requests import Flow
from workers.decode.sequence import Sequence

_Party = str | Flow
"""A tenant, or one answer of a tenant."""


class BatchFractions(NamedTuple):
    """The fractions of a batch that a tenant and one of its answers have, from 0 to 1."""

    tenant: float
    answer: float


class BatchShares:
    """The shares of tenants and answers in a batch of at most `num_slots` sequences and `num_pages` pages."""

    def __init__(self, sequences: Iterable[Sequence], num_slots: int, num_pages: int) -> None:
        self._num_slots, self._num_pages = num_slots, num_pages
        self._slots: Counter[_Party] = Counter()
        self._pages: Counter[_Party] = Counter()
        for sequence in sequences:
            self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Stop counting a sequence."""
        self._count(sequence, -1)

    def fractions(self, sequence: Sequence) -> BatchFractions:
        """Return the fractions of the tenant and of the answer of a sequence.

        The sequence itself counts only if it is in the batch.
        """
        flow = sequence.request.flow
        return BatchFractions(self._fraction(flow.tenant), self._fraction(flow))

    def yields(self, other: Sequence, claim: Sequence, num_slots: int, num_pages: int) -> bool:
        """Return whether `other`, which is in the batch, yields to `claim`.

        `claim` needs `num_slots` more slots and `num_pages` more pages. No sequence yields to a sequence of
        the same answer, or to one with a higher priority number.
        """
        if other.request.priority < claim.request.priority:
            return False
        owner, claimant = other.request.flow, claim.request.flow
        if owner == claimant:
            return False
        of_tenants = owner.tenant != claimant.tenant
        rest = self._fraction(owner.tenant if of_tenants else owner, -1, -len(other.pages))
        return rest >= self._fraction(claimant.tenant if of_tenants else claimant, num_slots, num_pages)

    def _fraction(self, party: _Party, more_slots: int = 0, more_pages: int = 0) -> float:
        slots, pages = self._slots[party] + more_slots, self._pages[party] + more_pages
        return max(slots / self._num_slots, pages / self._num_pages)

    def _count(self, sequence: Sequence, sign: int) -> None:
        flow = sequence.request.flow
        for party in (flow.tenant, flow):
            self._slots[party] += sign
            self._pages[party] += sign * len(sequence.pages)
