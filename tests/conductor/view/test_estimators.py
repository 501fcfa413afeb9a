"""Costs that are learned while they happen."""

import numpy as np
import pytest

from conductor.view.estimators import (
    DECODE_DOUBT,
    GENERIC_DECODE_COSTS,
    GENERIC_PREFILL_COSTS,
    PREFILL_DOUBT,
    CostEstimator,
)
from mooncake.messages.costs import Costs, prefill_quantities

TRUE = Costs(0.01, 6e-4, 1e-7)
"""The costs of a CPU: 30 times the generic ones."""


class Machine:
    """Prefills of random sizes with noise of 10%."""

    def __init__(self, costs: Costs = TRUE) -> None:
        self.costs = costs
        self._random = np.random.default_rng(5)

    def prefill(self, longest: int = 2000) -> tuple[float, float, float]:
        new, cached = self._random.integers(10, longest), self._random.integers(0, longest)
        quantities = prefill_quantities(float(new), float(cached))
        return *quantities, self.costs.seconds(*quantities) * self._random.uniform(0.9, 1.1)


def error(estimator: CostEstimator, costs: Costs, new: int, cached: int, slot: int = 0) -> float:
    quantities = prefill_quantities(new, cached)
    return estimator.predict_s(slot, *quantities) / costs.seconds(*quantities) - 1


def generic() -> CostEstimator:
    estimator = CostEstimator(GENERIC_PREFILL_COSTS, PREFILL_DOUBT, is_profiled=False)
    estimator.reset(0)
    return estimator


def test_what_takes_no_time_at_all_leaves_something_to_predict() -> None:
    estimator = generic()
    least_s = 0.999e-3 * GENERIC_PREFILL_COSTS.seconds(100.0, 5000.0)
    for _ in range(100):
        estimator.learn(0, 100.0, 5000.0, 0.0)
        assert estimator.predict_s(0, 100.0, 5000.0) >= least_s


def test_the_shape_is_learned_from_nothing() -> None:
    estimator, machine = generic(), Machine()
    for _ in range(300):
        estimator.learn(0, *machine.prefill())
    for new, cached in ((50, 0), (500, 1500), (2000, 0), (1000, 1000)):
        assert abs(error(estimator, TRUE, new, cached)) < 0.1


def test_one_prefill_is_enough_for_the_scale() -> None:
    estimator = generic()
    quantities = prefill_quantities(200, 0)
    estimator.learn(0, *quantities, TRUE.seconds(*quantities))
    assert abs(error(estimator, TRUE, 200, 0)) < 0.01
    assert abs(error(estimator, TRUE, 2000, 0)) < 0.6


def test_a_profile_is_believed_more_than_one_observation() -> None:
    estimator = CostEstimator(TRUE, PREFILL_DOUBT, is_profiled=True)
    estimator.reset(0)
    quantities = prefill_quantities(200, 0)
    estimator.learn(0, *quantities, 20 * TRUE.seconds(*quantities))
    assert error(estimator, TRUE, 200, 0) < 2.5


def test_outliers_do_little() -> None:
    estimator, machine = generic(), Machine()
    for number in range(300):
        first, second, seconds = machine.prefill()
        estimator.learn(0, first, second, seconds * (10 if number % 20 == 10 else 1))
    for new, cached in ((100, 0), (1000, 1000)):
        assert abs(error(estimator, TRUE, new, cached)) < 0.2


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_machine_that_changes_is_followed(factor: float) -> None:
    estimator, machine = generic(), Machine()
    for _ in range(200):
        estimator.learn(0, *machine.prefill())
    machine.costs = Costs(*(factor * cost for cost in TRUE))
    for _ in range(12):
        estimator.learn(0, *machine.prefill())
    for new, cached in ((100, 0), (1000, 1000)):
        assert abs(error(estimator, machine.costs, new, cached)) < 0.25


def test_no_cost_ever_becomes_negative() -> None:
    estimator = generic()
    for number in range(500):
        # The longer, the quicker: no polynomial of ours.
        estimator.learn(0, *prefill_quantities(10 + number, number), 1.0 / (1 + number))
        assert min(estimator.constant_s[0], estimator.first_s[0], estimator.second_s[0]) > 0


def test_instances_are_learned_apart_and_forgotten_with_their_slot() -> None:
    estimator, machine = generic(), Machine()
    estimator.reset(1)
    for _ in range(100):
        estimator.learn(0, *machine.prefill())
    assert abs(error(estimator, TRUE, 500, 0, slot=0)) < 0.1
    assert abs(error(estimator, GENERIC_PREFILL_COSTS, 500, 0, slot=1)) < 0.01
    estimator.reset(0)
    assert abs(error(estimator, GENERIC_PREFILL_COSTS, 500, 0, slot=0)) < 0.01


def test_what_a_request_adds_to_a_step_is_learned_while_the_batch_grows() -> None:
    """Too low an estimate of it would let in, before the batch is large, what it cannot bear."""
    estimator = CostEstimator(GENERIC_DECODE_COSTS, DECODE_DOUBT, is_profiled=False)
    estimator.reset(0)
    steps = Costs(0.02, 0.001, 1e-8)
    for batch_size in range(2, 22, 2):
        quantities = float(batch_size), 500.0 * batch_size
        estimator.learn(0, *quantities, steps.seconds(*quantities))
    for batch_size in (20, 40):
        quantities = float(batch_size), 500.0 * batch_size
        assert estimator.predict_s(0, *quantities) == pytest.approx(steps.seconds(*quantities), rel=0.05)
