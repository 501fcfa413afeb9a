"""Which requests are rejected: those that would miss an SLO, or make others miss it (Mooncake, section 7).

    baseline         each stage by itself: prefill's load at arrival, decode's when prefill has ended (7.1)
    early_rejection  the greater load of both pools, at arrival (7.2)
    prediction       as before, but decode's load when the prefill will have ended (7.4, system level)
    request_prediction      the same, of each request by its expected output length (7.4, request level)

A load is what is predicted in relation to the SLO. Without an SLO nothing is rejected by it.

Owns: the rules. Does not know: how a pair is chosen, messages.
"""

from typing import NamedTuple

import numpy as np

from conductor.assignments import Assignment
from conductor.cluster_view import ClusterView
from conductor.forecast import Forecast, RequestForecast, SystemForecast
from conductor.instances import Instance
from conductor.placement import Placement, Reason, Rejection
from conductor.rules import SLOs
from conductor.timeline import Work
from mooncake.config import Overload

PROBE_AFTER_S = 5.0
"""an idle prefill instance whose costs nothing has shown for so long takes anything: predictions by which all
were rejected would never be corrected"""
_SHORTEST_RETRY_S = 1.0


class Freed(NamedTuple):
    """What would not have to be done: seconds of a prefill instance, and what would have been decoded."""

    prefill_s: float
    work: Work

    def and_of(self, assignment: Assignment, *, is_ahead: bool) -> "Freed":
        """One more; `is_ahead` if what has to wait waits for its prefill."""
        num_requests, num_tokens = self.work
        return Freed(
            self.prefill_s + (assignment.placement.prediction.prefill_s if is_ahead else 0.0),
            Work(num_requests + 1, num_tokens + assignment.num_tokens),
        )


NOTHING = Freed(0.0, Work(0, 0))


def forecast_of(policy: Overload) -> Forecast:
    """What the policy predicts decode's load with."""
    return RequestForecast() if policy is Overload.REQUEST_PREDICTION else SystemForecast()


class Admission:
    """Checks requests against their SLOs; None for no SLO."""

    def __init__(self, view: ClusterView, forecast: Forecast, policy: Overload) -> None:
        self._view, self._forecast, self._policy = view, forecast, policy

    def double_check(self, slos: SLOs) -> float | None:
        """The TBT SLO that a decode instance is to check when prefill has ended."""
        return None if self._policy is Overload.BASELINE else slos.tbt_s

    def check_arrival(
        self,
        placement: Placement,
        num_tokens: int,
        slos: SLOs,
        waited_s: float,
        now_s: float,
        freed: Freed = NOTHING,
    ) -> Rejection | None:
        """Before anything is done for it; it has waited so long already. Algorithm 1, line 25.

        `freed`: what would give way to it.
        """
        ttft_s = placement.prediction.ttft_s - min(freed.prefill_s, placement.prediction.queue_s)
        first_token_s, ttft_slo_s = waited_s + ttft_s, slos.ttft_s
        if ttft_slo_s is not None and first_token_s > ttft_slo_s and not self._is_probe(placement, now_s):
            return _rejection(Reason.TTFT, first_token_s, ttft_slo_s, first_token_s - ttft_slo_s)
        if slos.tbt_s is None:
            return None
        match self._policy:
            case Overload.BASELINE:
                return None
            case Overload.EARLY_REJECTION:
                return self._check_tbt(self._tbt_now_s(num_tokens), slos.tbt_s)
            case Overload.PREDICTION | Overload.REQUEST_PREDICTION:
                tbt_s = self._tbt_at_s(now_s + ttft_s, num_tokens, freed.work)
                return self._check_tbt(tbt_s, slos.tbt_s)

    def check_decode(self, decode: Instance, num_tokens: int, slos: SLOs) -> Rejection | None:
        """Its prefill has ended, which is wasted if the decode instance rejects it now."""
        if self._policy is not Overload.BASELINE:
            return None
        loads, costs = self._view.loads, self._view.decode_costs
        slot = self._view.slot_of(decode.name)
        assert slot is not None
        num_others = loads.num_decoding[slot]
        if not num_others:
            return None
        num_kv_tokens = loads.num_decoding_tokens[slot] + num_tokens
        return self._check_tbt(costs.predict_s(slot, num_others + 1, num_kv_tokens), slos.tbt_s)

    def _is_probe(self, placement: Placement, now_s: float) -> bool:
        if placement.prediction.queue_s > 0:
            return False
        slot = self._view.slot_of(placement.prefill.name)
        assert slot is not None
        return self._view.prefill_unchecked_s(slot, now_s) > PROBE_AFTER_S

    def _check_tbt(self, tbt_s: float | None, tbt_slo_s: float | None) -> Rejection | None:
        """`tbt_s`: predicted; None if some instance decodes nothing then."""
        if tbt_slo_s is None or tbt_s is None or tbt_s <= tbt_slo_s:
            return None
        return _rejection(Reason.TBT, tbt_s, tbt_slo_s, self._decode_s() * (1 - tbt_slo_s / tbt_s))

    def _decode_s(self) -> float:
        """In which all that is decoded now is replaced."""
        decode_s = self._forecast.decode_s
        return decode_s if decode_s < np.inf else _SHORTEST_RETRY_S

    def _tbt_now_s(self, num_tokens: int) -> float | None:
        """Of the decode instance that is quickest with one more request; None if one has nothing to do."""
        loads, costs = self._view.loads, self._view.decode_costs
        (slots,) = loads.is_decode.nonzero()
        num_decoding = loads.num_decoding[slots]
        if not num_decoding.all():
            return None
        step_s = (
            costs.constant_s[slots]
            + (num_decoding + 1) * costs.first_s[slots]
            + (loads.num_decoding_tokens[slots] + num_tokens) * costs.second_s[slots]
        )
        return float(step_s.min())

    def _tbt_at_s(self, time_s: float, num_tokens: int, freed: Work) -> float | None:
        """The same at a later time, when the work that is there then is spread evenly."""
        work = self._forecast.at(time_s)
        work = Work(work.num_requests - freed.num_requests, work.num_tokens - freed.num_tokens)
        pool = self._view.decode_pool()
        if work.num_requests < pool.num_instances:
            return None
        return pool.mean_costs.seconds(
            work.num_requests // pool.num_instances + 1, work.num_tokens / pool.num_instances + num_tokens
        )


def _rejection(reason: Reason, predicted_s: float, slo_s: float, retry_after_s: float) -> Rejection:
    return Rejection(reason, predicted_s, slo_s, max(_SHORTEST_RETRY_S, retry_after_s))
