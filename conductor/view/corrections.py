"""Corrections of predictions near an SLO, learned from the errors of the latest predictions.

Under overload every queue and every batch is as large as its SLO allows. A request that is admitted then is
predicted to be just in time. If the prediction is too low, the request is late. So predicted times are
multiplied by a factor before they are compared with an SLO:

    TTFTCorrection  actual / predicted time to the first token, of the latest prompts
    TBTCorrection   reported / predicted time that a batch adds to an iteration, of the latest reports

Owns: the latest errors. Does not know: which requests are admitted.
"""

import math
from collections import OrderedDict, deque
from typing import NamedTuple

from conductor.view.placement import Prediction

TTFT_QUANTILE = 0.95
"""The share of the latest first tokens that would have been in time with the correction."""
NEAR_TTFT_SLO = 0.7
"""The share of a TTFT SLO above which a predicted TTFT counts as near the SLO."""
MOST_TTFT = 1.5
"""The largest factor of a predicted TTFT."""

TBT_QUANTILE = 0.9
"""The share of the latest reported TBTs that are at most as high as their corrected predictions."""
NEAR_TBT_SLO = 0.3
"""The least share of a TBT SLO at which a batch counts as near the SLO.

Only the time that depends on the batch is compared: the batch's part of an iteration, and the part of the SLO
that is left for it. The errors of smaller batches say little about batches at the SLO. With a larger
share, such as 0.5, more requests are late, as batches grow much between two heartbeats.
"""
MOST_TBT = 1.5
"""The largest factor of the time that a batch adds to an iteration."""

MEMORY_S = 60.0
"""Seconds after which an error is forgotten."""
_NUM_RECENT = 64
"""The largest number of errors that are remembered of one kind."""
_NUM_SLOS = 100
"""The number of SLOs whose errors are remembered separately.

The number is bounded, as SLOs come from API keys and requests.
"""


class _Error(NamedTuple):
    at_s: float
    ratio: float
    """The actual time divided by the predicted one."""


class _LatestErrors:
    """The latest errors of one kind of prediction.

    Args:
        quantile: The share of the errors that the factor covers.
        most: The largest factor.
    """

    __slots__ = ("_factor", "_latest", "_most", "_quantile")

    def __init__(self, quantile: float, most: float) -> None:
        self._quantile, self._most = quantile, most
        self._factor = 1.0
        self._latest: deque[_Error] = deque(maxlen=_NUM_RECENT)

    def learn(self, ratio: float, now_s: float) -> None:
        """Record that an actual time was `ratio` times the predicted one."""
        self._latest.append(_Error(now_s, ratio))
        self._update()

    def factor(self, now_s: float) -> float:
        """Return the factor, at least 1, of a predicted time."""
        if self._latest and self._latest[0].at_s < now_s - MEMORY_S:
            while self._latest and self._latest[0].at_s < now_s - MEMORY_S:
                self._latest.popleft()
            self._update()
        return self._factor

    def _update(self) -> None:
        self._factor = 1.0
        if self._latest:
            ratios = sorted(error.ratio for error in self._latest)
            at_quantile = ratios[math.ceil(self._quantile * len(ratios)) - 1]
            self._factor = min(max(1.0, at_quantile), self._most)


class TTFTCorrection:
    """The factors of predicted TTFTs, one for each TTFT SLO.

    An error near one SLO says nothing about another SLO.
    """

    def __init__(self) -> None:
        self._by_slo: OrderedDict[float, _LatestErrors] = OrderedDict()
        """The errors by SLO; the SLO with the newest error is last."""

    def learn(
        self, prediction: Prediction, delay_s: float, ttft_s: float, ttft_slo_s: float | None, now_s: float
    ) -> None:
        """Record the error of a first token's prediction.

        Only predictions near the SLO are learned, as prompts of other lengths have other errors. Probes,
        which are admitted although they are predicted to miss the SLO, are not learned.

        Args:
            prediction: The prediction made at the placement.
            delay_s: Predicted seconds of prompts that were placed later and computed earlier.
            ttft_s: Seconds from the placement to the first token.
            ttft_slo_s: The request's TTFT SLO in seconds; None for none.
            now_s: The time.
        """
        predicted_s = prediction.ttft_s + delay_s
        if ttft_slo_s is None or prediction.ttft_s > ttft_slo_s:
            return
        if self.factor(ttft_slo_s, now_s) * predicted_s < NEAR_TTFT_SLO * ttft_slo_s:
            return
        self._by_slo.setdefault(ttft_slo_s, _LatestErrors(TTFT_QUANTILE, MOST_TTFT)).learn(
            ttft_s / predicted_s, now_s
        )
        self._by_slo.move_to_end(ttft_slo_s)
        if len(self._by_slo) > _NUM_SLOS:
            self._by_slo.popitem(last=False)

    def factor(self, ttft_slo_s: float, now_s: float) -> float:
        """Return the factor, at least 1, of predicted TTFTs of requests with this SLO."""
        errors = self._by_slo.get(ttft_slo_s)
        return 1.0 if errors is None else errors.factor(now_s)


class TBTCorrection:
    """The correction of the time that a batch adds to a predicted iteration, for all decode instances.

    Decode instances check the TBT SLO again when prefill has ended (Mooncake, section 3). If these checks
    predicted 1% more than the Conductor, the Conductor would go on admitting requests that every decode
    instance refuses after prefill. Most of an iteration's time does not depend on the batch, so only the
    batch's part is corrected.
    """

    def __init__(self) -> None:
        self._errors = _LatestErrors(TBT_QUANTILE, MOST_TBT)

    def learn(self, predicted_s: float, reported_s: float, constant_s: float, now_s: float) -> None:
        """Learn the error of a TBT prediction from the TBT that a decode instance reports for the same batch.

        Args:
            predicted_s: The TBT that the Conductor predicts.
            reported_s: The TBT that the instance predicts.
            constant_s: The part of both predictions that does not depend on the batch.
            now_s: The time.
        """
        if predicted_s > constant_s:
            self._errors.learn((reported_s - constant_s) / (predicted_s - constant_s), now_s)

    def corrected_s(self, predicted_s: float, constant_s: float, now_s: float) -> float:
        """Return the corrected value of a predicted TBT, in seconds.

        `constant_s` is the part of the prediction that does not depend on the batch.
        """
        return constant_s + self._errors.factor(now_s) * (predicted_s - constant_s)
