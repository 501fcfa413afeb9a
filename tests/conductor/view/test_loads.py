"""Which prompt of a prefill instance's queue is believed to be computed, as workers order them."""

import numpy as np
import pytest

from conductor.view.loads import Loads
from mooncake.messages.aging import AGING_S
from mooncake.messages.workers import Role

SLOT = 0


@pytest.fixture
def loads() -> Loads:
    loads = Loads()
    loads.reset(SLOT, Role.PREFILL, 100)
    return loads


DECODES = np.ones(1)


def order(loads: Loads, request_id: str, now_s: float, due_s: float = 30.0, priority: int = 0) -> None:
    loads.assign_prefill(SLOT, request_id, 2.0, priority)
    loads.order_prefill(SLOT, request_id, now_s + due_s, now_s)


def test_what_came_first_is_computed_first(loads: Loads) -> None:
    order(loads, "a", 100.0)
    order(loads, "b", 100.0)
    assert (loads.has_begun(SLOT, "a"), loads.has_begun(SLOT, "b")) == (True, False)
    assert loads.queue_s(101.5)[SLOT] == pytest.approx(2.5)
    assert loads.end_prefill(SLOT, "a", 103.0) == 3.0
    assert loads.has_begun(SLOT, "b")
    assert loads.end_prefill(SLOT, "b", 104.0) == 1.0
    assert loads.queue_s(105.0)[SLOT] == 0.0


def test_an_earlier_deadline_goes_first_and_what_it_interrupts_has_begun_all_the_same(loads: Loads) -> None:
    order(loads, "patient", 100.0)
    order(loads, "urgent", 101.5, due_s=1.0)
    assert loads.has_begun(SLOT, "urgent")
    assert loads.has_begun(SLOT, "patient"), "it may not be displaced"
    assert loads.queue_s(101.5)[SLOT] == pytest.approx(2.5), "what had been done stays done"
    assert loads.queue_s(102.5)[SLOT] == pytest.approx(1.5)
    assert loads.end_prefill(SLOT, "urgent", 103.5) is None, "a part of that was the other one's"
    assert loads.queue_s(103.5)[SLOT] == pytest.approx(0.5)
    assert loads.end_prefill(SLOT, "patient", 104.0) is None
    assert loads.queue_s(104.0)[SLOT] == 0.0


def test_what_stands_behind_by_its_class_has_not_begun(loads: Loads) -> None:
    order(loads, "first", 100.0, priority=1)
    order(loads, "second", 100.0, priority=1)
    order(loads, "third", 100.0, due_s=30.0 + AGING_S / 2)
    assert [loads.has_begun(SLOT, name) for name in ("first", "second", "third")] == [True, False, True]
    loads.end_prefill(SLOT, "third", 101.0, was_computed=False)
    assert loads.has_begun(SLOT, "first")
    assert not loads.has_begun(SLOT, "second")


def test_what_stands_behind_a_prompt_that_is_not_wanted_any_more_begins_then(loads: Loads) -> None:
    order(loads, "dropped", 100.0)
    order(loads, "next", 100.0)
    order(loads, "never begun", 100.0)
    assert loads.end_prefill(SLOT, "dropped", 101.5, was_computed=False) is None
    assert loads.queue_s(102.0)[SLOT] == pytest.approx(3.5), "half a second of the next one is over"
    assert loads.end_prefill(SLOT, "never begun", 102.5, was_computed=False) is None
    assert loads.queue_s(102.5)[SLOT] == pytest.approx(1.0)
    assert loads.end_prefill(SLOT, "next", 103.5) == 2.0


def test_a_request_that_waits_for_its_turn_is_in_no_batch() -> None:
    loads = Loads()
    loads.reset(SLOT, Role.DECODE, 100, max_batch=4)
    for _ in range(4):
        loads.assign_decode(SLOT, 8)
        loads.begin_decode(SLOT, 8)
    assert loads.share_in_batches(DECODES) == 1.0
    loads.set_awaiting_turn(SLOT, 1)
    assert loads.share_in_batches(DECODES) == pytest.approx(3 / 4)
    loads.assign_decode(SLOT, 8)
    loads.begin_decode(SLOT, 8)
    assert loads.share_in_batches(DECODES) == pytest.approx(3 / 5), "it stands behind the other one"
    for num_left in (4, 3):
        loads.end_decode(SLOT, 8, has_begun=True)
        assert loads.share_in_batches(DECODES) == pytest.approx(3 / num_left), "somebody takes its place"
    loads.set_awaiting_turn(SLOT, 5)
    assert loads.share_in_batches(DECODES) == 0.0, "what it said had been before two of them ended"
    for _ in range(3):
        loads.end_decode(SLOT, 8, has_begun=True)
    assert loads.share_in_batches(DECODES) == 1.0
    assert loads.num_awaiting_turn[SLOT] == 0
