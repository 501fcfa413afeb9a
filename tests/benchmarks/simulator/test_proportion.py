"""Short and long prompts beside each other, more than there is room for: who is served."""

import itertools

import msgspec
import numpy as np
import pytest

from benchmarks.tools.simulator.setup import simulate
from benchmarks.tools.traces.mixes import Mix, RequestClass, mixed
from tests.benchmarks.simulator.loads import SMALL

SHORT, LONG = 1_000, 12_000
MIX = Mix((RequestClass(0.8, SHORT, 20), RequestClass(0.2, LONG, 20)), ttft_slo_s=5.0, tbt_slo_s=1.0)
CAPACITY_PER_S = 6.2
SEEDS = range(4)


def served(rate_per_s: float, seconds: int) -> tuple[float, float, float]:
    """Effective requests a second; the shares of short and of long ones that are. Of several loads together:
    in one the share of the long ones is uncertain by a tenth."""
    setup = msgspec.structs.replace(
        SMALL, ttft_slo_s=MIX.ttft_slo_s, tbt_slo_s=MIX.tbt_slo_s, pool_tokens=None
    )
    is_effective, is_long = list[np.ndarray](), list[np.ndarray]()
    for seed in SEEDS:
        load = mixed(MIX, rate_per_s, 1.0, seed=seed)
        _, results = simulate(setup, itertools.takewhile(lambda request: request.arrival_s < seconds, load))
        is_effective.append((results["ttft_s"] <= MIX.ttft_slo_s) & ~(results["tbt_s"] > MIX.tbt_slo_s))
        is_long.append(results["num_input_tokens"] == LONG)
    effective, long = np.concatenate(is_effective), np.concatenate(is_long)
    goodput_per_s = float(effective.sum()) / (seconds * len(SEEDS))
    return goodput_per_s, float(effective[~long].mean()), float(effective[long].mean())


@pytest.mark.parametrize("seconds", [120, pytest.param(240, marks=pytest.mark.soak)])
def test_long_prompts_are_served_as_often_as_short_ones_at_twice_what_there_is_room_for(seconds: int) -> None:
    best_per_s, *_ = served(CAPACITY_PER_S, seconds)
    goodput_per_s, short, long = served(2 * CAPACITY_PER_S, seconds)
    assert goodput_per_s >= 0.9 * best_per_s
    assert long >= 0.9 * short
    assert short == pytest.approx(0.5, abs=0.2)  # it is an overload, and not everybody is refused
