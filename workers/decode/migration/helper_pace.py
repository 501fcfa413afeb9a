"""The check whether a helper is too slow.

A helper is too slow if most iterations take more than 1.25 times as long as they would without the helper. It
is also too slow if nearly all exceed the TBT SLO, unless most are faster than without the helper.

Owns: the check, the measured iterations. Does not know: the clock, which modules the helper has, how they
return.
"""

import copy
from collections import deque
from typing import NamedTuple

from workers.decode.tbt_slo.tbt import TBTPredictor

WINDOW_S = 10.0
"""The seconds of a window. The iterations in a window are judged together.

A window with fewer than `MIN_ITERATIONS` lasts longer.
"""
MIN_ITERATIONS = 32
LATE_SHARE = 0.9
"""The share of a window's iterations that must exceed the TBT SLO for the helper to count as too slow."""
MOST_TIMES_AS_LONG = 1.25
"""An iteration counts as slowed down if it takes more than this many times the time without a helper.

The time without a helper is predicted.
"""
_NUM_COMPARED = 256
"""The number of latest iterations without a helper that are remembered.

Iterations with a larger batch than all of these are not compared.
"""


class IterationTime(NamedTuple):
    """The measured time of an iteration without prompts.

    `tbt_slo_s` is the strictest TBT SLO of its sequences; None if they have none.
    """

    num_decoded: int
    num_kv_tokens: int
    seconds: float
    tbt_slo_s: float | None


class WithoutHelper:
    """The iterations of an instance while it has no helper, before and between its helpers."""

    def __init__(self) -> None:
        self._predictor = TBTPredictor()
        self._sizes: deque[tuple[int, int]] = deque(maxlen=_NUM_COMPARED)

    def ended(self, iteration: IterationTime) -> None:
        """Record an iteration."""
        self._predictor.observe(iteration.num_decoded, iteration.num_kv_tokens, iteration.seconds)
        self._sizes.append((iteration.num_decoded, iteration.num_kv_tokens))

    def pace(self) -> "HelperPace":
        """Return the pace of a new helper, which is compared with the iterations recorded so far."""
        most_decoded = max((num_decoded for num_decoded, _ in self._sizes), default=0)
        most_tokens = max((num_tokens for _, num_tokens in self._sizes), default=0)
        return HelperPace(copy.deepcopy(self._predictor), most_decoded, most_tokens)


class HelperPace:
    """The iterations with one helper, compared with predicted iterations without the helper.

    `before` predicts iterations without the helper, for batches of at most `most_decoded` sequences and
    `most_tokens` tokens.
    """

    def __init__(self, before: TBTPredictor, most_decoded: int, most_tokens: int) -> None:
        self._before, self._most_decoded, self._most_tokens = before, most_decoded, most_tokens
        self._began_s: float | None = None
        self._forget()

    @classmethod
    def unknown(cls) -> "HelperPace":
        """Return a pace without iterations to compare with. Only the TBT SLO counts then."""
        return cls(TBTPredictor(), 0, 0)

    def ended(self, iteration: IterationTime, now_s: float) -> str:
        """Record an iteration that ended at `now_s`, and return why the helper is too slow; else "".

        The iterations of a window are judged together, when its last iteration is recorded.
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
        """Return the predicted seconds of an iteration without the helper; None if there is no prediction."""
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
