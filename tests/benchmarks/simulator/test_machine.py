from dataclasses import replace

import numpy as np
import pytest

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.simulator.against_real import Row
from benchmarks.tools.simulator.calibration import BUSY_LOOPS, LONG, LOOPS, SHORT, calibrated
from benchmarks.tools.simulator.cluster.batch import tbt_s
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.machines.machine import IterationJitter, Machine
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.cluster.shape import NO_JOIN_COSTS, JoinCosts
from conductor.settings import Limits, PolicySettings
from mooncake.messages.costs import Costs, prefill_quantities
from tests.benchmarks.simulator.loads import SMALL, conversations

PREFILL, DECODE = Costs(0.01, 1e-3, 0.0), Costs(0.02, 0.0, 0.0)


def looped(name: str, ttft_s: float, gap_s: float, each_s: float) -> list[Outcome]:
    """A loop in which a first token leaves every `each_s`."""
    loop = LOOPS[name]
    answered_s = ttft_s + gap_s * (loop.num_output_tokens - 1)
    return [
        Outcome(
            number=n,
            kind=Kind.FINISHED,
            scheduled_s=n * each_s,
            num_input_tokens=loop.num_input_tokens,
            lag_s=0.0,
            answered_s=answered_s,
            ttft_s=ttft_s,
            tbt_s=1.3 * gap_s,
            num_output_tokens=loop.num_output_tokens,
        )
        for n in range(loop.num_requests)
    ]


def test_calibration_finds_what_the_profile_does_not_know() -> None:
    """A server that is a tenth slower, takes 50 ms more for a first token, and longer when busy; each request
    that joins takes 4 ms and 10 us a token, and each prompt takes its instance 20 ms of the 50."""
    decode = DECODE._replace(constant_s=0.08)

    def ttft_s(name: str) -> float:
        num_tokens = LOOPS[name].num_input_tokens
        num_passes = -(-num_tokens // 512)
        once_s = PREFILL.seconds(*prefill_quantities(num_tokens, 0)) + (num_passes - 1) * PREFILL.constant_s
        return 0.05 + 1.1 * once_s

    gap_s = 1.2 * decode.constant_s

    def busy(name: str) -> list[Outcome]:
        each_s = 0.02 + 1.4 * (ttft_s(name) - 0.05)  # somebody is always decoded meanwhile
        join_s = 0.004 + 1e-5 * LOOPS[name].num_input_tokens
        return looped(name, 2.0, 1.25 * gap_s / (1 - join_s / each_s), each_s)

    found = calibrated(
        (PREFILL, decode),
        {
            SHORT: looped(SHORT, ttft_s(SHORT), gap_s, 1.0),
            LONG: looped(LONG, ttft_s(LONG), gap_s, 3.0),
            **{name: busy(name) for name in BUSY_LOOPS},
        },
    )
    assert found.prefill_factor == pytest.approx(1.1)
    assert found.decode_factor == pytest.approx(1.2)
    assert (found.first_token_s, found.prompt_s) == pytest.approx((0.03, 0.02))
    assert found.slowdowns == pytest.approx((1.4, 1.25))
    assert found.join_costs == pytest.approx((0.004, 1e-5))
    assert found.longest_mean == pytest.approx(1.3)
    assert found.costs.profiled == (PREFILL, decode)
    assert found.costs.kv_token_s == 1.2 * decode.second_s


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
    gaps = IterationJitter(1.35).applied([(20_000, 0.02)])
    assert np.mean([seconds for _, seconds in gaps]) == pytest.approx(0.02, rel=0.01)
    assert tbt_s(gaps) == pytest.approx(1.35 * 0.02, rel=0.01)
    assert tbt_s(IterationJitter(1.0).applied([(1000, 0.02)])) == pytest.approx(0.02)


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
