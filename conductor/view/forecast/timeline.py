"""Sums of work by time. The unit of time is the caller's.

Owns: the sums. Does not know: what happens at these times, the clock.
"""

import math
from typing import NamedTuple

import numpy as np

from conductor.view.estimators import Floats

_FEWEST_BUCKETS = 64


class PromptTotals(NamedTuple):
    """A number of requests, and the number of tokens in their prompts."""

    num_requests: float
    num_tokens: float

    def plus(self, other: "PromptTotals") -> "PromptTotals":
        """Return the sum of two totals, field by field."""
        return PromptTotals(self.num_requests + other.num_requests, self.num_tokens + other.num_tokens)

    def less(self, other: "PromptTotals") -> "PromptTotals":
        """Return these totals minus `other`, field by field."""
        return PromptTotals(self.num_requests - other.num_requests, self.num_tokens - other.num_tokens)


class Timeline:
    """Requests by time, in buckets, so that sums over a span are cheap. `bucket` is the width of a bucket."""

    def __init__(self, bucket: float) -> None:
        self._bucket = bucket
        self._first = 0  # bucket of index 0
        self.total = PromptTotals(0, 0)
        """The sum of all work in the timeline."""
        self._keep(np.zeros((2, _FEWEST_BUCKETS)))

    def _keep(self, work: Floats) -> None:
        self._work = work
        self._requests, self._tokens = work[0].data, work[1].data  # the quickest way to change one number
        self._ones = np.ones(work.shape[1])  # the quickest way to a sum

    def add(self, time: float, num_tokens: int) -> int:
        """Add a request with `num_tokens`, and return its bucket for `remove`."""
        bucket = math.floor(time / self._bucket)
        if not self.total.num_requests:
            self._first = bucket
        bucket = max(bucket, self._first)
        if bucket - self._first >= self._work.shape[1]:
            self._make_room(bucket)
        self._change(bucket, 1, num_tokens)
        self.total = PromptTotals(self.total.num_requests + 1, self.total.num_tokens + num_tokens)
        return bucket

    def remove(self, bucket: int, num_tokens: int) -> None:
        """Remove a request from the bucket that `add` returned."""
        self._change(bucket, -1, -num_tokens)
        self.total = PromptTotals(self.total.num_requests - 1, self.total.num_tokens - num_tokens)

    def _change(self, bucket: int, num_requests: int, num_tokens: int) -> None:
        index = bucket - self._first
        self._requests[index] += num_requests
        self._tokens[index] += num_tokens

    @property
    def latest(self) -> float:
        """The middle of the latest request's bucket; minus infinity if there is no request."""
        if not self.total.num_requests:
            return -math.inf
        (used,) = self._work[0].nonzero()
        return (self._first + int(used[-1]) + 0.5) * self._bucket

    def until(self, time: float) -> PromptTotals:
        """Return the work up to a time, rounded to the end of its bucket."""
        end = self._index(time) + 1
        if end >= self._work.shape[1]:
            return self.total
        return PromptTotals(*self._work[:, :end].dot(self._ones[:end]).tolist())

    def weighted(self, by_age: Floats, now: float) -> PromptTotals:
        """Return the work until `now`, weighted by its age in buckets.

        The last weight is for all older work too.
        """
        newest = math.floor(now / self._bucket) - self._first
        end = max(0, min(newest + 1, self._work.shape[1]))
        start = max(0, min(newest - len(by_age) + 2, end))
        weights = by_age[newest - end + 1 : newest - start + 1][::-1]
        sums = self._work[:, start:end].dot(weights)
        if start:
            sums += by_age.item(-1) * self._work[:, :start].dot(self._ones[:start])
        return PromptTotals(*sums.tolist())

    def _index(self, time: float) -> int:
        """Return the index of a time's bucket, within the kept buckets or next to them."""
        index = time / self._bucket - self._first
        return math.floor(min(max(index, -1.0), len(self._ones)))

    def _make_room(self, bucket: int) -> None:
        """Drop empty buckets at the front, and grow the array until half of the buckets are empty."""
        num_empty = int((self._work[0] > 0).argmax())
        kept = self._work[:, num_empty:]
        self._first += num_empty
        work = np.zeros((2, max(_FEWEST_BUCKETS, 2 * (bucket - self._first + 1))))
        work[:, : kept.shape[1]] = kept
        self._keep(work)
