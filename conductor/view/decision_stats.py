"""Counts of decisions, and the errors of their predictions.

Owns: totals since the Conductor began. Does not know: who reads them.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from conductor.view.placement import Placement, Reuse
from conductor.view.rejection import Reason

ERROR_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Errors:
    """The histogram of absolute differences between predicted and actual times, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(ERROR_BOUNDS_S) + 1))
    """The number of errors in each bucket, by `ERROR_BOUNDS_S`; the last bucket has no bound."""
    sum_s: float = 0.0
    predicted_s: float = 0.0
    """The sum of predicted seconds."""
    actual_s: float = 0.0
    """The sum of actual seconds."""

    def add(self, predicted_s: float, actual_s: float) -> None:
        """Record one prediction and its actual time, in seconds."""
        error_s = abs(predicted_s - actual_s)
        self.counts[bisect_left(ERROR_BOUNDS_S, error_s)] += 1
        self.sum_s += error_s
        self.predicted_s += predicted_s
        self.actual_s += actual_s


class MigrationReason(StrEnum):
    """The reason for which a request migrates."""

    RELIEVE = "relieve"
    """The source would miss a TBT SLO."""
    DEFRAGMENT = "defragment"
    """The source makes room for a long prompt."""
    PRIORITY = "priority"
    """The source makes room for a stricter class."""
    DRAIN = "drain"
    SWITCH = "switch"
    """The source changes its role."""
    BY_HAND = "by_hand"
    """An operator has ordered the migration."""


class MigrationOutcome(StrEnum):
    """The way in which a migration ended. Only MOVED means that the request has moved."""

    MOVED = "moved"
    ENDED = "ended"
    """The request ended before it could move."""
    SOURCE_FAILED = "source_failed"
    """The source was lost, or the request failed there."""
    DESTINATION_LOST = "destination_lost"
    REFUSED = "refused"
    """The destination had no room or failed, or a pool had no room for the blocks."""
    CALLED_OFF = "called_off"
    """The destination drains or switches its role, or the request has become a suspect."""
    LATE = "late"


@dataclass(slots=True)
class MigrationStats:
    """Counts of ended migrations, and their sums of time, bytes and tokens."""

    num_ended: Counter[tuple[MigrationReason, MigrationOutcome]] = field(default_factory=Counter)
    seconds: float = 0.0
    """Seconds from beginning to hand-over, summed over all requests that have moved."""
    num_copied_bytes: int = 0
    """Bytes of the blocks that destinations have loaded, without blocks that their pools held before."""
    num_recomputed_tokens: int = 0
    """Tokens that destinations computed again, because no full block held their KVCache."""


class DecisionStats:
    """Totals of the Conductor's decisions since it began."""

    def __init__(self) -> None:
        self.ttft, self.tbt = Errors(), Errors()
        self.migrations = MigrationStats()
        self.num_placements: Counter[Reuse] = Counter()
        self.num_rejections: Counter[Reason] = Counter()
        self.num_preempted = 0
        """Requests that lost their pair, or their place in the admission queue, to other requests."""
        self.num_fetches = 0
        """Fetches ordered from one instance to another."""
        self.num_fetched_blocks = 0

    def placed(self, placement: Placement) -> None:
        """Record a placement."""
        self.num_placements[placement.reuse] += 1

    def ordered_fetch(self, num_blocks: int) -> None:
        """Record that a prefill instance was told to fetch `num_blocks` blocks that it seems to lack."""
        self.num_fetches += 1
        self.num_fetched_blocks += num_blocks

    def first_token(self, placement: Placement, ttft_s: float) -> None:
        """Record the seconds from a placement to the first token."""
        self.ttft.add(placement.prediction.ttft_s, ttft_s)

    def decoded(self, placement: Placement, gap_s: float) -> None:
        """Record the actual mean seconds between the tokens of a request."""
        self.tbt.add(placement.prediction.gap_s, gap_s)

    def rejected(self, reason: Reason) -> None:
        """Record that a request was rejected."""
        self.num_rejections[reason] += 1
