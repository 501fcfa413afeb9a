"""What decode instances will have to do later (Mooncake, section 7.4), at either of the paper's two levels.

System level: "First, for a given moment t, requests that can be completed by the prefill instances at t are
added to the uniform decoding instances. Next, requests that will be completed (i.e., their execution time
exceeds t_d) before t are removed from the decoding instances."

Request level: every request is there from the end of its prefill until it has as many tokens as most of its
kind had.

Owns: when requests are expected to come and to go. Does not know: instances, SLOs, the clock.
"""

import math
from collections import OrderedDict, deque
from typing import NamedTuple, Protocol

from conductor.lifetimes import Lifetimes
from conductor.timeline import Timeline, Work
from mooncake.blocks import BlockKey
from mooncake.requests import Request

_WEIGHT = 0.05
"""of the latest decode in t_d, once there were enough"""
_NUM_RECENT = 64
_NUM_KINDS = 10_000
_FEWEST_OF_KIND = 8
"""before that all requests tell more than those of a kind"""
_QUANTILE = 0.7


class Stay(NamedTuple):
    """Where one request was entered, for it to be taken out again."""

    num_tokens: int
    entries: tuple[tuple[Timeline, int], ...]

    def end(self) -> None:
        """It is not expected any more."""
        for timeline, bucket in self.entries:
            timeline.remove(bucket, self.num_tokens)


class Forecast(Protocol):
    """`decode_s`: how long a request is decoded, on average; infinite before the first."""

    decode_s: float

    def expect(self, request: Request, prefilled_s: float, tbt_s: float) -> Stay:
        """Its prefill will end at `prefilled_s`, its tokens will be `tbt_s` apart."""

    def begin(self, request: Request, now_s: float, tbt_s: float) -> Stay:
        """It is decoded from now on."""

    def learn(self, request: Request, decode_s: float, num_output_tokens: int) -> None:
        """It has been decoded, in so many seconds."""

    def at(self, time_s: float, now_s: float) -> Work:
        """On all decode instances together, at a time that is not before now."""


class SystemForecast:
    """Requests are decoded for as long as the latest were."""

    def __init__(self) -> None:
        self.decode_s = math.inf
        self._num_decoded = 0
        self._lifetimes = Lifetimes()
        self._prefills, self._decodes = Timeline(), Timeline()

    def expect(self, request: Request, prefilled_s: float, tbt_s: float) -> Stay:
        """As in `Forecast`."""
        return _entered(request, (self._prefills, prefilled_s))

    def begin(self, request: Request, now_s: float, tbt_s: float) -> Stay:
        """As in `Forecast`."""
        return _entered(request, (self._decodes, now_s))

    def learn(self, request: Request, decode_s: float, num_output_tokens: int) -> None:
        """As in `Forecast`."""
        self._lifetimes.learn(decode_s)
        self._num_decoded += 1
        if self._num_decoded == 1:
            self.decode_s = decode_s
        self.decode_s += max(_WEIGHT, 1 / self._num_decoded) * (decode_s - self.decode_s)

    def at(self, time_s: float, now_s: float) -> Work:
        """As in `Forecast`."""
        joined = self._prefills.until(time_s)
        return joined.plus(self._decodes.weighted(self._lifetimes.shares_left(time_s - now_s), now_s))


class RequestForecast(SystemForecast):
    """Every request is decoded until it has the tokens that it is expected to have."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths = OutputLengths()
        self._joins, self._leaves = Timeline(), Timeline()

    def expect(self, request: Request, prefilled_s: float, tbt_s: float) -> Stay:
        """As in `Forecast`."""
        decode_s = self._lengths.expected(request) * tbt_s
        return _entered(request, (self._joins, prefilled_s), (self._leaves, prefilled_s + decode_s))

    def begin(self, request: Request, now_s: float, tbt_s: float) -> Stay:
        """As in `Forecast`."""
        return self.expect(request, now_s, tbt_s)

    def learn(self, request: Request, decode_s: float, num_output_tokens: int) -> None:
        """As in `Forecast`."""
        super().learn(request, decode_s, num_output_tokens)
        self._lengths.learn(request, num_output_tokens)

    def at(self, time_s: float, now_s: float) -> Work:
        """As in `Forecast`."""
        return self._joins.until(time_s).less(self._leaves.until(time_s))


class OutputLengths:
    """Tokens of the latest answers, by kind: what begins with the same block (a tenant, a system prompt)."""

    def __init__(self) -> None:
        self._all: deque[int] = deque(maxlen=_NUM_RECENT)
        self._by_kind: OrderedDict[BlockKey, deque[int]] = OrderedDict()

    def expected(self, request: Request) -> int:
        """Which 70% of the latest of its kind did not exceed; no more than it may have."""
        lengths = self._by_kind.get(request.block_keys[0]) if request.block_keys else None
        if lengths is None or len(lengths) < _FEWEST_OF_KIND:
            lengths = self._all
        most = request.sampling.max_tokens
        if not lengths:
            return most
        return min(most, sorted(lengths)[int(_QUANTILE * (len(lengths) - 1))])

    def learn(self, request: Request, num_output_tokens: int) -> None:
        """An answer has ended."""
        self._all.append(num_output_tokens)
        if request.block_keys:
            kind = request.block_keys[0]
            self._by_kind.setdefault(kind, deque(maxlen=_NUM_RECENT)).append(num_output_tokens)
            self._by_kind.move_to_end(kind)
            if len(self._by_kind) > _NUM_KINDS:
                self._by_kind.popitem(last=False)


def _entered(request: Request, *times: tuple[Timeline, float]) -> Stay:
    num_tokens = len(request.token_ids)
    return Stay(num_tokens, tuple((timeline, timeline.add(time_s, num_tokens)) for timeline, time_s in times))
