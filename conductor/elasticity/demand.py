"""The load that clients offer: prefill and decode work of the latest arrivals, accepted or not.

How far back arrivals count adapts: as far as the load has been the same (adaptive windowing: Bifet and
Gavalda, 2007). In a steady load a minute of arrivals is averaged; after a step the second that shows it, and
those that follow.

Owns: arrivals, changes of the load. Does not know: instances, what is done about the load.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from conductor.elasticity.answers import Answer, AnswerLengths, Kind

WINDOW_S = 60.0
"""The longest time for which arrivals count."""
_MOST_ARRIVALS = 8192
_STEP_S = 1.0
"""The resolution at which a change of the load is looked for."""
_SIGNIFICANT = 4.0
"""Standard deviations by which the latest seconds differ from those before if the load has changed. There are
many ways to divide the window, so fewer would be seen by chance."""
_LEAST_CHANGE = 1.3
"""The factor below which a difference is no change, however sure."""
_FEWEST_ARRIVALS = 6
"""The number of arrivals that can show a change."""
MOST_LEFT_S = 120.0
"""The longest time for which a load is expected to stay as it is."""
_NUM_GAPS, _FEWEST_GAPS = 8, 3
"""The numbers of times between changes that are remembered, and that tell how long loads stay."""
_MOST_OF_MEAN = 4.0
"""The amount, in means, at which a single arrival stops to be a surprise."""


class Arrival(NamedTuple):
    """What a request would take."""

    at_s: float
    prefill_s: float
    """Seconds of a prefill instance."""
    num_prompt_tokens: int
    kind: Kind


class Load(NamedTuple):
    """What arrives in a second, on average."""

    num_requests: float
    prefill_s: float
    """Seconds of prefill instances: the number of them that would be busy all the time."""
    num_output_tokens: float
    """Tokens to be drawn."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    window_s: float
    """The time for which the load has been the same, as far as is known."""

    @property
    def mean_kv_tokens(self) -> float:
        """Tokens of KVCache of a request that is decoded, in the mean over the time."""
        return self.mean_prompt_tokens + self.mean_output_tokens / 2


@dataclass(slots=True)
class Demand:
    """The latest arrivals."""

    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    num_changes: int = 0
    """The number of times that the load has changed."""
    _arrivals: deque[Arrival] = field(default_factory=lambda: deque(maxlen=_MOST_ARRIVALS))
    _began_s: float | None = None
    """The time since when the load has been the same."""

    def arrived(self, num_prompt_tokens: int, max_tokens: int, prefill_s: float, now_s: float) -> None:
        """Count a request that a client has sent, whatever is done with it."""
        if self._began_s is None:
            self._began_s = now_s
        kind = Kind.of(num_prompt_tokens, max_tokens)
        self._arrivals.append(Arrival(now_s, prefill_s, num_prompt_tokens, kind))

    def finished(self, answer: Answer) -> None:
        """Learn from an answer that has ended."""
        self.lengths.learn(answer)

    def load(self, running: Sequence[Answer], now_s: float) -> Load | None:
        """The present load; None before the first request."""
        if self._began_s is None:
            return None
        self._began_s = max(self._began_s, now_s - WINDOW_S)
        self._forget()
        kinds = Counter(arrival.kind for arrival in self._arrivals)
        means = self.lengths.means(kinds, running, self._began_s)
        if self._find_change(means, now_s):
            means = self.lengths.means(kinds, running, self._began_s)
        seconds = max(now_s - self._began_s, _STEP_S)
        kinds = Counter(arrival.kind for arrival in self._arrivals)
        num_requests, num_tokens = len(self._arrivals), sum(of.num_prompt_tokens for of in self._arrivals)
        num_outputs = sum(number * means[kind] for kind, number in kinds.items())
        return Load(
            num_requests / seconds,
            sum(of.prefill_s for of in self._arrivals) / seconds,
            num_outputs / seconds,
            num_tokens / max(1, num_requests),
            num_outputs / max(1, num_requests),
            seconds,
        )

    def _find_change(self, means: dict[Kind, float], now_s: float) -> bool:
        """Forget arrivals before the latest change of the load; whether there was one.

        The latest seconds, however many, are compared with those before them, by the work of both stages. The
        sum of n amounts that arrive at random has a variance of the sum of their squares.
        """
        assert self._began_s is not None
        num_steps = int((now_s - self._began_s) / _STEP_S)
        if num_steps < 2 or len(self._arrivals) < _FEWEST_ARRIVALS:
            return False
        ages = np.array([now_s - of.at_s for of in self._arrivals])
        bucket = np.minimum((ages / _STEP_S).astype(np.intp), num_steps - 1)
        counts = np.bincount(bucket, minlength=num_steps).cumsum()
        recent_s = _STEP_S * np.arange(1, num_steps)
        before_s = now_s - self._began_s - recent_s
        expected = (counts[-1] - counts[:-1]) * recent_s / before_s
        is_seen = np.maximum(counts[:-1], expected) >= _FEWEST_ARRIVALS
        best, found = _SIGNIFICANT, 0
        for amounts in (
            np.array([of.prefill_s for of in self._arrivals]),
            np.array([means[of.kind] for of in self._arrivals]),
        ):
            amounts = np.minimum(amounts, _MOST_OF_MEAN * amounts.mean())
            sums = np.bincount(bucket, amounts, num_steps).cumsum()
            squares = np.bincount(bucket, amounts**2, num_steps).cumsum()
            recent, before = sums[:-1] / recent_s, (sums[-1] - sums[:-1]) / before_s
            # Both are compared as if they were one load: few arrivals do not look sure of being none.
            mean_square = squares[-1] / (now_s - self._began_s)
            deviation = np.sqrt(mean_square * (1 / recent_s + 1 / before_s))
            surprise = np.abs(recent - before) / np.maximum(deviation, 1e-12)
            larger, smaller = np.maximum(recent, before), np.minimum(recent, before)
            surprise[(larger < _LEAST_CHANGE * smaller) | ~is_seen] = 0.0
            step = int(surprise.argmax())
            if surprise[step] > best:
                best, found = float(surprise[step]), step + 1
        if found:
            self.num_changes += 1
            self._began_s = now_s - found * _STEP_S
            self._forget()
        return found > 0

    def _forget(self) -> None:
        began_s = self._began_s
        assert began_s is not None
        while self._arrivals and self._arrivals[0].at_s < began_s:
            self._arrivals.popleft()


class Persistence:
    """How long loads stay as they are, from the times between the latest changes."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_NUM_GAPS)
        self._changed_s: float | None = None

    def changed(self, now_s: float) -> None:
        """Note a change."""
        if self._changed_s is not None:
            self._gaps_s.append(now_s - self._changed_s)
        self._changed_s = now_s

    @property
    def is_known(self) -> bool:
        """Whether enough changes were seen to tell."""
        return len(self._gaps_s) >= _FEWEST_GAPS

    def left_s(self, window_s: float) -> float:
        """The time for which a load that has been the same for `window_s` is expected to stay so.

        It lasts as long as the shortest quarter of loads before; if it has already, as long again as until
        now.
        """
        gaps_s = sorted(self._gaps_s)
        usual_s = gaps_s[len(gaps_s) // 4] if gaps_s else WINDOW_S
        return min(max(usual_s - window_s, window_s), MOST_LEFT_S)
