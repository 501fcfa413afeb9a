"""The load that clients offer: the prefill and decode work of the latest arrivals, accepted or not.

Arrivals count as far back as the load has been the same (adaptive windowing: Bifet and Gavalda, 2007). In a
steady load the average covers a minute. After a step of the load it covers only the seconds since the step.

Owns: arrivals, changes of the load. Does not know: instances, which decisions follow.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.elasticity.answers import AnswerKind, AnswerLengths, RunningAnswer

WINDOW_S = 60.0
"""The most seconds for which an arrival counts."""
_SIGNIFICANT = 4.0
"""The smallest difference of two loads that counts as a change, in standard deviations.

The latest seconds are compared with the time before. The window is divided in many ways, so a smaller
difference would often occur by chance.
"""
_LEAST_CHANGE = 1.3
"""The ratio of two rates below which their difference is no change, however significant it is."""
_FEWEST_ARRIVALS = 6
"""The number of arrivals below which no change of the load is reported."""
MOST_LEFT_S = 120.0
"""The most seconds for which a load is expected to stay as it is."""
_NUM_PAST, _FEWEST_PAST = 8, 3
"""The numbers of past loads: how many are remembered, and how many suffice to predict a load's duration."""
_MOST_OF_MEAN = 4.0
"""The largest work that counts for a request when changes of the load are looked for.

It is a multiple of the mean work of all requests. A request's work is the mean of its kind in the second of
its arrival.
"""


Floats = npt.NDArray[np.floating[Any]]


@dataclass(slots=True)
class _Arrivals:
    """The requests of one kind that have arrived within one second of the clock."""

    second: int
    kind: AnswerKind
    num_requests: int = 0
    num_prompt_tokens: int = 0
    prefill_s: float = 0.0
    """Predicted prefill seconds of these requests."""
    prefill_squares: float = 0.0
    """The sum of the squares of each request's prefill seconds."""


class OfferedLoad(NamedTuple):
    """The mean work that arrives in a second."""

    num_requests: float
    prefill_s: float
    """Prefill seconds that arrive in a second. They equal the number of prefill instances that stay busy."""
    num_output_tokens: float
    """Tokens that will be drawn for the requests that arrive in a second."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    window_s: float
    """Seconds for which the load is known to have been the same."""
    was_burst: bool = False
    """Whether the load was a burst that is over.

    A burst is over if the later half of `window_s` had less than a quarter of the mean rate of `window_s`.
    """

    @property
    def mean_kv_tokens(self) -> float:
        """The mean number of KVCache tokens of a request while it is decoded."""
        return self.mean_prompt_tokens + self.mean_output_tokens / 2


@dataclass(slots=True)
class Demand:
    """The latest arrivals, and the load that follows from them."""

    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    num_changes: int = 0
    """The number of times that the load has changed."""
    _arrivals: deque[_Arrivals] = field(default_factory=deque)
    """Arrivals by second and kind. So memory does not grow with the rate of requests."""
    _latest: dict[AnswerKind, _Arrivals] = field(default_factory=dict)
    """The arrivals of the latest second with arrivals, by kind."""
    _began_s: float | None = None
    """The time from which on the load has been the same; None before the first request."""

    def arrived(self, num_prompt_tokens: int, max_tokens: int, prefill_s: float, now_s: float) -> None:
        """Count a request that a client has sent, accepted or not."""
        if self._began_s is None:
            self._began_s = now_s
        second, kind = math.floor(now_s), AnswerKind.of(num_prompt_tokens, max_tokens)
        if not self._arrivals or self._arrivals[-1].second != second:
            self._latest.clear()
        arrivals = self._latest.get(kind)
        if arrivals is None:
            arrivals = self._latest[kind] = _Arrivals(second, kind)
            self._arrivals.append(arrivals)
        arrivals.num_requests += 1
        arrivals.num_prompt_tokens += num_prompt_tokens
        arrivals.prefill_s += prefill_s
        arrivals.prefill_squares += prefill_s**2

    def finished(self, answer: RunningAnswer) -> None:
        """Record the length of an answer that has ended."""
        self.lengths.learn(answer)

    def load(self, running: Sequence[RunningAnswer], now_s: float) -> OfferedLoad | None:
        """Return the present load; None before the first request.

        `running`: the answers that are being decoded, with their estimated lengths so far.
        """
        if self._began_s is None:
            return None
        self._began_s = self._forget(max(self._began_s, math.ceil(now_s - WINDOW_S)))
        kinds = {of.kind for of in self._arrivals}
        means = self.lengths.means(kinds, running, self._began_s)
        if (changed_s := self._clearest_change(means, self._began_s, now_s)) is not None:
            self.num_changes += 1
            self._began_s = self._forget(changed_s)
            means = self.lengths.means(kinds, running, self._began_s)
        seconds = max(now_s - self._began_s, 1.0)
        num_requests = sum(of.num_requests for of in self._arrivals)
        num_outputs = sum(of.num_requests * means[of.kind] for of in self._arrivals)
        half_s = math.ceil(now_s - seconds / 2)
        num_late = sum(of.num_requests for of in self._arrivals if of.second >= half_s)
        return OfferedLoad(
            num_requests / seconds,
            sum(of.prefill_s for of in self._arrivals) / seconds,
            num_outputs / seconds,
            sum(of.num_prompt_tokens for of in self._arrivals) / max(1, num_requests),
            num_outputs / max(1, num_requests),
            seconds,
            was_burst=num_late * seconds < 0.25 * num_requests * (now_s - half_s),
        )

    def _forget(self, began_s: float) -> float:
        """Forget arrivals before `began_s`, and return `began_s`."""
        while self._arrivals and self._arrivals[0].second < math.floor(began_s):
            self._arrivals.popleft()
        return began_s

    def _clearest_change(self, means: dict[AnswerKind, float], began_s: float, now_s: float) -> float | None:
        """Return the time of the most significant change of the load; None if there was none since `began_s`.

        At each whole second in this time, the rates of work of both stages before and after the second are
        compared.
        """
        now, first = math.floor(now_s), math.floor(began_s)
        nums = np.array([of.num_requests for of in self._arrivals])
        borders = np.arange(now - 1, math.ceil(began_s), -1, dtype=np.float64)
        """The times at which the load may have changed, latest first."""
        if not len(borders) or nums.sum() < _FEWEST_ARRIVALS:
            return None
        ages = now - np.array([of.second for of in self._arrivals])

        def by_border(amounts: npt.NDArray[Any]) -> tuple[Floats, Floats]:
            """Return for each border the sums of the amounts that arrived after it and before it."""
            sums = np.bincount(ages, amounts, now - first + 1).cumsum()
            recent = sums[1 : len(borders) + 1]
            return recent, sums[-1] - recent

        recent_s, before_s = now_s - borders, borders - began_s
        num_recent, num_before = by_border(nums)
        is_seen = np.maximum(num_recent, num_before * recent_s / before_s) >= _FEWEST_ARRIVALS
        outputs = nums * np.array([means[of.kind] for of in self._arrivals])
        best, changed_s = _SIGNIFICANT, None
        for sums, squares in (
            (
                np.array([of.prefill_s for of in self._arrivals]),
                np.array([of.prefill_squares for of in self._arrivals]),
            ),
            (outputs, outputs**2 / nums),
        ):
            most = _MOST_OF_MEAN * sums.sum() / nums.sum()
            squares = np.where(sums > most * nums, most**2 * nums, squares)
            recent, before = by_border(np.minimum(sums, most * nums))
            surprises = _surprises(recent, before, recent_s, before_s, float(squares.sum()))
            surprises[~is_seen] = 0.0
            found = int(surprises.argmax())
            if surprises[found] > best:
                best, changed_s = float(surprises[found]), float(borders[found])
        return changed_s


def _surprises(
    recent: Floats, before: Floats, recent_s: Floats, before_s: Floats, sum_of_squares: float
) -> Floats:
    """Return for each border how significantly the rates of work before and after the border differ.

    The variance of a sum of amounts that arrive at random is the sum of their squares. The deviation is
    computed as if one load had been there on both sides of a border. So the deviation is not near 0 where one
    side has few arrivals.

    Args:
        recent: Work after each border, `[n]`.
        before: Work before each border, `[n]`.
        recent_s: Seconds after each border, `[n]`.
        before_s: Seconds before each border, `[n]`; `recent_s + before_s` is the same for all borders.
        sum_of_squares: The sum of the squares of all amounts of work.

    Returns:
        The differences of the rates in standard deviations, `[n]`; 0 where the ratio of the rates is below
            `_LEAST_CHANGE`.
    """
    recent_rates, before_rates = recent / recent_s, before / before_s
    mean_square = sum_of_squares / (recent_s[0] + before_s[0])
    deviations = np.sqrt(mean_square * (1 / recent_s + 1 / before_s))
    surprises: Floats = np.abs(recent_rates - before_rates) / np.maximum(deviations, 1e-12)
    larger, smaller = np.maximum(recent_rates, before_rates), np.minimum(recent_rates, before_rates)
    surprises[larger < _LEAST_CHANGE * smaller] = 0.0
    return surprises


class Past(NamedTuple):
    """An earlier load and its duration."""

    load: OfferedLoad
    lasted_s: float


class Persistence:
    """The latest loads, from which the duration of the present load is estimated."""

    def __init__(self) -> None:
        self.past: deque[Past] = deque(maxlen=_NUM_PAST)
        """Earlier loads, oldest first."""
        self._changed_s: float | None = None
        self._latest: OfferedLoad | None = None
        """The load at the latest call of `note`."""

    def note(self, load: OfferedLoad, has_changed: bool, now_s: float) -> None:
        """Record the present load. `has_changed` tells whether the load has changed since the last call."""
        if has_changed:
            if self._changed_s is not None and self._latest is not None:
                self.past.append(Past(self._latest, now_s - self._changed_s))
            self._changed_s = now_s
        self._latest = load

    @property
    def is_known(self) -> bool:
        """Whether enough changes have been seen to estimate how long a load lasts."""
        return len(self.past) >= _FEWEST_PAST

    def left_s(self, window_s: float) -> float:
        """Return the seconds that a load is expected to go on after it has been the same for `window_s`.

        The load's whole duration is expected to be the lower quartile of the earlier durations, or `WINDOW_S`
        if there is none. In any case the load is expected to go on for at least `window_s`, and at most
        `MOST_LEFT_S`.
        """
        lasted_s = sorted(past.lasted_s for past in self.past)
        usual_s = lasted_s[len(lasted_s) // 4] if lasted_s else WINDOW_S
        return min(max(usual_s - window_s, window_s), MOST_LEFT_S)
