"""The decisions of the rebalancer: a change of a role, its reason and benefit, and later its outcome.

Owns: these values, and the share of arrivals that was accepted in a span of time. Does not know: how
decisions are made, who shows them.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from conductor.elasticity.capacity import Division, Work
from mooncake.messages.workers import Role


class Change(NamedTuple):
    """A change of one instance's role, and the gain that is predicted for the cluster."""

    instance: str
    before: Role
    after: Role
    work: Work
    """The prefill and decode work for which the change was decided, in instances."""
    division: Division
    """The division before the change."""
    served_before: float
    """The share of the expected requests that is served within SLOs without the change."""
    served_after: float
    benefit_s: float
    """Seconds of the whole cluster's time that the change gains while the load is expected to last."""
    cost_s: float
    """Seconds of the whole cluster's time that the change costs."""

    @property
    def why(self) -> str:
        """The reason for the change as text, with its numbers."""
        return (
            f"the load takes {self.work.prefill:.2f} instances for prefill and {self.work.decode:.2f} for"
            f" decode, there are {self.division.num_prefill} and {self.division.num_decode};"
            f" {self.served_before:.0%} of the requests that are expected, brief loads among them, can be"
            f" served, {self.served_after:.0%} afterwards"
        )


class Outcome(NamedTuple):
    """The measured result of a change of a role."""

    took_s: float
    """Seconds until the instance took requests in its new role, or until the change failed."""
    accepted_after: float = 0.0
    """The share of arrivals that were not rejected in the seconds after the change."""
    note: str = ""
    """The reason why the change was not made; empty for a change that was made."""


@dataclass(slots=True)
class Decision:
    """A decided change of a role, and later its outcome."""

    at_s: float
    change: Change
    accepted_before: float
    """The share of arrivals that were not rejected in the seconds before the decision."""
    done_s: float | None = None
    """The time at which the instance took requests in its new role; None before."""
    outcome: Outcome | None = None
    """The outcome; None until it is known."""

    @property
    def has_failed(self) -> bool:
        """Whether the change has ended without being made."""
        return self.done_s is None and self.outcome is not None


class _Sample(NamedTuple):
    at_s: float
    num_arrived: int
    num_rejected: int


@dataclass(slots=True)
class Acceptance:
    """Counts of arrived and of rejected requests in the latest `kept_s` seconds."""

    kept_s: float
    _samples: deque[_Sample] = field(default_factory=deque)

    def note(self, num_arrived: int, num_rejected: int, now_s: float) -> None:
        """Record the total numbers of arrived and of rejected requests at `now_s`."""
        self._samples.append(_Sample(now_s, num_arrived, num_rejected))
        while self._samples[0].at_s < now_s - self.kept_s:
            self._samples.popleft()

    def share(self, from_s: float, until_s: float) -> float:
        """Return the share of arrivals between two times that were not rejected; 1 without arrivals."""
        inside = [sample for sample in self._samples if from_s <= sample.at_s <= until_s]
        if len(inside) < 2 or inside[-1].num_arrived == inside[0].num_arrived:
            return 1.0
        num_rejected = inside[-1].num_rejected - inside[0].num_rejected
        return 1 - num_rejected / (inside[-1].num_arrived - inside[0].num_arrived)
