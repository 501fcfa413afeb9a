"""The rule by which a helper is too slow: iterations with it take longer than the TBT SLO allows, or than
iterations without it did.

Owns: the rule, what was measured before. Does not know: the clock, what the helper has, how that comes back.
"""

import copy
from collections import deque
from typing import NamedTuple

from workers.decode.tbt_slo.tbt import TBTPredictor

WINDOW_S = 10.0
"""Seconds of iterations that are looked at together, or more until there are `MIN_ITERATIONS`."""
MIN_ITERATIONS = 32
LATE_SHARE = 0.9
"""Share of these iterations that take longer than the TBT SLO allows if the helper is too slow."""
MOST_TIMES_AS_LONG = 1.25
"""Ratio to the time without a helper that most iterations exceed if the helper is too slow."""
_NUM_COMPARED = 256
"""Latest iterations without a helper that say how large a batch is of which such a time is known."""


class IterationTime(NamedTuple):
    """An iteration without prompts: its sequences and their tokens, and the strictest TBT SLO of these."""

    num_decoded: int
    num_kv_tokens: int
    seconds: float
    tbt_slo_s: float | None


class WithoutHelper:
    """The iterations of an instance while all is there, whatever its helpers have taken between them."""

    def __init__(self) -> None:
        self._predictor = TBTPredictor()
        self._sizes: deque[tuple[int, int]] = deque(maxlen=_NUM_COMPARED)

    def ended(self, iteration: IterationTime) -> None:
        """Note an iteration."""
        self._predictor.observe(iteration.num_decoded, iteration.num_kv_tokens, iteration.seconds)
        self._sizes.append((iteration.num_decoded, iteration.num_kv_tokens))

    def pace(self) -> "HelperPace":
        """Return the pace of a helper that has just come, compared with what has been measured so far."""
        most_decoded = max((num_decoded for num_decoded, _ in self._sizes), default=0)
        most_tokens = max((num_tokens for _, num_tokens in self._sizes), default=0)
        return HelperPace(copy.deepcopy(self._predictor), most_decoded, most_tokens)


class HelperPace:
    """The iterations with one helper. `before` predicts them without it, up to the largest that it knows."""

    def __init__(self, before: TBTPredictor, most_decoded: int, most_tokens: int) -> None:
        self._before, self._most_decoded, self._most_tokens = before, most_decoded, most_tokens
        self._began_s: float | None = None
        self._forget()

    @classmethod
    def unknown(cls) -> "HelperPace":
        """Return the pace of a helper with which nothing is compared."""
        return cls(TBTPredictor(), 0, 0)

    def ended(self, iteration: IterationTime, now_s: float) -> str:
        """Note an iteration that ended at `now_s`. Return why the helper is too slow; empty if it is not.

        The answer comes once for all iterations of a window, at its end.
        """
        if self._began_s is None:
            self._began_s = now_s
        self._num += 1
        self._num_late += iteration.tbt_slo_s is not None and iteration.seconds > iteration.tbt_slo_s
        expected_s = self._expected_s(iteration)
        if expected_s is not None:
            self._num_compared += 1
            self._num_faster += iteration.seconds < expected_s
            self._num_slower += iteration.seconds > MOST_TIMES_AS_LONG * expected_s
        if self._num < MIN_ITERATIONS or now_s - self._began_s < WINDOW_S:
            return ""
        why, self._began_s = self._why_slow(), None
        self._forget()
        return why

    def _forget(self) -> None:
        self._num = self._num_late = 0
        self._num_compared = self._num_faster = self._num_slower = 0

    def _expected_s(self, iteration: IterationTime) -> float | None:
        """Return the seconds without a helper; None for a larger batch than was measured."""
        num_decoded, num_tokens = iteration.num_decoded, iteration.num_kv_tokens
        if num_decoded > self._most_decoded or num_tokens > self._most_tokens:
            return None
        return self._before.predict_s(num_decoded, num_tokens)

    def _why_slow(self) -> str:
        most = self._num_compared / 2 if self._num_compared >= MIN_ITERATIONS else self._num
        if self._num_slower > most:
            return (
                f"{self._num_slower} of {self._num_compared} iterations took more than "
                f"{MOST_TIMES_AS_LONG:g} times as long as without it"
            )
        is_faster = self._num_faster > most
        if self._num_late >= LATE_SHARE * self._num and not is_faster:
            return f"{self._num_late} of {self._num} iterations took longer than the TBT SLO allows"
        return ""
