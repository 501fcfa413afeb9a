"""How much longer queues last than predicted, so that those who are let in at the limit are not late.

Where there is too much to do, every queue is as long as it may be, and whoever is let in behind it is just in
time by the prediction: every other one would be late by its error.

Owns: the latest errors. Does not know: SLOs, who is let in.
"""

from collections import deque

from conductor.placement import Prediction

QUANTILE = 0.9
"""of the latest first tokens come in time with this allowance"""
MOST = 1.5
_NUM_RECENT = 64
_FEWEST = 8


class Lateness:
    """`factor`: of a predicted queue, at least 1."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._latest: deque[float] = deque(maxlen=_NUM_RECENT)

    def learn(self, prediction: Prediction, delay_s: float, ttft_s: float) -> None:
        """A first token came after `ttft_s`; `delay_s`: of what came later and went first.

        Only what waited for longer than it was computed tells about queues.
        """
        queue_s = prediction.queue_s + delay_s
        own_s = prediction.transfer_s + prediction.prefill_s
        if queue_s <= own_s:
            return
        self._latest.append((ttft_s - own_s) / queue_s)
        if len(self._latest) >= _FEWEST:
            quantile = sorted(self._latest)[int(QUANTILE * (len(self._latest) - 1))]
            self.factor = min(max(1.0, quantile), MOST)
