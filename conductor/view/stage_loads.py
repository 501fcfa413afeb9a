"""How loaded both stages are, as Mooncake's section 7.1 defines it: what is predicted in relation to the SLO.

Owns: that definition, as means over instances. Does not know: who is rejected by it
(`conductor.admission.overload`).
"""

from conductor.rules import Limits
from conductor.view.cluster_view import ClusterView


def prefill_load(view: ClusterView, limits: Limits, now_s: float) -> float | None:
    """Of what prefill instances have queued; None without one, or without a TTFT SLO. 1 is the SLO."""
    loads = view.loads
    if limits.ttft_slo_s is None or not loads.is_prefill.any():
        return None
    return float(loads.queue_s(now_s)[loads.is_prefill].mean()) / limits.ttft_slo_s


def decode_load(view: ClusterView, limits: Limits) -> float | None:
    """Of a step with what decode instances decode now; None without one, or without a TBT SLO."""
    loads = view.loads
    slots = loads.is_decode.nonzero()[0].tolist()
    if limits.tbt_slo_s is None or not slots:
        return None
    steps_s = [
        view.decode_costs.predict_s(slot, loads.num_decoding.item(slot), loads.num_decoding_tokens.item(slot))
        for slot in slots
        if loads.num_decoding.item(slot)
    ]
    return sum(steps_s) / len(slots) / limits.tbt_slo_s
