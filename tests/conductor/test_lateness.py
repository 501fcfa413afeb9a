"""How much longer queues last than predicted."""

import pytest

from conductor.lateness import MEMORY_S, MOST, Lateness
from conductor.placement import Prediction


def learned(*latest: tuple[Prediction, float]) -> float:
    lateness = Lateness()
    for prediction, ttft_s in latest:
        lateness.learn(prediction, 0.0, ttft_s, NOW_S)
    return lateness.factor(NOW_S)


NOW_S = 100.0
QUEUED = Prediction(queue_s=10.0, transfer_s=0.5, prefill_s=0.5, tbt_s=0.1)


def test_nine_of_ten_come_in_time_with_it() -> None:
    assert learned(*[(QUEUED, 11.0 + tenth) for tenth in range(10)]) == pytest.approx(1.4, abs=0.11)


def test_a_queue_that_is_quicker_than_predicted_is_taken_as_predicted() -> None:
    assert learned(*[(QUEUED, 6.0)] * 20) == 1.0


def test_a_few_say_nothing_and_nobody_says_too_much() -> None:
    assert learned(*[(QUEUED, 13.0)] * 7) == 1.0
    assert learned(*[(QUEUED, 100.0)] * 20) == MOST


def test_what_was_computed_for_longer_than_it_waited_tells_nothing() -> None:
    assert learned(*[(QUEUED._replace(queue_s=0.9), 11.0)] * 20) == 1.0


def test_what_came_later_and_went_first_was_part_of_the_queue() -> None:
    lateness = Lateness()
    for _ in range(20):
        lateness.learn(QUEUED, 2.0, 13.0, NOW_S)
    assert lateness.factor(NOW_S) == 1.0


def test_what_was_learned_in_an_overload_that_is_over_is_forgotten() -> None:
    lateness = Lateness()
    for at_s in range(20):
        lateness.learn(QUEUED, 0.0, 14.0, at_s)
    assert lateness.factor(19.0) == pytest.approx(1.3)
    assert lateness.factor(MEMORY_S + 12.0) == pytest.approx(1.3), "eight are left"
    assert lateness.factor(MEMORY_S + 12.5) == 1.0
