"""How much longer first tokens take than predicted, so that those who are let in at the limit are not late.

Where there is too much to do, every queue is as long as it may be, and whoever is let in behind it is just in
time by the prediction: every other one would be late by its error.

Owns: the latest errors. Does not know: who is let in.
"""

import math
from collections import deque
from typing import NamedTuple

from conductor.placement import Prediction

QUANTILE = 0.95
"""of the latest first tokens come in time with this allowance"""
NEAR = 0.7
"""of its TTFT SLO: who was predicted to take less is not at the limit"""
MOST = 1.5
MEMORY_S = 60.0
"""after which an error tells nothing any more"""
_NUM_RECENT = 64


class _Seen(NamedTuple):
    at_s: float
    ratio: float
    """of the time to the first token to the predicted one"""


class Lateness:
    """Of all prefill instances together."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._latest: deque[_Seen] = deque(maxlen=_NUM_RECENT)

    def learn(
        self, prediction: Prediction, delay_s: float, ttft_s: float, ttft_slo_s: float | None, now_s: float
    ) -> None:
        """A first token came after `ttft_s`; `delay_s`: of what came later and went first.

        Only those tell that were near their limit: how much longer than predicted others take, whose prompts
        have other lengths, says little of them. Nor does who was let in beyond it, to show what it takes.
        """
        predicted_s = prediction.ttft_s + delay_s
        if ttft_slo_s is None or prediction.ttft_s > ttft_slo_s:
            return
        if self.factor(now_s) * predicted_s < NEAR * ttft_slo_s:
            return
        self._latest.append(_Seen(now_s, ttft_s / predicted_s))
        self._update()

    def factor(self, now_s: float) -> float:
        """Of a predicted time, at least 1."""
        if self._latest and self._latest[0].at_s < now_s - MEMORY_S:
            while self._latest and self._latest[0].at_s < now_s - MEMORY_S:
                self._latest.popleft()
            self._update()
        return self._factor

    def _update(self) -> None:
        self._factor = 1.0
        if self._latest:
            ratios = sorted(seen.ratio for seen in self._latest)
            self._factor = min(max(1.0, ratios[math.ceil(QUANTILE * len(ratios)) - 1]), MOST)
