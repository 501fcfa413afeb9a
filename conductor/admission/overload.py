"""Early rejection of requests that would miss an SLO, or make other requests miss it (Mooncake, section 7).

    baseline            each stage alone: prefill at arrival, decode when prefill has ended (7.1)
    early_rejection     both stages at arrival: the greater load decides (7.2)
    prediction          early_rejection, with the decode load at the end of accepted prefills (7.4, system)
    request_prediction  prediction, with each request's expected output length (7.4, request)

A load is a predicted time in relation to its SLO. A request is not rejected for an SLO that it does not have.
Prompts of different lengths are rejected in proportion (`conductor.admission.headroom`).

Owns: the rules. Does not know: how a pair is chosen, messages.
"""

import math
from typing import NamedTuple, assert_never

import numpy as np

from conductor.admission.headroom import MAX_SHARE, Headroom, Terms
from conductor.settings import SLOs
from conductor.view.assignments import Assignment
from conductor.view.cluster_view import ClusterView
from conductor.view.corrections import NEAR_TBT_SLO
from conductor.view.forecast.timeline import PromptTotals
from conductor.view.instances import Instance
from conductor.view.placement import Placement
from conductor.view.rejection import Reason, Rejection
from mooncake.config.policies import Overload
from mooncake.messages.costs import tbt_margin_s
from mooncake.messages.requests import Request

PROBE_AFTER_S = 5.0
"""Seconds after which an idle instance gets a probe: a prompt whose predicted TTFT is not checked.

The seconds count from the instance's last prefill whose duration was compared with its prediction. Without
probes, predictions that reject all requests would never be corrected.
"""
_IDLE_S = 1e-6
"""The longest queue, in seconds, that counts as empty.

Rounding can leave a small rest when all prompts have ended.
"""
_SHORTEST_RETRY_S = 1.0
_DEVIATIONS = 2.0
"""The number of standard deviations by which a decode instance is assumed to exceed the mean of requests."""


class Freed(NamedTuple):
    """The work that preempting some requests would spare the instances."""

    prefill_s: float
    """Prefill seconds of preempted requests ahead of the preempting request's prompt."""
    work: PromptTotals
    """The decode work of the preempted requests."""

    def and_of(self, assignment: Assignment, *, is_ahead: bool) -> "Freed":
        """Return this work plus the work of one more assignment.

        `is_ahead`: whether that assignment's prefill goes before the prefill of the preempting request.
        """
        num_requests, num_tokens = self.work
        return Freed(
            self.prefill_s + (assignment.placement.prediction.prefill_s if is_ahead else 0.0),
            PromptTotals(num_requests + 1, num_tokens + assignment.num_tokens),
        )


NOTHING = Freed(0.0, PromptTotals(0, 0))


class Admission:
    """Checks of requests against their SLOs: at arrival, while they wait for a pair, and after prefill."""

    def __init__(self, view: ClusterView, policy: Overload) -> None:
        self._view, self._forecast, self._policy = view, view.forecast, policy
        self._headroom = Headroom()

    def check_arrival(
        self,
        request: Request,
        placement: Placement,
        slos: SLOs,
        waited_s: float,
        now_s: float,
        freed: Freed = NOTHING,
    ) -> Rejection | None:
        """Check a request before any work is done for it (Algorithm 1, line 25).

        Args:
            request: The request.
            placement: The pair that the request would get.
            slos: The limits of the request.
            waited_s: The seconds since the request's arrival.
            now_s: The time.
            freed: The work of requests that would be preempted for this request.

        Returns:
            The rejection; None if the request is expected to meet its SLOs.
        """
        prediction, num_tokens = placement.prediction, len(request.token_ids)
        queue_s = prediction.queue_s - min(freed.prefill_s, prediction.queue_s)
        prompt_s = prediction.transfer_s + prediction.prefill_s + prediction.beside_s
        if slos.ttft_s is not None and not self._is_probe(placement, now_s):
            factor = self._view.ttft_correction(placement).factor(slos.ttft_s, now_s)
            # A prompt that took longer would only fit if devices ran out of work.
            slow_prompt_s = min(factor * prompt_s, max(prompt_s, MAX_SHARE * slos.ttft_s))
            first_token_s = waited_s + factor * queue_s + slow_prompt_s
            terms, came_s = Terms(request.tenant, request.priority, slos.ttft_s), now_s - waited_s
            kept_s = self._headroom.kept_s(terms, slow_prompt_s, factor, came_s, now_s)
            late_s = first_token_s + kept_s - slos.ttft_s
            if late_s > 0:
                retry_s = max(_SHORTEST_RETRY_S, late_s)
                return Rejection(Reason.TTFT, first_token_s, slos.ttft_s, retry_s, prompt_s, kept_s)
        if slos.tbt_s is None:
            return None
        match self._policy:
            case Overload.BASELINE:
                return None
            case Overload.EARLY_REJECTION:
                tbt_s = self._tbt_now_s(num_tokens)
            case Overload.PREDICTION | Overload.REQUEST_PREDICTION:
                tbt_s = self._tbt_with_s(self._forecast.everything.less(freed.work), num_tokens)
                if self._check_mean_tbt(tbt_s, slos.tbt_s, now_s) is None:
                    return None  # at no moment is there more work than this
                known_s = min(queue_s, self._shortest_queue_s(request.priority, now_s))
                tbt_s = self._tbt_then_s(now_s + known_s, freed.work, num_tokens, now_s)
            case _:
                assert_never(self._policy)
        return self._check_mean_tbt(tbt_s, slos.tbt_s, now_s)

    def check_wait(self, slos: SLOs, waited_s: float) -> Rejection | None:
        """Check a request that has no predictions, as no pair has room for it.

        Returns:
            The rejection if the request has waited for longer than its TTFT SLO allows; else None.
        """
        if slos.ttft_s is None or waited_s <= slos.ttft_s:
            return None
        return Rejection(Reason.TTFT, waited_s, slos.ttft_s, _SHORTEST_RETRY_S)

    def learn_rejection(self, request: Request, rejection: Rejection, now_s: float) -> None:
        """Record a rejection for a TTFT SLO, so that headroom is kept for prompts of the request's length.

        Rejections for other reasons are ignored.
        """
        if rejection.reason is Reason.TTFT:
            terms = Terms(request.tenant, request.priority, rejection.slo_s)
            self._headroom.rejected(terms, rejection.prompt_s, now_s)

    def learn_refusal(self, decode: Instance, batch_size: int, tbt_s: float, now_s: float) -> None:
        """Record that a decode instance refused a request after prefill.

        `tbt_s` is the TBT in seconds that the instance predicts for `batch_size` requests.
        """
        slot = self._view.slot_of(decode.name)
        assert slot is not None
        predicted_s = self._view.decode_refused(slot, batch_size, tbt_s)
        constant_s = self._view.decode_costs.constant_s.item(slot)
        self._view.tbt_correction.learn(predicted_s, tbt_s, constant_s, now_s)

    def learn_tbt(
        self, decode: Instance, batch_size: int, tbt_s: float, tbt_slo_s: float | None, now_s: float
    ) -> None:
        """Record the TBT that the heartbeat of a decode instance predicts for all its requests.

        A TBT far below the SLO is ignored.

        Args:
            decode: The instance.
            batch_size: The number of the instance's requests, including waiting ones.
            tbt_s: The predicted TBT in seconds.
            tbt_slo_s: The strictest TBT SLO of all placed requests in seconds; None if no request has one.
            now_s: The time.
        """
        slot = self._view.slot_of(decode.name)
        assert slot is not None
        constant_s = self._view.decode_costs.constant_s.item(slot)
        if tbt_slo_s is None or tbt_s - constant_s < NEAR_TBT_SLO * (tbt_slo_s - constant_s):
            return
        if self._view.loads.batch_size[slot]:  # else all its requests were aborted after this heartbeat
            predicted_s = self._view.assigned_tbt_s(slot, batch_size)
            self._view.tbt_correction.learn(predicted_s, tbt_s, constant_s, now_s)

    def check_decode(self, decode: Instance, num_tokens: int, slos: SLOs) -> Rejection | None:
        """Return why a request whose prefill has ended is rejected; None if it is accepted.

        Only the policy `baseline` rejects at this point (section 7.1).
        """
        if self._policy is not Overload.BASELINE:
            return None
        loads, costs = self._view.loads, self._view.decode_costs
        slot = self._view.slot_of(decode.name)
        assert slot is not None
        num_others = loads.num_decoding[slot]
        if not num_others:
            return None
        num_kv_tokens = loads.num_decoding_tokens[slot] + num_tokens
        tbt_s = self._view.tbt_s(slot, num_others + 1, num_kv_tokens)
        return self._check_tbt(tbt_s, costs.constant_s.item(slot), slos.tbt_s)

    def _is_probe(self, placement: Placement, now_s: float) -> bool:
        if placement.prediction.queue_s > _IDLE_S:
            return False
        slot = self._view.slot_of(placement.prefill.name)
        assert slot is not None
        return self._view.prefill_unchecked_s(slot, now_s) > PROBE_AFTER_S

    def _check_mean_tbt(self, tbt_s: float | None, tbt_slo_s: float, now_s: float) -> Rejection | None:
        """Return why the corrected TBT of a mean decode instance misses the SLO; None if it meets the SLO."""
        if tbt_s is None:
            return None
        pool = self._view.decode_pool()
        assert pool is not None
        constant_s = pool.mean_costs.constant_s
        return self._check_tbt(
            self._view.tbt_correction.corrected_s(tbt_s, constant_s, now_s), constant_s, tbt_slo_s
        )

    def _check_tbt(self, tbt_s: float, constant_s: float, tbt_slo_s: float | None) -> Rejection | None:
        """Return why a predicted TBT plus its margin misses the SLO; None if it meets the SLO.

        `constant_s` is the part of the prediction that does not depend on the requests.
        """
        margin_s = tbt_margin_s(tbt_s, constant_s)
        if tbt_slo_s is None or tbt_s + margin_s <= tbt_slo_s:
            return None
        retry_s = max(_SHORTEST_RETRY_S, self._decode_s() * (1 - tbt_slo_s / (tbt_s + margin_s)))
        kept_s = margin_s if tbt_s <= tbt_slo_s else 0.0
        return Rejection(Reason.TBT, tbt_s, tbt_slo_s, retry_s, kept_s=kept_s)

    def _decode_s(self) -> float:
        """Return the mean seconds of a decode; `_SHORTEST_RETRY_S` while no decode has ended yet."""
        decode_s = self._forecast.decode_s
        return decode_s if decode_s < np.inf else _SHORTEST_RETRY_S

    def _tbt_now_s(self, num_tokens: int) -> float | None:
        """Return the least TBT in seconds that a decode instance would have with one more request.

        None if a decode instance is idle.
        """
        loads = self._view.loads
        (slots,) = loads.is_decode.nonzero()
        if not loads.num_decoding[slots].all():
            return None
        return min(
            self._view.tbt_s(
                slot, loads.num_decoding.item(slot) + 1, loads.num_decoding_tokens.item(slot) + num_tokens
            )
            for slot in slots.tolist()
        )

    def _next_iteration_s(self) -> float:
        """Return the mean predicted seconds of a decode iteration if each instance had one more request."""
        pool = self._view.decode_pool()
        assert pool is not None
        return float(self._view.next_iteration_s.dot(pool.members)) / pool.num_instances

    def _shortest_queue_s(self, priority: int, now_s: float) -> float:
        """Return the shortest prefill queue of all instances, in seconds, for a prompt of `priority`.

        The forecasts for all prompts look ahead to the end of this queue. All requests that will be decoded
        by then have arrived already, so the forecast is complete. A forecast up to the end of a long prompt's
        own prefill would lack later requests: long prompts would be accepted while short ones are rejected.
        """
        loads = self._view.loads
        return float(loads.queue_s(now_s, priority)[loads.is_prefill | loads.inlines].min())

    def _tbt_then_s(
        self, known_until_s: float, freed: PromptTotals, num_tokens: int, now_s: float
    ) -> float | None:
        """Predict the TBT in seconds at two moments, and return the greater one.

        The first moment is the horizon `known_until_s`. The second moment is the end of the last accepted
        prefill, but at most the duration of a mean decode after the horizon. It is left out if it is not
        later than the horizon.

        None if at each of these moments some instance decodes nothing.
        """
        forecast, iteration_s = self._forecast, self._next_iteration_s()
        times_s = [known_until_s]
        last_s = min(forecast.last_prefill_s, known_until_s + forecast.decode_s)
        if last_s > known_until_s:
            times_s.append(last_s)
        everything, tbts_s = forecast.everything.less(freed), []
        for time_s in times_s:
            work = forecast.at(time_s, now_s, iteration_s).less(freed)
            tbts_s.append(self._tbt_with_s(work, num_tokens, everything.num_requests - work.num_requests))
        return max((tbt_s for tbt_s in tbts_s if tbt_s is not None), default=None)

    def _tbt_with_s(self, work: PromptTotals, num_tokens: int, num_absent: float = 0.0) -> float | None:
        """Predict the TBT in seconds of `work` and one more request, spread over the decode instances.

        None if `work` has fewer requests than there are instances, so that some instance is idle.

        `num_absent` is the number of accepted requests that are not in `work`: they have ended by then, or
        begin later. Some instances may lack more of these requests than others. So one instance is assumed
        to have more requests than the mean, by `_DEVIATIONS`.
        """
        pool = self._view.decode_pool()
        assert pool is not None
        num_left, num_instances = work.num_requests, pool.num_instances
        if num_left < num_instances:
            return None
        variance = num_left * max(0.0, num_absent) / (num_left + num_absent) * (num_instances - 1)
        num_more = _DEVIATIONS * math.sqrt(variance) / num_instances
        num_requests = round(num_left) // num_instances + 1 + num_more
        num_kv_tokens = work.num_tokens * (1.0 / num_instances + num_more / num_left) + num_tokens
        return pool.tbt_s(num_requests, num_kv_tokens)
