"""What decode instances will have to do later: the system-level prediction of Mooncake, section 7.4.

"First, for a given moment t, requests that can be completed by the prefill instances at t are added to the
uniform decoding instances. Next, requests that will be completed (i.e., their execution time exceeds t_d)
before t are removed from the decoding instances."

Owns: when prefills will end and decodes have begun, t_d. Does not know: instances, SLOs, the clock.
"""

import math
from typing import NamedTuple

import numpy as np

BUCKET_S = 0.1
_WEIGHT = 0.05
"""of the latest decode in t_d, once there were enough"""


class Work(NamedTuple):
    """Requests, and the tokens of their prompts."""

    num_requests: float
    num_tokens: float


class Timeline:
    """Work by the time that belongs to it, to a tenth of a second: sums over a span cost next to nothing."""

    def __init__(self) -> None:
        self._first = 0  # bucket of index 0
        self._work = np.zeros((2, 64))

    def add(self, time_s: float, num_tokens: int) -> int:
        """One request. What to call `remove` with."""
        bucket = math.floor(time_s / BUCKET_S)
        if not self._work.any():
            self._first = bucket
        bucket = max(bucket, self._first)
        if bucket - self._first >= self._work.shape[1]:
            self._make_room(bucket)
        self._work[:, bucket - self._first] += 1, num_tokens
        return bucket

    def remove(self, bucket: int, num_tokens: int) -> None:
        """Undoes `add`."""
        self._work[:, bucket - self._first] -= 1, num_tokens

    def between(self, from_s: float, to_s: float) -> Work:
        """All of `[from_s, to_s]`, up to a bucket's length."""
        start, end = self._index(from_s), self._index(to_s) + 1
        num_requests, num_tokens = self._work[:, max(0, start) : max(0, end)].sum(axis=1)
        return Work(num_requests, num_tokens)

    def _index(self, time_s: float) -> int:
        """Of its bucket, within or next to what is kept."""
        index = time_s / BUCKET_S - self._first
        return math.floor(min(max(index, -1.0), self._work.shape[1]))

    def _make_room(self, bucket: int) -> None:
        """Drop what is empty at the front; then as long as needed, and half of it empty."""
        num_empty = int((self._work[0] > 0).argmax())
        kept = self._work[:, num_empty:]
        self._first += num_empty
        size = max(64, 2 * (bucket - self._first + 1))
        self._work = np.zeros((2, size))
        self._work[:, : kept.shape[1]] = kept


class DecodeForecast:
    """`decode_s` is t_d, how long a request is decoded: a mean of the latest; infinite before the first."""

    def __init__(self) -> None:
        self.decode_s = math.inf
        self._num_decoded = 0
        self._prefills, self._decodes = Timeline(), Timeline()

    def add_prefill(self, due_s: float, num_tokens: int) -> int:
        """A prefill is predicted to end at `due_s`. What to call `remove_prefill` with."""
        return self._prefills.add(due_s, num_tokens)

    def remove_prefill(self, bucket: int, num_tokens: int) -> None:
        """It has ended, somehow."""
        self._prefills.remove(bucket, num_tokens)

    def add_decode(self, now_s: float, num_tokens: int) -> int:
        """A request is decoded from now on. What to call `remove_decode` with."""
        return self._decodes.add(now_s, num_tokens)

    def remove_decode(self, bucket: int, num_tokens: int) -> None:
        """It has ended, somehow."""
        self._decodes.remove(bucket, num_tokens)

    def learn(self, decode_s: float) -> None:
        """One has been decoded in so many seconds."""
        self._num_decoded += 1
        if self._num_decoded == 1:
            self.decode_s = decode_s
        self.decode_s += max(_WEIGHT, 1 / self._num_decoded) * (decode_s - self.decode_s)

    def at(self, time_s: float) -> Work:
        """On all decode instances together."""
        joined = self._prefills.between(-math.inf, time_s)
        remaining = self._decodes.between(time_s - self.decode_s, math.inf)
        return Work(joined.num_requests + remaining.num_requests, joined.num_tokens + remaining.num_tokens)
