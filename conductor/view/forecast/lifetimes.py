"""The lengths of decodes, and the share of requests of a given age that will still be decoded later.

The paper takes one time t_d for all requests (section 7.4). Where outputs differ in length, a forecast by t_d
removes long outputs while they are still decoded, and admits requests that do not fit beside them. Here a
request of age `a` counts in part at a time `t` from now. Its part is the share of decodes that lasted `a + t`
or longer, among the latest decodes that lasted `a` or longer. If all decodes are equally long, this is the
paper's rule.

Time is counted in iterations, because a growing batch makes iterations longer, but not outputs.

Owns: the lengths of the latest decodes, in buckets of a timeline. Does not know: requests, the clock.
"""

from collections import deque

import numpy as np

from conductor.view.estimators import Floats

BUCKET_ITERATIONS = 2.0
"""Iterations of a bucket, the resolution of lengths."""
_NUM_RECENT = 256
"""The number of latest decodes that are remembered."""
_MOST_LOOKS = 64
"""The largest number of spans ahead for which shares are cached."""


class Lifetimes:
    """The lengths in iterations of the latest decodes."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_NUM_RECENT)
        self._lasted: Floats | None = None
        """The number of decodes that lasted at least n buckets, by n; None if they must be counted again."""
        self._shares: dict[int, Floats] = {}
        """The cached results of `shares_left` by buckets ahead. The next learned decode clears them."""

    def learn(self, num_iterations: float) -> None:
        """Record the length of a decode that has ended, in iterations."""
        self._latest.append(int(num_iterations / BUCKET_ITERATIONS))
        self._lasted = None
        self._shares.clear()

    def shares_left(self, num_iterations: float) -> Floats:
        """Return the share of decodes that last for at least `num_iterations` more, by age in buckets.

        The last entry is for ages that no decode has reached. A decode of such an age is assumed to end at a
        random moment within one mean length from now.
        """
        num_later = int(num_iterations / BUCKET_ITERATIONS)
        shares = self._shares.get(num_later)
        if shares is None:
            if len(self._shares) >= _MOST_LOOKS:
                self._shares.clear()
            shares = self._shares[num_later] = self._left(num_later)
        return shares

    def all_last(self, num_iterations: float) -> bool:
        """Return whether no decode was shorter than `num_iterations`."""
        if not self._latest:
            return True
        lasted, num_buckets = self._count(), int(num_iterations / BUCKET_ITERATIONS)
        return num_buckets < len(lasted) and lasted.item(num_buckets) == len(self._latest)

    def shares_as_old(self, num_iterations: Floats) -> Floats:
        """Return for each entry of `num_iterations` the share of decodes that lasted for at least so many.

        At least one decode must have ended.
        """
        lasted, ages = np.append(self._count(), 0.0), (num_iterations / BUCKET_ITERATIONS).astype(np.intp)
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
