"""The offered load: how far back arrivals count, and how long answers will be."""

import random

import pytest

from conductor.elasticity.demand import Demand, OfferedLoad, Persistence

LOAD = OfferedLoad(1.0, 0.5, 100.0, 1000.0, 100.0, 20.0)


def offer(
    demand: Demand, rng: random.Random, from_s: float, until_s: float, rate_per_s: float, prefill_s: float
) -> float:
    """Poisson arrivals with exponential amounts. Returns the time of the first one after the end."""
    at_s = from_s
    while (at_s := at_s + rng.expovariate(rate_per_s)) < until_s:
        demand.arrived(1000, 100, prefill_s * rng.expovariate(1.0), at_s)
    return at_s


@pytest.mark.parametrize("seed", range(10))
def test_a_steady_load_is_averaged_over_the_whole_window(seed: int) -> None:
    demand, rng = Demand(), random.Random(seed)
    loads = []
    for second in range(200):
        offer(demand, rng, second, second + 1, 5.0, 0.2)
        load = demand.load([], second + 1.0)
        assert load is not None
        loads.append(load.prefill_s)
    assert sum(abs(prefill_s - 1.0) < 0.35 for prefill_s in loads[60:]) > 120
    assert demand.num_changes <= 3


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_step_is_seen_within_seconds(seed: int, factor: float) -> None:
    demand, rng = Demand(), random.Random(seed)
    for second in range(60):
        offer(demand, rng, second, second + 1, 8.0, 0.2)
        demand.load([], second + 1.0)
    num_before = demand.num_changes
    for second in range(60, 72):
        offer(demand, rng, second, second + 1, 8.0, 0.2 * factor)
        load = demand.load([], second + 1.0)
    assert load is not None
    assert demand.num_changes > num_before
    assert load.window_s < 20
    assert load.prefill_s == pytest.approx(1.6 * factor, rel=0.6)


@pytest.mark.parametrize("phase_s", [number / 20 for number in range(20)])
def test_a_burst_is_over_when_no_more_requests_come(phase_s: float) -> None:
    """Be it in one second of the clock or in two."""
    for wait_s in (3.0, 3.25, 3.5, 3.75, 4.0, 4.5, 5.0, 6.0, 9.0):
        demand = Demand()
        for number in range(14):
            demand.arrived(200, 100, 0.8, 10.0 + phase_s + number / 140)
        load = demand.load([], 10.0 + phase_s + wait_s)
        assert load is not None
        assert load.was_burst or not load.num_requests


@pytest.mark.parametrize("seed", range(10))
def test_a_load_that_goes_on_is_not_over(seed: int) -> None:
    demand, rng, ends = Demand(), random.Random(seed), list[bool]()
    for second in range(100, 160):
        offer(demand, rng, second, second + 1, 5.0, 0.2)
        load = demand.load([], second + 1.0)
        assert load is not None
        ends.append(load.was_burst)
    assert sum(ends[2:]) <= 3


def test_many_requests_in_a_second_are_counted_for_the_whole_window() -> None:
    demand, rng = Demand(), random.Random(1)
    for second in range(40):
        offer(demand, rng, second, second + 1, 500.0, 0.002)
        load = demand.load([], second + 1.0)
    assert load is not None
    assert load.window_s > 20
    assert load.num_requests == pytest.approx(500, rel=0.05)
    assert load.prefill_s == pytest.approx(1.0, rel=0.05)


def test_one_long_prompt_is_no_change() -> None:
    demand, rng = Demand(), random.Random(1)
    for second in range(60):
        offer(demand, rng, second, second + 1, 5.0, 0.2)
        demand.load([], second + 1.0)
    num_before = demand.num_changes
    demand.arrived(100_000, 100, 20.0, 60.5)
    demand.load([], 61.0)
    assert demand.num_changes == num_before


def test_loads_before_are_remembered_as_they_were_at_their_end() -> None:
    persistence = Persistence()
    for has_changed, rate, now_s in ((True, 1.0, 0.0), (False, 2.0, 9.0), (True, 8.0, 10.0)):
        persistence.note(LOAD._replace(num_requests=rate), has_changed, now_s)
    (past,) = persistence.past
    assert (past.load.num_requests, past.lasted_s) == (2.0, 10.0)


def test_loads_are_expected_to_last_as_long_as_the_shorter_ones_before() -> None:
    persistence = Persistence()
    assert persistence.left_s(5.0) == 55.0
    for now_s in (0.0, 10.0, 60.0, 70.0, 120.0):  # bursts of 10 s
        persistence.note(LOAD, True, now_s)
    assert persistence.left_s(4.0) == 6.0
    assert persistence.left_s(40.0) == 40.0  # it has lasted longer, and will as long again
    assert persistence.left_s(500.0) == 120.0
