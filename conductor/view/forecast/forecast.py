"""The future work of decode instances, at either of the paper's two levels (Mooncake, section 7.4).

System level: "First, for a given moment t, requests that can be completed by the prefill instances at t are
added to the uniform decoding instances. Next, requests that will be completed (i.e., their execution time
exceeds t_d) before t are removed from the decoding instances."

Request level: every request is decoded from the end of its prefill until it has as many tokens as most
requests of its kind had.

Owns: when decodes are expected to begin and to end. Does not know: instances, SLOs, the clock.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np

from conductor.view.forecast.lifetimes import BUCKET_ITERATIONS, Lifetimes
from conductor.view.forecast.timeline import PromptTotals, Timeline
from mooncake.config.policies import Overload
from mooncake.messages.blocks import BlockKey
from mooncake.messages.requests import Request

BUCKET_S = 0.1
"""Seconds of a bucket, the resolution of times."""
_WEIGHT = 0.05
"""The smallest weight of the latest decode in the running mean t_d."""
_NUM_RECENT = 64
"""The number of outputs that are remembered of each kind."""
_NUM_KINDS = 10_000
"""The number of kinds of requests that are remembered."""
_FEWEST_OF_KIND = 8
"""The number of outputs of a kind that must be known; with fewer, the outputs of all kinds are used."""
_QUANTILE = 0.7
"""The quantile of the latest outputs that is the expected length."""


class Stay(NamedTuple):
    """The entries of one request in timelines, for its removal."""

    num_tokens: int
    entries: tuple[tuple[Timeline, int], ...]
    began_iteration: float | None = None
    """The iteration count when the request's decode began; None before."""

    def end(self) -> None:
        """Remove the request from the forecast."""
        for timeline, bucket in self.entries:
            timeline.remove(bucket, self.num_tokens)


class IterationCount:
    """The mean number of iterations that decode instances have done.

    A request gets one token in each iteration.
    """

    def __init__(self) -> None:
        self.iteration_s = 1.0
        self._num_iterations = self._at_s = 0.0

    def take(self, iteration_s: float, now_s: float) -> None:
        """Set the duration of iterations to `iteration_s` seconds from `now_s` on."""
        self._num_iterations, self._at_s, self.iteration_s = self.at(now_s), now_s, iteration_s

    def at(self, now_s: float) -> float:
        """Return the number of iterations until `now_s`, which must not precede the last change."""
        return self._num_iterations + (now_s - self._at_s) / self.iteration_s


class Forecast(ABC):
    """The predicted work of decode instances at any time."""

    def __init__(self) -> None:
        self.iterations = IterationCount()
        """The count of iterations, whose duration the caller sets."""
        self.decode_s = math.inf
        """The paper's t_d: the mean seconds of a decode; infinite while no decode has ended."""
        self._num_decoded = 0
        self._prefills, self._decodes = Timeline(BUCKET_S), Timeline(BUCKET_ITERATIONS)
        """The requests, counted by time.

        `_prefills` has expected requests, by the time in seconds at which their prefill ends. `_decodes` has
        requests that are being decoded, by an iteration count. At that count their decode began (system
        level) or is expected to end (request level).
        """

    @property
    def everything(self) -> PromptTotals:
        """The work of all expected and decoded requests: an upper bound of the work at any time."""
        return self._prefills.total.plus(self._decodes.total)

    @property
    def last_prefill_s(self) -> float:
        """The time at which the last expected prefill ends; minus infinity if none is expected."""
        return self._prefills.latest

    @abstractmethod
    def expect(self, request: Request, prefilled_s: float, gap_s: float) -> Stay:
        """Enter a request whose prefill will end at `prefilled_s`, and whose tokens will be `gap_s` apart."""

    @abstractmethod
    def begin(self, request: Request, now_s: float) -> Stay:
        """Enter a request that is decoded from now on."""

    def learn(
        self, request: Request, stay: Stay, decode_s: float, num_output_tokens: int, now_s: float
    ) -> None:
        """Learn the length of a decode that took `decode_s` seconds.

        `stay` is the value that `begin` returned.
        """
        self._num_decoded += 1
        if self._num_decoded == 1:
            self.decode_s = decode_s
        self.decode_s += max(_WEIGHT, 1 / self._num_decoded) * (decode_s - self.decode_s)

    @abstractmethod
    def at(self, time_s: float, now_s: float, iteration_s: float) -> PromptTotals:
        """Return the work of all decode instances at `time_s >= now_s`.

        Iterations are assumed to take `iteration_s` seconds.
        """


class SystemForecast(Forecast):
    """The system-level forecast: every request is expected to be decoded as long as the latest ones were."""

    def __init__(self) -> None:
        super().__init__()
        self._lifetimes = Lifetimes()

    def expect(self, request: Request, prefilled_s: float, gap_s: float) -> Stay:
        return _entered(request, (self._prefills, prefilled_s))

    def begin(self, request: Request, now_s: float) -> Stay:
        num_iterations = self.iterations.at(now_s)
        return _entered(request, (self._decodes, num_iterations))._replace(began_iteration=num_iterations)

    def learn(
        self, request: Request, stay: Stay, decode_s: float, num_output_tokens: int, now_s: float
    ) -> None:
        super().learn(request, stay, decode_s, num_output_tokens, now_s)
        assert stay.began_iteration is not None
        self._lifetimes.learn(self.iterations.at(now_s) - stay.began_iteration)

    def at(self, time_s: float, now_s: float, iteration_s: float) -> PromptTotals:
        shares_left = self._lifetimes.shares_left((time_s - now_s) / iteration_s)
        left = self._decodes.weighted(shares_left, self.iterations.at(now_s))
        return self._joined(time_s, now_s, iteration_s).plus(left)

    def _joined(self, time_s: float, now_s: float, iteration_s: float) -> PromptTotals:
        """Return the work of requests that will join until `time_s` and will still be decoded then."""
        if self._lifetimes.all_last((time_s - now_s) / iteration_s):
            return self._prefills.until(time_s)
        ages_s = np.arange(0.0, time_s - now_s + BUCKET_S, BUCKET_S)  # a late prefill ends after `now_s`, too
        return self._prefills.weighted(self._lifetimes.shares_as_old(ages_s / iteration_s), time_s)


class RequestForecast(Forecast):
    """The request-level forecast: each request is decoded until it has its expected number of tokens.

    A request that already has more tokens than expected stays in the forecast until it ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lengths = OutputLengths()
        self._leaves = Timeline(BUCKET_S)
        """Expected requests by the expected end of their decode."""

    def expect(self, request: Request, prefilled_s: float, gap_s: float) -> Stay:
        decode_s = self._lengths.expected(request) * gap_s
        return _entered(request, (self._prefills, prefilled_s), (self._leaves, prefilled_s + decode_s))

    def begin(self, request: Request, now_s: float) -> Stay:
        num_iterations = self.iterations.at(now_s)
        end = num_iterations + self._lengths.expected(request)
        return _entered(request, (self._decodes, end))._replace(began_iteration=num_iterations)

    def learn(
        self, request: Request, stay: Stay, decode_s: float, num_output_tokens: int, now_s: float
    ) -> None:
        super().learn(request, stay, decode_s, num_output_tokens, now_s)
        self._lengths.learn(request, num_output_tokens)

    def at(self, time_s: float, now_s: float, iteration_s: float) -> PromptTotals:
        num_iterations = self.iterations.at(now_s)
        joined = self._prefills.until(time_s).less(_between(self._leaves, now_s, time_s))
        ended = _between(self._decodes, num_iterations, num_iterations + (time_s - now_s) / iteration_s)
        return joined.plus(self._decodes.until(math.inf)).less(ended)


def forecast_of(policy: Overload) -> Forecast:
    """Return the forecast that an overload policy uses."""
    return RequestForecast() if policy is Overload.REQUEST_PREDICTION else SystemForecast()


class OutputLengths:
    """The lengths of the latest outputs, by kind. Prompts that begin with the same block are of one kind."""

    def __init__(self) -> None:
        self._all: deque[int] = deque(maxlen=_NUM_RECENT)
        self._by_kind: OrderedDict[BlockKey, deque[int]] = OrderedDict()

    def expected(self, request: Request) -> int:
        """Return the expected length of the request's output in tokens.

        The length is the 0.7 quantile of the latest outputs of its kind, and at most `max_tokens`. If few
        outputs of the kind are known, the outputs of all kinds are taken. Without any it is `max_tokens`.
        """
        lengths = self._by_kind.get(request.block_keys[0]) if request.block_keys else None
        if lengths is None or len(lengths) < _FEWEST_OF_KIND:
            lengths = self._all
        most = request.sampling.max_tokens
        if not lengths:
            return most
        return min(most, sorted(lengths)[int(_QUANTILE * (len(lengths) - 1))])

    def learn(self, request: Request, num_output_tokens: int) -> None:
        """Record the length in tokens of an output that has ended."""
        self._all.append(num_output_tokens)
        if request.block_keys:
            kind = request.block_keys[0]
            self._by_kind.setdefault(kind, deque(maxlen=_NUM_RECENT)).append(num_output_tokens)
            self._by_kind.move_to_end(kind)
            if len(self._by_kind) > _NUM_KINDS:
                self._by_kind.popitem(last=False)


def _between(timeline: Timeline, now: float, then: float) -> PromptTotals:
    return timeline.until(then).less(timeline.until(now))


def _entered(request: Request, *times: tuple[Timeline, float]) -> Stay:
    num_tokens = len(request.token_ids)
    return Stay(num_tokens, tuple((timeline, timeline.add(time_s, num_tokens)) for timeline, time_s in times))
