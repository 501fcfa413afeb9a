from dataclasses import replace

import numpy as np
import pytest

from benchmarks.tools.simulator.against_real import Row
from benchmarks.tools.simulator.cluster.batch import tbt_s
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.machines.costs import Profiled, PromptShare
from benchmarks.tools.simulator.cluster.machines.machine import IterationJitter, Machine
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.cluster.shape import NO_JOIN_COSTS, JoinCosts
from conductor.settings import Limits, PolicySettings
from mooncake.messages.costs import Costs
from tests.benchmarks.simulator.loads import SMALL, conversations


def test_a_measured_pass_reads_all_weights_once() -> None:
    """The constants of prefill and of decode both have the time for that."""
    costs = Profiled(Costs(0.01, 1e-3, 1e-6), Costs(0.02, 0.003, 0.0))
    shares = [PromptShare(100, 0), PromptShare(50, 200)]
    tokens_s = 150 * 1e-3 + (100 * 50 + 50 * 225) * 1e-6
    assert costs.iteration_s(shares, 0) == pytest.approx(0.01 + tokens_s)
    assert costs.iteration_s(shares, 4) == pytest.approx(0.02 + 4 * 0.003 + tokens_s)
    assert costs.iteration_s([], 4) == pytest.approx(0.02 + 4 * 0.003)


def test_prompt_tokens_have_costs_of_their_own_beside_decoding() -> None:
    costs = Profiled(Costs(0.01, 1e-3, 0.0), Costs(0.02, 0.0, 0.0), Costs(0.5, 2e-3, 0.0))
    assert costs.iteration_s([PromptShare(100, 0)], 0) == pytest.approx(0.11)
    assert costs.iteration_s([PromptShare(100, 0)], 1) == pytest.approx(0.22)


def test_instances_slow_each_other_only_while_both_compute() -> None:
    heard: list[str] = []
    machine = Machine({"p": 1.5, "d": 2.0})
    machine.on_change["d"] = lambda: heard.append("d")
    assert machine.factor("d") == 1.0
    machine.computes("p", True)
    machine.computes("p", True)
    assert (machine.factor("d"), machine.factor("p"), heard) == (2.0, 1.0, ["d"])
    machine.computes("d", True)
    assert machine.factor("p") == 1.5
    machine.computes("p", False)
    assert (machine.factor("d"), heard) == (1.0, ["d", "d"])


def test_jitter_keeps_the_mean_and_makes_the_longest_tenth_longer() -> None:
    gaps = IterationJitter(1.35, 0.02).applied([(20_000, 0.02)])
    assert np.mean([seconds for _, seconds in gaps]) == pytest.approx(0.02, rel=0.01)
    assert tbt_s(gaps) == pytest.approx(1.35 * 0.02, rel=0.01)
    assert tbt_s(IterationJitter(1.0, 0.02).applied([(1000, 0.02)])) == pytest.approx(0.02)


def test_long_gaps_vary_less_than_short_ones() -> None:
    jitter = IterationJitter(1.35, 0.02)
    short, long = ([each_s for _, each_s in jitter.applied([(20_000, gap_s)])] for gap_s in (0.02, 0.08))
    assert np.mean(long) == pytest.approx(0.08, rel=0.01)
    assert np.std(np.log(long)) == pytest.approx(np.std(np.log(short)) / 2, rel=0.05)


def simulated(
    slowdowns: tuple[float, float] | None = None,
    join_costs: JoinCosts = NO_JOIN_COSTS,
    prompt_s: float = 0.0,
) -> Results:
    shape = replace(SMALL.shape(), slowdowns=slowdowns, join_costs=join_costs, prompt_s=prompt_s)
    cluster = DisaggregatedCluster(shape, 1, 1, Limits(max_running_requests=1000), PolicySettings())
    return cluster.run(conversations(60, rate_per_s=3.0, seed=2))


def test_sharing_a_machine_costs_time_only_when_it_slows() -> None:
    alone, unslowed, slowed = (simulated(slowdowns) for slowdowns in (None, (1.0, 1.0), (1.5, 1.5)))
    assert unslowed["end_s"].max() == pytest.approx(alone["end_s"].max(), rel=1e-3)
    assert np.nanmean(slowed["tbt_s"]) > 1.05 * np.nanmean(alone["tbt_s"])
    assert np.nanmean(slowed["ttft_s"]) > np.nanmean(alone["ttft_s"])
    assert np.nanmean(slowed["tbt_s"]) < 1.5 * np.nanmean(alone["tbt_s"])


def test_a_request_that_joins_delays_the_iteration_in_which_it_joins() -> None:
    alone, joining = simulated(), simulated(join_costs=JoinCosts(constant_s=0.5))
    longest_s = np.nanmax(joining["tbt_s"] - alone["tbt_s"])
    assert np.nanmin(joining["tbt_s"] - alone["tbt_s"]) > 0
    assert longest_s > 0.4
    free = simulated(join_costs=JoinCosts(constant_s=1e-9))
    assert free["tbt_s"] == pytest.approx(alone["tbt_s"], rel=1e-3, nan_ok=True)


def test_a_prompt_takes_its_prefill_instance_longer_than_its_passes() -> None:
    """Other prompts wait for these seconds, too."""
    alone, longer = simulated(), simulated(prompt_s=0.2)
    added_s = longer["ttft_s"] - alone["ttft_s"]
    assert np.nanmin(added_s) == pytest.approx(0.2, abs=0.01)
    assert np.nanmax(added_s) > 0.3


def test_figures_agree_within_their_limit() -> None:
    assert Row("x", 100.0, 114.0, 0.15).agrees
    assert not Row("x", 100.0, 84.0, 0.15).agrees
    assert Row("x", 0.0, 0.0, 0.1).agrees
    assert not Row("x", 0.0, 3.0, 0.1).agrees
