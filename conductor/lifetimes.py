"""How long requests are decoded: which share of those that are as old will still be there later.

The paper takes one time t_d for all (section 7.4). Where answers differ in length that takes long ones off
while they are still decoded, and lets in what does not fit beside them. So the latest decodes tell: of those
that lasted as long, so many lasted so much longer. If all are equal it is the paper's rule.

Owns: the latest times, in buckets of a timeline. Does not know: who is decoded, the clock.
"""

from collections import deque

import numpy as np

from conductor.estimators import Floats
from conductor.timeline import BUCKET_S

_NUM_RECENT = 256


class Lifetimes:
    """Of the latest decodes."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_NUM_RECENT)
        self._lasted: Floats | None = None
        """how many of them lasted as long, by age; None: it is to be counted anew"""
        self._shares: dict[int, Floats] = {}
        """since the last one was learned"""

    def learn(self, seconds: float) -> None:
        """One has ended."""
        self._latest.append(int(seconds / BUCKET_S))
        self._lasted = None
        self._shares.clear()

    def shares_left(self, later_s: float) -> Floats:
        """By age in buckets: the share that is still there so much later. The last entry is of all that are
        older: than any that has ended, of which so long again is expected on average as the mean."""
        num_later = int(later_s / BUCKET_S)
        shares = self._shares.get(num_later)
        if shares is None:
            shares = self._shares[num_later] = self._left(num_later)
        return shares

    def _left(self, num_later: int) -> Floats:
        if not self._latest:
            return np.ones(1)
        if self._lasted is None:
            self._lasted = np.bincount(self._latest)[::-1].cumsum()[::-1].astype(np.float64)
        lasted = self._lasted
        num_ages = max(0, len(lasted) - num_later)
        shares = np.zeros(len(lasted) + 1)
        np.divide(lasted[num_later:], lasted[:num_ages], out=shares[:num_ages])
        mean = sum(self._latest) / len(self._latest)
        shares[-1] = max(0.0, 1.0 - num_later / mean) if mean else 0.0
        return shares
