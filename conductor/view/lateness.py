"""How much longer first tokens take than predicted, so that those who are let in at the limit are not late.

Where there is too much to do, every queue is as long as it may be, and whoever is let in behind it is just in
time by the prediction: every other one would be late by its error. Each TTFT SLO has a limit of its own: who
is late by 10 ms at one of 50 ms says nothing of one of 30 s.

Owns: the latest errors. Does not know: who is let in.
"""

import math
from collections import OrderedDict, deque
from typing import NamedTuple

from conductor.view.placement import Prediction

QUANTILE = 0.95
"""of the latest first tokens come in time with this allowance"""
NEAR = 0.7
"""of its TTFT SLO: who was predicted to take less is not at the limit"""
MOST = 1.5
MEMORY_S = 60.0
"""after which an error tells nothing any more"""
_NUM_RECENT = 64
_NUM_SLOS = 100


class _Seen(NamedTuple):
    at_s: float
    ratio: float
    """of the time to the first token to the predicted one"""


class _AtLimit:
    """The latest of one TTFT SLO."""

    __slots__ = ("_factor", "_latest")

    def __init__(self) -> None:
        self._factor = 1.0
        self._latest: deque[_Seen] = deque(maxlen=_NUM_RECENT)

    def learn(self, ratio: float, now_s: float) -> None:
        self._latest.append(_Seen(now_s, ratio))
        self._update()

    def factor(self, now_s: float) -> float:
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


class Lateness:
    """Of all prefill instances together, by TTFT SLO."""

    def __init__(self) -> None:
        self._by_slo: OrderedDict[float, _AtLimit] = OrderedDict()
        """in the order in which they learned last"""

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
        if self.factor(ttft_slo_s, now_s) * predicted_s < NEAR * ttft_slo_s:
            return
        self._by_slo.setdefault(ttft_slo_s, _AtLimit()).learn(ttft_s / predicted_s, now_s)
        self._by_slo.move_to_end(ttft_slo_s)
        if len(self._by_slo) > _NUM_SLOS:
            self._by_slo.popitem(last=False)

    def factor(self, ttft_slo_s: float, now_s: float) -> float:
        """Of a time that is predicted for a request with this SLO, at least 1."""
        at_limit = self._by_slo.get(ttft_slo_s)
        return 1.0 if at_limit is None else at_limit.factor(now_s)
