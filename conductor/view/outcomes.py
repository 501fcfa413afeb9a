"""What came of decisions: counts, and how far predictions were off.

Owns: totals since the Conductor began. Does not know: who reads them.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from conductor.view.placement import Placement, Reason, Reuse

ERROR_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Errors:
    """Absolute differences between what was predicted and what happened, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(ERROR_BOUNDS_S) + 1))
    """by upper bound; the last one has none"""
    sum_s: float = 0.0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    """sums"""

    def add(self, predicted_s: float, actual_s: float) -> None:
        """One prediction."""
        error_s = abs(predicted_s - actual_s)
        self.counts[bisect_left(ERROR_BOUNDS_S, error_s)] += 1
        self.sum_s += error_s
        self.predicted_s += predicted_s
        self.actual_s += actual_s


class Outcomes:
    """Totals."""

    def __init__(self) -> None:
        self.ttft, self.tbt = Errors(), Errors()
        self.num_placements: Counter[Reuse] = Counter()
        self.num_rejections: Counter[Reason] = Counter()
        self.num_displaced = 0
        """requests that were placed, or waited, and gave way to others before they had begun"""
        self.num_fetches = 0
        """fetches ordered from one instance to another"""
        self.num_fetched_blocks = 0

    def placed(self, placement: Placement) -> None:
        """A request has a pair."""
        self.num_placements[placement.reuse] += 1

    def ordered_fetch(self, num_blocks: int) -> None:
        """A prefill instance was told where to fetch so many blocks that it is believed to lack."""
        self.num_fetches += 1
        self.num_fetched_blocks += num_blocks

    def first_token(self, placement: Placement, seconds: float) -> None:
        """It came so long after the placement."""
        self.ttft.add(placement.prediction.ttft_s, seconds)

    def decoded(self, placement: Placement, tbt_s: float) -> None:
        """Its tokens were so far apart on average."""
        self.tbt.add(placement.prediction.tbt_s, tbt_s)

    def rejected(self, reason: Reason) -> None:
        """A request was told to come back later, or that it will never fit."""
        self.num_rejections[reason] += 1
