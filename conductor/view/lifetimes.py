"""How long requests are decoded: which share of those that are as old will still be there later.

The paper takes one time t_d for all (section 7.4). Where answers differ in length that takes long ones off
while they are still decoded, and lets in what does not fit beside them. So the latest decodes tell: of those
that lasted as long, so many lasted so much longer. If all are equal it is the paper's rule.

Time is counted in steps of decoding: a batch that grows makes each step longer, and not an answer.

Owns: the latest lives, in buckets of a timeline. Does not know: who is decoded, the clock.
"""

from collections import deque

import numpy as np

from conductor.view.estimators import Floats

BUCKET_STEPS = 2.0
_NUM_RECENT = 256
_MOST_LOOKS = 64
"""ahead, of which the shares are kept"""


class Lifetimes:
    """Of the latest decodes."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_NUM_RECENT)
        self._lasted: Floats | None = None
        """how many of them lasted as long, by age; None: it is to be counted anew"""
        self._shares: dict[int, Floats] = {}
        """since the last one was learned"""

    def learn(self, num_steps: float) -> None:
        """One has ended."""
        self._latest.append(int(num_steps / BUCKET_STEPS))
        self._lasted = None
        self._shares.clear()

    def shares_left(self, num_steps: float) -> Floats:
        """By age in buckets: the share that is still there so much later. The last entry is of all that are
        older: than any that has ended, of which so long again is expected on average as the mean."""
        num_later = int(num_steps / BUCKET_STEPS)
        shares = self._shares.get(num_later)
        if shares is None:
            if len(self._shares) >= _MOST_LOOKS:
                self._shares.clear()
            shares = self._shares[num_later] = self._left(num_later)
        return shares

    def all_last(self, num_steps: float) -> bool:
        """Whether none of them was shorter."""
        if not self._latest:
            return True
        lasted, num_buckets = self._count(), int(num_steps / BUCKET_STEPS)
        return num_buckets < len(lasted) and lasted.item(num_buckets) == len(self._latest)

    def shares_as_old(self, num_steps: Floats) -> Floats:
        """Of all that begin, those that are decoded for so long. There must have been one."""
        lasted, ages = np.append(self._count(), 0.0), (num_steps / BUCKET_STEPS).astype(np.intp)
        shares: Floats = lasted[np.minimum(ages, len(lasted) - 1)] / len(self._latest)
        return shares

    def _count(self) -> Floats:
        if self._lasted is None:
            self._lasted = np.bincount(self._latest)[::-1].cumsum()[::-1].astype(np.float64)
        return self._lasted

    def _left(self, num_later: int) -> Floats:
        if not self._latest:
            return np.ones(1)
        lasted = self._count()
        num_ages = max(0, len(lasted) - num_later)
        shares = np.zeros(len(lasted) + 1)
        np.divide(lasted[num_later:], lasted[:num_ages], out=shares[:num_ages])
        mean = sum(self._latest) / len(self._latest)
        shares[-1] = max(0.0, 1.0 - num_later / mean) if mean else 0.0
        return shares
