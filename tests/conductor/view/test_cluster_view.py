"""What the view learns from the iterations of decode instances."""

import pytest

from conductor.rules import Rules
from conductor.scheduling.algorithm1 import Decoding, Scheduler
from conductor.view.cluster_view import COSTS_HOLD_S, ClusterView
from conductor.view.instances import Instance
from conductor.view.placement import Placement, Prediction
from mooncake.messages.costs import Costs
from mooncake.messages.workers import DecodeStats, Heartbeat, MixedIterations, Role
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
    step_s = DECODE_COSTS.seconds(4, 4 * SHORT)
    for num_beats in range(1, 30):
        view.loads.assign_decode(slot, LONG)
        stats = DecodeStats(10 * num_beats, 40 * num_beats, forward_s=10 * num_beats * step_s)
        view.learn(instance, Heartbeat(4, 0, 50, {}, decode=stats), 0.0)
    assert learned(view, slot) == pytest.approx(DECODE_COSTS)


def test_iterations_that_carried_prompts_teach_nothing_about_decode() -> None:
    view, instance, slot = new_view()
    step_s = DECODE_COSTS.seconds(4, 4 * SHORT)
    for num_beats in range(1, 30):
        mixed = MixedIterations(5 * num_beats, 20 * num_beats, 1.0 * num_beats, 500 * num_beats)
        pure_s = 10 * num_beats * step_s
        stats = DecodeStats(15 * num_beats, 60 * num_beats, pure_s + mixed.forward_s, mixed=mixed)
        view.learn(instance, Heartbeat(4, 0, 50, {}, decode=stats), 0.0)
    assert learned(view, slot) == pytest.approx(DECODE_COSTS)


def test_a_refusal_is_by_the_batch_of_the_decoded_requests() -> None:
    view, _, slot = new_view()
    view.loads.assign_decode(slot, LONG)
    predicted_s = view.decode_refused(slot, 4, DECODE_COSTS.seconds(4, 4 * SHORT))
    assert predicted_s == pytest.approx(DECODE_COSTS.seconds(4, 4 * SHORT))
    assert learned(view, slot) == pytest.approx(DECODE_COSTS)


def test_steps_of_requests_that_have_all_ended_teach_nothing() -> None:
    view, instance, slot = new_view()
    for _ in range(4):
        view.loads.end_decode(slot, SHORT, has_begun=True)
    view.loads.assign_decode(slot, LONG)
    view.learn(instance, Heartbeat(0, 0, 50, {}, decode=DecodeStats(10, 40, forward_s=1.0)), 0.0)
    assert learned(view, slot) == DECODE_COSTS


class TwoAlike:
    """Two equal decode instances, the second of which joins later; heartbeats tell of iterations."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self._now_s = 100.0
        self._stats: list[DecodeStats] = []
        self.join("d0")

    def join(self, name: str) -> None:
        instance = Instance(registration(name, Role.DECODE), name.encode(), self._now_s)
        self.view.add(instance, self._now_s)
        self._stats.append(DecodeStats())

    def decode(self, slot: int, iteration_s: float, num_heartbeats: int) -> None:
        """Decode a short prompt on one instance for so many seconds, and end it there."""
        self.view.loads.assign_decode(slot, SHORT)
        self.view.loads.begin_decode(slot, SHORT)
        for _ in range(num_heartbeats):
            self._now_s += 1.0
            before = self._stats[slot]
            self._stats[slot] = DecodeStats(
                before.num_iterations + 10, before.num_tokens + 10, before.forward_s + 10 * iteration_s
            )
            for other, stats in enumerate(self._stats):
                heartbeat = Heartbeat(0, 0, 50, {}, decode=stats)
                self.view.learn(self.view.instance_at(other), heartbeat, self._now_s)
        self.view.loads.end_decode(slot, SHORT, has_begun=True)

    def least_tbt_beside(self, slot: int) -> int:
        """The instance that Algorithm 1 chooses for one more request beside one on `slot`."""
        self.view.loads.assign_decode(slot, SHORT)
        self.view.decode_changed(slot)
        found = Scheduler(self.view, Rules()).select_decoding_instance(Decoding(SHORT, 1, ()))
        self.view.loads.end_decode(slot, SHORT, has_begun=False)
        assert found is not None
        return found[0]


def test_what_an_equal_instance_learns_holds_for_one_that_has_learned_nothing() -> None:
    both = TwoAlike()
    both.decode(0, iteration_s=0.02, num_heartbeats=5)
    both.join("d1")
    both.decode(0, iteration_s=0.01, num_heartbeats=5)
    assert both.least_tbt_beside(0) == 1, "it joined at a slow moment"


def test_an_instance_that_was_slow_at_its_only_request_is_tried_again() -> None:
    both = TwoAlike()
    both.join("d1")
    both.decode(1, iteration_s=0.1, num_heartbeats=1)
    both.decode(0, iteration_s=0.01, num_heartbeats=int(COSTS_HOLD_S) - 1)
    assert both.least_tbt_beside(0) == 0
    both.decode(0, iteration_s=0.01, num_heartbeats=2)
    assert both.least_tbt_beside(0) == 1


def test_late_inlined_prompts_say_nothing_about_pairs() -> None:
    view, instance, _ = new_view()
    prefill = Instance(registration("p0", Role.PREFILL), b"p0#1", 0.0)
    prediction = Prediction(queue_s=9.0, transfer_s=0.5, prefill_s=0.5, gap_s=0.1)
    inlined, pair = (Placement(of, instance, 0, 0, None, 0, prediction) for of in (instance, prefill))
    view.ttft_correction(inlined).learn(prediction, 0.0, 12.0, 11.0, 1.0)
    assert view.ttft_correction(inlined).factor(11.0, 1.0) == pytest.approx(1.2)
    assert view.ttft_correction(pair).factor(11.0, 1.0) == 1.0
