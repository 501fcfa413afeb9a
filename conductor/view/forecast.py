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

import numpy as np

from conductor.view.lifetimes import BUCKET_STEPS, Lifetimes
from conductor.view.timeline import Timeline, Work
from mooncake.config.policies import Overload
from mooncake.messages.blocks import BlockKey
from mooncake.messages.requests import Request

BUCKET_S = 0.1
_WEIGHT = 0.05
"""of the latest decode in t_d, once there were enough"""
_NUM_RECENT = 64
_NUM_KINDS = 10_000
_FEWEST_OF_KIND = 8
"""before that all requests tell more than those of a kind"""
_QUANTILE = 0.7


class Stay(NamedTuple):
    """Where one request was entered, for it to be taken out again. `began_steps`: since when it is decoded,
    in steps; None before."""

    num_tokens: int
    entries: tuple[tuple[Timeline, int], ...]
    began_steps: float | None = None

    def end(self) -> None:
        """It is not expected any more."""
        for timeline, bucket in self.entries:
            timeline.remove(bucket, self.num_tokens)


class Steps:
    """Those of decode instances since the beginning, on average. A request has a token from each."""

    def __init__(self) -> None:
        self.step_s = 1.0
        self._num_steps = self._at_s = 0.0

    def take(self, step_s: float, now_s: float) -> None:
        """From now on."""
        self._num_steps, self._at_s, self.step_s = self.at(now_s), now_s, step_s

    def at(self, now_s: float) -> float:
        """Not before the last change."""
        return self._num_steps + (now_s - self._at_s) / self.step_s


class Forecast(Protocol):
    """`decode_s`: how long a request is decoded, on average; infinite before the first. `steps`: to be told
    what they take."""

    steps: Steps

    @property
    def decode_s(self) -> float:
        """See above."""

    @property
    def everything(self) -> Work:
        """That is expected or decoded now: at no time is there more of it."""

    @property
    def last_prefill_s(self) -> float:
        """When the last of those ends that are expected; minus infinity without one."""

    def expect(self, request: Request, prefilled_s: float, tbt_s: float) -> Stay:
        """Its prefill will end at `prefilled_s`, its tokens will be `tbt_s` apart."""

    def begin(self, request: Request, now_s: float) -> Stay:
        """It is decoded from now on."""

    def learn(
        self, request: Request, stay: Stay, decode_s: float, num_output_tokens: int, now_s: float
    ) -> None:
        """It has been decoded, in so many seconds. `stay`: as it has begun."""

    def at(self, time_s: float, now_s: float, step_s: float) -> Work:
        """On all decode instances together, at a time that is not before now, if steps take so long."""


class DecodeTime:
    """The mean of the latest, t_d."""

    def __init__(self) -> None:
        self.mean_s = math.inf
        self._num_decoded = 0

    def learn(self, decode_s: float) -> None:
        """A request has been decoded for so long."""
        self._num_decoded += 1
        if self._num_decoded == 1:
            self.mean_s = decode_s
        self.mean_s += max(_WEIGHT, 1 / self._num_decoded) * (decode_s - self.mean_s)


class SystemForecast:
    """Requests are decoded for as many steps as the latest were."""

    def __init__(self) -> None:
        self.steps = Steps()
        self._decode_time = DecodeTime()
        self._lifetimes = Lifetimes()
        self._prefills, self._decodes = Timeline(BUCKET_S), Timeline(BUCKET_STEPS)

    @property
    def decode_s(self) -> float:
        """As in `Forecast`."""
        return self._decode_time.mean_s

    @property
    def everything(self) -> Work:
        """As in `Forecast`."""
        return self._prefills.total.plus(self._decodes.total)

    @property
    def last_prefill_s(self) -> float:
        """As in `Forecast`."""
        return self._prefills.latest

    def expect(self, request: Request, prefilled_s: float, tbt_s: float) -> Stay:
        """As in `Forecast`."""
        return _entered(request, (self._prefills, prefilled_s))

    def begin(self, request: Request, now_s: float) -> Stay:
        """As in `Forecast`."""
        num_steps = self.steps.at(now_s)
        return _entered(request, (self._decodes, num_steps))._replace(began_steps=num_steps)

    def learn(
        self, request: Request, stay: Stay, decode_s: float, num_output_tokens: int, now_s: float
    ) -> None:
        """As in `Forecast`."""
        assert stay.began_steps is not None
        self._lifetimes.learn(self.steps.at(now_s) - stay.began_steps)
        self._decode_time.learn(decode_s)

    def at(self, time_s: float, now_s: float, step_s: float) -> Work:
        """As in `Forecast`."""
        num_steps = (time_s - now_s) / step_s
        shares_left = self._lifetimes.shares_left(num_steps)
        return self._joined(time_s, now_s, step_s).plus(
            self._decodes.weighted(shares_left, self.steps.at(now_s))
        )

    def _joined(self, time_s: float, now_s: float, step_s: float) -> Work:
        """Of the prefills that will have ended by then, those that are still decoded."""
        if self._lifetimes.all_last((time_s - now_s) / step_s):
            return self._prefills.until(time_s)
        ages_s = np.arange(0.0, time_s - now_s + BUCKET_S, BUCKET_S)  # what is late is not older
        return self._prefills.weighted(self._lifetimes.shares_as_old(ages_s / step_s), time_s)


class RequestForecast:
    """Every request is decoded until it has the tokens that it is expected to have.

    Who has more of them stays until it has ended: it is one of those that are longer than most.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self._decode_time, self._lengths = DecodeTime(), OutputLengths()
        self._joins, self._leaves = Timeline(BUCKET_S), Timeline(BUCKET_S)
        self._ends = Timeline(BUCKET_STEPS)

    @property
    def decode_s(self) -> float:
        """As in `Forecast`."""
        return self._decode_time.mean_s

    @property
    def everything(self) -> Work:
        """As in `Forecast`."""
        return self._joins.total.plus(self._ends.total)

    @property
    def last_prefill_s(self) -> float:
        """As in `Forecast`."""
        return self._joins.latest

    def expect(self, request: Request, prefilled_s: float, tbt_s: float) -> Stay:
        """As in `Forecast`."""
        decode_s = self._lengths.expected(request) * tbt_s
        return _entered(request, (self._joins, prefilled_s), (self._leaves, prefilled_s + decode_s))

    def begin(self, request: Request, now_s: float) -> Stay:
        """As in `Forecast`."""
        num_steps = self.steps.at(now_s)
        end = num_steps + self._lengths.expected(request)
        return _entered(request, (self._ends, end))._replace(began_steps=num_steps)

    def learn(
        self, request: Request, stay: Stay, decode_s: float, num_output_tokens: int, now_s: float
    ) -> None:
        """As in `Forecast`."""
        self._decode_time.learn(decode_s)
        self._lengths.learn(request, num_output_tokens)

    def at(self, time_s: float, now_s: float, step_s: float) -> Work:
        """As in `Forecast`."""
        num_steps = self.steps.at(now_s)
        joined = self._joins.until(time_s).less(_between(self._leaves, now_s, time_s))
        ended = _between(self._ends, num_steps, num_steps + (time_s - now_s) / step_s)
        return joined.plus(self._ends.until(math.inf)).less(ended)


def forecast_of(policy: Overload) -> Forecast:
    """The forecast that a policy uses."""
    return RequestForecast() if policy is Overload.REQUEST_PREDICTION else SystemForecast()


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


def _between(timeline: Timeline, now: float, then: float) -> Work:
    return timeline.until(then).less(timeline.until(now))


def _entered(request: Request, *times: tuple[Timeline, float]) -> Stay:
    num_tokens = len(request.token_ids)
    return Stay(num_tokens, tuple((timeline, timeline.add(time_s, num_tokens)) for timeline, time_s in times))
