"""What the view learns from the iterations of decode instances."""

import pytest
from msgspec.structs import replace

from conductor.scheduling.algorithm1 import Decoding, Scheduler
from conductor.settings import PolicySettings
from conductor.view.cluster_view import COSTS_HOLD_S, ClusterView
from conductor.view.instances import Instance
from conductor.view.placement import Placement, Prediction
from mooncake.messages.costs import Costs
from mooncake.messages.heartbeats import DecodeStats, Heartbeat, MixedIterations
from mooncake.messages.workers import Role
from tests.conductor.small_cluster import registration

PREFILL_COSTS = Costs(1e-3, 2e-5, 1e-9)
DECODE_COSTS = Costs(2e-2, 1e-4, 2e-8)
SHORT, LONG = 1_000, 50_000


def new_view() -> tuple[ClusterView, Instance, int]:
    """A view whose costs are right, and a decode instance that decodes four short prompts."""
    view = ClusterView(profiled=(PREFILL_COSTS, DECODE_COSTS))
    instance = Instance(registration("d0", Role.DECODE), b"d0#1", 0.0)
    view.add(instance, 0.0)
    slot = view.slot_of("d0")
    assert slot is not None
    for _ in range(4):
        view.loads.assign_decode(slot, SHORT)
        view.loads.begin_decode(slot, SHORT)
    return view, instance, slot


def learned(view: ClusterView, slot: int) -> Costs:
    costs = view.decode_costs
    return Costs(costs.constant_s.item(slot), costs.first_s.item(slot), costs.second_s.item(slot))


def test_a_step_is_that_of_the_decoded_requests_not_of_queued_prompts() -> None:
    view, instance, slot = new_view()
    iteration_s = DECODE_COSTS.seconds(4, 4 * SHORT)
    for num_beats in range(1, 30):
        view.loads.assign_decode(slot, LONG)
        stats = DecodeStats(10 * num_beats, 40 * num_beats, forward_s=10 * num_beats * iteration_s)
        view.learn(instance, Heartbeat(4, 0, 50, {}, decode=stats), 0.0)
    assert learned(view, slot) == pytest.approx(DECODE_COSTS)


def test_iterations_that_carried_prompts_teach_nothing_about_decode() -> None:
    view, instance, slot = new_view()
    iteration_s = DECODE_COSTS.seconds(4, 4 * SHORT)
    for num_beats in range(1, 30):
        mixed = MixedIterations(5 * num_beats, 20 * num_beats, 1.0 * num_beats, 500 * num_beats)
        pure_s = 10 * num_beats * iteration_s
        stats = DecodeStats(15 * num_beats, 60 * num_beats, pure_s + mixed.forward_s, mixed=mixed)
        view.learn(instance, Heartbeat(4, 0, 50, {}, decode=stats), 0.0)
    assert learned(view, slot) == pytest.approx(DECODE_COSTS)


def test_a_refusal_is_by_the_batch_of_the_decoded_requests() -> None:
    view, _, slot = new_view()
    view.loads.assign_decode(slot, LONG)
    predicted_s = view.decode_refused(slot, 4, DECODE_COSTS.seconds(4, 4 * SHORT))
    assert predicted_s == pytest.approx(DECODE_COSTS.seconds(4, 4 * SHORT))
    assert learned(view, slot) == pytest.approx(DECODE_COSTS)


def test_iterations_of_requests_that_have_all_ended_teach_nothing() -> None:
    view, instance, slot = new_view()
    for _ in range(4):
        view.loads.end_decode(slot, SHORT, has_begun=True)
    view.loads.assign_decode(slot, LONG)
    view.learn(instance, Heartbeat(0, 0, 50, {}, decode=DecodeStats(10, 40, forward_s=1.0)), 0.0)
    assert learned(view, slot) == DECODE_COSTS


class Instances:
    """Decode instances whose heartbeats tell of iterations."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self._now_s = 100.0
        self._stats: list[DecodeStats] = []

    def join(self, device: str = "A800") -> None:
        name = f"d{len(self._stats)}"
        joining = replace(registration(name, Role.DECODE), device=device)
        self.view.add(Instance(joining, name.encode(), self._now_s), self._now_s)
        self._stats.append(DecodeStats())

    def begin(self, slot: int) -> None:
        """A short prompt is assigned, and decoded from now on."""
        self.view.loads.assign_decode(slot, SHORT)
        self.view.loads.begin_decode(slot, SHORT)
        self.view.decode_changed(slot)

    def end(self, slot: int) -> None:
        self.view.loads.end_decode(slot, SHORT, has_begun=True)
        self.view.decode_changed(slot)

    def compute(self, slot: int, iteration_s: float, num_heartbeats: int) -> None:
        """One instance computes iterations for so many seconds, and the others nothing."""
        for _ in range(num_heartbeats):
            self._now_s += 1.0
            before = self._stats[slot]
            self._stats[slot] = DecodeStats(
                before.num_iterations + 10, before.num_tokens + 10, before.forward_s + 10 * iteration_s
            )
            for other, stats in enumerate(self._stats):
                heartbeat = Heartbeat(0, 0, 50, {}, decode=stats)
                self.view.learn(self.view.instance_at(other), heartbeat, self._now_s)

    def chosen(self) -> int:
        """The instance with the least predicted TBT of one more request."""
        found = Scheduler(self.view, PolicySettings()).select_decoding_instance(Decoding(SHORT, 1, ()))
        assert found is not None
        return found[0]


def test_an_instance_follows_its_equals_until_it_has_learned_itself() -> None:
    instances = Instances()
    instances.join()
    instances.begin(0)
    instances.compute(0, iteration_s=0.02, num_heartbeats=5)
    instances.join()
    assert learned(instances.view, 1) == learned(instances.view, 0)
    instances.compute(0, iteration_s=0.01, num_heartbeats=5)
    assert learned(instances.view, 1) == learned(instances.view, 0)
    assert instances.chosen() == 1


def slow_and_quick(slow_device: str = "A800") -> Instances:
    """An instance was slow at its only request; another one has been decoding one for 30 s since."""
    instances = Instances()
    instances.join(slow_device)
    instances.begin(0)
    instances.compute(0, iteration_s=0.1, num_heartbeats=1)
    instances.end(0)
    instances.join()
    instances.begin(1)
    instances.compute(1, iteration_s=0.01, num_heartbeats=int(COSTS_HOLD_S))
    return instances


def test_an_instance_that_was_slow_once_is_tried_again() -> None:
    instances = slow_and_quick()
    assert instances.chosen() == 1
    instances.compute(1, iteration_s=0.01, num_heartbeats=1)
    assert instances.chosen() == 0


def test_an_instance_that_is_tried_again_gets_one_request_not_all() -> None:
    instances = slow_and_quick()
    instances.compute(1, iteration_s=0.01, num_heartbeats=1)
    instances.begin(0)
    assert instances.chosen() == 1
    instances.compute(0, iteration_s=0.1, num_heartbeats=1)
    assert instances.chosen() == 1
    instances.end(0)
    assert instances.chosen() == 1, "its costs have been confirmed"


def test_a_wrong_belief_is_corrected_by_the_trial() -> None:
    instances = slow_and_quick()
    instances.compute(1, iteration_s=0.01, num_heartbeats=1)
    instances.begin(0)
    instances.compute(0, iteration_s=0.01, num_heartbeats=8)
    assert instances.view.decode_costs.predict_s(0, 1, SHORT) == pytest.approx(0.01, rel=0.1)


def test_an_instance_is_not_tried_as_one_of_another_device() -> None:
    instances = slow_and_quick(slow_device="T4")
    instances.compute(1, iteration_s=0.01, num_heartbeats=1)
    assert instances.chosen() == 1


def test_an_instance_with_requests_keeps_its_costs_however_long_it_computes_no_iteration() -> None:
    instances = slow_and_quick()
    instances.begin(0)
    before = learned(instances.view, 0)
    instances.compute(1, iteration_s=0.01, num_heartbeats=60)
    assert learned(instances.view, 0) == before
    assert instances.chosen() == 1


def test_late_inlined_prompts_say_nothing_about_pairs() -> None:
    view, instance, _ = new_view()
    prefill = Instance(registration("p0", Role.PREFILL), b"p0#1", 0.0)
    prediction = Prediction(queue_s=9.0, transfer_s=0.5, prefill_s=0.5, gap_s=0.1)
    inlined, pair = (Placement(of, instance, 0, 0, None, 0, prediction) for of in (instance, prefill))
    view.ttft_correction(inlined).learn(prediction, 0.0, 12.0, 11.0, 1.0)
    assert view.ttft_correction(inlined).factor(11.0, 1.0) == pytest.approx(1.2)
    assert view.ttft_correction(pair).factor(11.0, 1.0) == 1.0
