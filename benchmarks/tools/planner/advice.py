"""The conclusion of a plan, in a sentence.

Owns: the advice. Does not know: how it was found.
"""

import math

from benchmarks.tools.planner.placements import label, num_devices_of
from benchmarks.tools.planner.search import FINE, Candidate, Plan


def advice(plan: Plan, wanted_per_s: float | None) -> str:
    """Return the advice in words for the builder of the cluster."""
    best = plan.best
    if not best.goodput_per_s or best.is_bound:
        return (
            "Nothing that these devices can be serves the workload within these SLOs, at any rate worth it."
        )
    parts = [
        f"Run {label(best.setup)}: {_value(plan, best)}{best.goodput_per_s:.3g} req/s within the SLOs"
        f" ({best.least_per_s:.3g} to {best.most_per_s:.3g} with the loads of single seeds)",
        _compared(plan),
    ]
    if wanted_per_s is not None:
        parts.append(_wanted(best, wanted_per_s))
    if plan.next_ones:
        parts.append(_next(plan))
    return "; ".join(parts) + "."


def _value(plan: Plan, candidate: Candidate) -> str:
    has_objective = plan.weights is not None and candidate.terms is not None
    return f"J = {plan.score(candidate):.4g} at " if has_objective else ""


def _compared(plan: Plan) -> str:
    ours, rival = plan.disaggregated, plan.coupled
    if ours is None:
        return "there are too few devices for two instances"
    if plan.best is rival:
        gap = f"{_value(plan, ours)}{ours.goodput_per_s:.3g} with {label(ours.setup)}"
        return f"disaggregation does not pay here ({gap})"
    if rival.is_bound or not rival.goodput_per_s:
        return "coupled instances meet these SLOs at no such rate"
    if plan.weights is not None:
        return f"the best coupled cluster ({label(rival.setup)}) has J = {plan.score(rival):.4g}"
    ratio = ours.goodput_per_s / rival.goodput_per_s
    if ratio < 1 + FINE:
        return f"{label(rival.setup)}, is as good"
    return f"{ratio:.2f} times the best coupled cluster ({label(rival.setup)}: {rival.goodput_per_s:.3g})"


def _wanted(best: Candidate, wanted_per_s: float) -> str:
    if wanted_per_s <= best.goodput_per_s:
        return f"that leaves {1 - wanted_per_s / best.goodput_per_s:.0%} to spare at {wanted_per_s:g} req/s"
    num_devices = num_devices_of(best.setup)
    needed = math.ceil(num_devices * wanted_per_s / best.goodput_per_s)
    return f"{wanted_per_s:g} req/s are more than that, and would need about {needed} devices"


def _next(plan: Plan) -> str:
    best, bigger = plan.best, max(plan.next_ones, key=plan.score)
    gain_per_s = bigger.goodput_per_s - best.goodput_per_s
    num_devices = num_devices_of(bigger.setup) - num_devices_of(best.setup)
    devices = "device" if num_devices == 1 else f"{num_devices} devices"
    if plan.weights is not None and bigger.terms is not None:
        return f"with the next {devices}, as {bigger.setup.name}, J would be {plan.score(bigger):.4g}"
    if gain_per_s <= FINE * best.goodput_per_s:
        return f"the next {devices} would bring nothing"
    if bigger.goodput_per_s <= best.most_per_s:
        return f"the next {devices} would bring no more than the loads differ"
    share = gain_per_s / best.goodput_per_s
    return f"the next {devices} would bring {gain_per_s:.2g} req/s ({share:.0%}) as {bigger.setup.name}"
