"""The offered load: how far back arrivals count, and how long answers will be."""

import random

import pytest

from conductor.elasticity.demand import AnswerLengths, Demand, Kind, Running


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


def test_one_long_prompt_is_no_change() -> None:
    demand, rng = Demand(), random.Random(1)
    for second in range(60):
        offer(demand, rng, second, second + 1, 5.0, 0.2)
        demand.load([], second + 1.0)
    num_before = demand.num_changes
    demand.arrived(100_000, 100, 20.0, 60.5)
    demand.load([], 61.0)
    assert demand.num_changes == num_before


def test_answers_of_a_kind_are_as_long_as_those_before() -> None:
    lengths, chat, summary = AnswerLengths(), Kind.of(200, 2048), Kind.of(8000, 2048)
    for _ in range(10):
        lengths.learn(chat, 800)
        lengths.learn(summary, 50)
    means = lengths.means([chat, summary, Kind.of(1, 1)], [])
    assert means[chat] == 800
    assert means[summary] == 50


def test_answers_that_are_still_decoded_count_beyond_what_is_known() -> None:
    lengths, kind = AnswerLengths(), Kind.of(200, 2048)
    for _ in range(4):
        lengths.learn(kind, 100)
    assert lengths.means([kind], [Running(kind, 50.0)])[kind] == 100
    assert lengths.means([kind], [Running(kind, 500.0)] * 2)[kind] == 300


def test_no_answer_is_expected_to_be_longer_than_its_limit() -> None:
    lengths, kind = AnswerLengths(), Kind.of(200, 10)
    for _ in range(4):
        lengths.learn(Kind.of(200, 4000), 4000)
    assert lengths.means([kind], [])[kind] <= 16
