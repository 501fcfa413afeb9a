"""Section 7.1: the load of a stage is what is predicted in relation to the SLO."""

import pytest

from conductor.rules import Limits
from conductor.view.cluster_view import ClusterView
from conductor.view.stage_loads import decode_load, prefill_load
from mooncake.messages.costs import Costs
from mooncake.messages.workers import Role
from tests.conductor.replication.test_copies import Cluster

LIMITS = Limits(ttft_slo_s=4.0, tbt_slo_s=0.1)


@pytest.fixture
def view() -> ClusterView:
    cluster = Cluster()
    cluster.view = ClusterView(profiled=(Costs(0.0, 0.01, 0.0), Costs(0.02, 0.01, 0.0)))
    for name in ("p0", "p1"):
        cluster.add(name)
    for name in ("d0", "d1"):
        cluster.add(name, Role.DECODE)
    return cluster.view


def slot(view: ClusterView, name: str) -> int:
    found = view.slot_of(name)
    assert found is not None
    return found


def test_loads_are_means_over_the_instances_of_a_stage(view: ClusterView) -> None:
    assert (prefill_load(view, LIMITS, 0.0), decode_load(view, LIMITS)) == (0.0, 0.0)
    view.loads.assign_prefill(slot(view, "p0"), "r", 4.0)
    view.loads.order_prefill(slot(view, "p0"), "r", 30.0, 100.0)
    assert prefill_load(view, LIMITS, 102.0) == pytest.approx((2.0 + 0.0) / 2 / 4.0)
    for _ in range(3):
        view.loads.assign_decode(slot(view, "d1"), 8)
        view.loads.begin_decode(slot(view, "d1"), 8)
    view.loads.assign_decode(slot(view, "d0"), 8)
    assert decode_load(view, LIMITS) == pytest.approx((0.0 + 0.05) / 2 / 0.1), "what is decoded now"


def test_a_step_takes_what_those_in_the_batches_take(view: ClusterView) -> None:
    for name in ("d0", "d1"):
        for _ in range(4):
            view.loads.assign_decode(slot(view, name), 8)
            view.loads.begin_decode(slot(view, name), 8)
    assert view.mean_step_s() == pytest.approx(0.02 + 4 * 0.01)
    view.loads.heard_turns(slot(view, "d0"), 2)
    assert view.mean_step_s() == pytest.approx(0.02 + 3 * 0.01), "two wait for their turn"


def test_a_stage_without_an_slo_or_instances_has_no_load(view: ClusterView) -> None:
    assert prefill_load(view, Limits(), 0.0) is None
    assert decode_load(view, Limits()) is None
    assert prefill_load(ClusterView(), LIMITS, 0.0) is None
    assert decode_load(ClusterView(), LIMITS) is None
