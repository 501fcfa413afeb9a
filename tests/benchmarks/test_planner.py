import functools
import json
import re
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from benchmarks.tools.planner.cli import run
from benchmarks.tools.planner.goodput import Bracket, Goodputs, Trial
from benchmarks.tools.planner.placements import chunked, group_sizes, neighbours
from benchmarks.tools.planner.search import FINE, Plan, Search
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.simulator.summary import Distribution, Summary
from benchmarks.tools.traces.request import TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, synthesize
from conductor.performance.model import Sizes
from conductor.performance.objective import Terms, Weights
from mooncake.cli import steps
from mooncake.errors import ConfigError

BASE = Setup(model="llama-3.1-8b", num_gpus=1, ttft_slo_s=1.0, rejects=False)
NO_TIMES = Distribution(0.0, 0.0, 0.0, 0.0)
EMPTY = Summary(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, NO_TIMES, NO_TIMES, NO_TIMES, 0.0, 0.0, 0.0, 0.0, 0.0)
NO_TERMS = Terms(0.0, 0.0, 0.0)
ATTAINMENT = 0.9
WORKLOADS = {
    "long prompts": SyntheticLoad(1.0, (3000.0,), (100.0,)),
    "long answers": SyntheticLoad(1.0, (200.0,), (300.0,)),
    "shared prefixes": SyntheticLoad(1.0, (4000.0,), (100.0,), shared_prefix_tokens=3072),
}
SIZES = {
    "long prompts": Sizes(3000, 100),
    "long answers": Sizes(200, 300),
    "shared prefixes": Sizes(4000, 100),
}
TBT_SLO_S = {"long prompts": 0.04, "long answers": 0.02, "shared prefixes": 0.04}


NUM_DEVICES, NUM_REQUESTS, NUM_SEEDS = 4, 200, 2


def at_rate(load: SyntheticLoad, rate_per_s: float, nth_seed: int = 0) -> list[TraceRequest]:
    at_rate = msgspec.structs.replace(load, rate_per_s=rate_per_s)
    return list(islice(synthesize(at_rate, nth_seed), NUM_REQUESTS))


@functools.cache
def plan_of(name: str, weights: Weights | None = None) -> Plan:
    load = WORKLOADS[name]
    base = msgspec.structs.replace(BASE, tbt_slo_s=TBT_SLO_S[name])
    goodputs = Goodputs(partial(at_rate, load), ATTAINMENT, num_seeds=NUM_SEEDS)
    return Search(goodputs, base, NUM_DEVICES, [1], SIZES[name], weights).run()


def effective_share(setup: Setup, load: SyntheticLoad, rate_per_s: float) -> float:
    """Of the requests of all seeds."""
    loads = [at_rate(load, rate_per_s, nth) for nth in range(NUM_SEEDS)]
    return fmean(simulate(setup, requests)[0].summary.effective_share for requests in loads)


@pytest.mark.parametrize(
    "name", ["long prompts", "long answers", pytest.param("shared prefixes", marks=pytest.mark.soak)]
)
def test_no_neighbour_serves_more_than_what_is_advised(name: str) -> None:
    load, advised = WORKLOADS[name], plan_of(name).disaggregated
    assert advised is not None
    assert effective_share(advised.setup, load, advised.goodput_per_s) >= ATTAINMENT
    beyond_per_s = (1 + FINE) ** 2 * advised.goodput_per_s
    for neighbour in neighbours(advised.setup):
        assert effective_share(neighbour, load, beyond_per_s) < ATTAINMENT, neighbour.name
    assert advised.least_per_s <= advised.goodput_per_s <= (1 + FINE) * advised.most_per_s


def test_no_chunk_that_fits_the_tbt_slo_serves_much_more_than_the_one_that_is_compared() -> None:
    load, rival = WORKLOADS["long prompts"], plan_of("long prompts").coupled
    chunk_sizes = [setup.chunk_tokens for setup in chunked(rival.setup)]
    assert rival.setup.chunk_tokens in chunk_sizes
    assert {64, 256} <= set(chunk_sizes)
    assert 2048 not in chunk_sizes, "one alone takes longer than the TBT SLO"
    for setup in chunked(rival.setup):
        assert effective_share(setup, load, 1.2 * rival.goodput_per_s) < ATTAINMENT, setup.name


def test_the_goodput_of_a_seed_is_below_the_least_rate_that_it_misses() -> None:
    good, bad = (msgspec.structs.replace(EMPTY, num_requests=10, num_effective=number) for number in (10, 5))
    trials = [
        Trial(2.0, (good, good), NO_TERMS),
        Trial(8.0, (bad, good), NO_TERMS),
        Trial(4.0, (bad, good), NO_TERMS),
        Trial(3.0, (good, bad), NO_TERMS),
    ]
    assert Bracket(trials=trials).by_seed(ATTAINMENT) == [3.0, 2.0]


def test_prefill_gets_the_devices_where_prompts_are_long() -> None:
    plans = [plan_of(name) for name in ("long prompts", "long answers")]
    prefills = [plan.disaggregated.setup.num_prefill for plan in plans if plan.disaggregated is not None]
    assert prefills[0] > prefills[1]


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(Weights(0.0, 1.0, 0.0), marks=pytest.mark.soak),
        pytest.param(Weights(1.0, 0.0, 0.0), marks=pytest.mark.soak),
        pytest.param(Weights(0.0, 0.0, 1.0), marks=pytest.mark.soak),
    ],
)
def test_with_weights_no_cluster_has_a_larger_objective_than_what_is_advised(weights: Weights) -> None:
    plan = plan_of("long prompts", weights)
    advised = plan.disaggregated
    assert advised is not None
    assert {of.setup for of in plan.neighbours} == set(neighbours(advised.setup))
    goodputs = Goodputs(partial(at_rate, WORKLOADS["long prompts"]), ATTAINMENT, num_seeds=NUM_SEEDS)
    for candidate in (advised, plan.coupled, *plan.neighbours):
        found = goodputs.measure(candidate.setup, candidate.goodput_per_s, FINE).terms
        assert found is not None
        assert plan.score(candidate) == pytest.approx(found.objective(weights), rel=3 * FINE)
        assert plan.score(candidate) <= plan.score(plan.best)


def test_weights_decide_which_cluster_is_best() -> None:
    by_latency, by_throughput = (
        plan_of("long prompts", weights).best.terms
        for weights in (Weights(0.0, 1.0, 0.0), Weights(0.0, 0.0, 1.0))
    )
    assert by_latency is not None
    assert by_throughput is not None
    assert by_latency.latency_s < by_throughput.latency_s
    assert by_latency.output_tokens_per_s < by_throughput.output_tokens_per_s


def test_instances_are_as_large_as_the_model_needs() -> None:
    base = Setup(model="llama3-70b", hardware="a800")
    assert group_sizes(base, 16, longest_tokens=32_768) == [4, 8]
    with pytest.raises(ConfigError, match="leave no room"):
        group_sizes(base, 1, longest_tokens=8192)
    with pytest.raises(ConfigError, match="the longest request needs"):
        group_sizes(BASE, 4, longest_tokens=10_000_000)


def test_prints_advice_and_writes_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "PERIOD_S", 0.0)
    out = tmp_path / "plan.json"
    arguments = ["--lengths", "2000/50", "--model", "llama-3.1-8b", "--gpus", "1", "--devices", "2"]
    limits = ["--ttft-slo", "2", "--tbt-slo", "0.05", "--num-requests", "60", "--rate", "1000"]
    limits += ["--device-price", "3.6"]
    assert run([*arguments, *limits, "--out", str(out)]) == 0
    seen = capsys.readouterr()
    assert re.search(r"^simulation 1: .* req/s \(\d+ s\)$", seen.err, re.MULTILINE)
    assert max(map(len, seen.out.splitlines())) <= 80
    assert "…" not in seen.out  # no heading is cut
    printed = " ".join(seen.out.split())
    report = json.loads(out.read_text())
    assert report["advice"] in printed
    assert "1000 req/s are more than that" in report["advice"]
    clusters = [report["plan"]["disaggregated"], report["plan"]["coupled"]]
    best = max(clusters, key=lambda candidate: candidate["goodput_per_s"])
    assert f"{best['goodput_per_s']:.3g} req/s" in report["advice"]
    assert report["price"] == {"of_device_hour": 3.6, "tokens_per_request": 2050.0}
    cost = 1e6 * 2 * 0.001 / (best["goodput_per_s"] * 2050)  # two devices at a thousandth a second
    assert f"{cost:.3g} with {best['setup']['num_coupled']} coupled, chunks of" in printed


def test_prints_the_objective_and_its_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    arguments = ["--lengths", "2000/50", "--model", "llama-3.1-8b", "--gpus", "1", "--devices", "2"]
    limits = ["--ttft-slo", "2", "--tbt-slo", "0.05", "--num-requests", "60", "--seeds", "1"]
    assert run([*arguments, *limits, "--weights", "1", "0.5", "0.001", "--out", str(out)]) == 0
    seen = capsys.readouterr().out
    assert max(map(len, seen.splitlines())) <= 80
    for name in ("J = 1 U_avg - 0.5 T_avg-latency + 0.001 Theta", "U_avg", "latency", "tokens/s"):
        assert name in seen
    assert "…" not in seen  # no heading is cut
    plan = json.loads(out.read_text())["plan"]

    def objective(candidate: dict[str, Any]) -> float:
        terms = Terms(**candidate["terms"])
        return terms.objective(Weights(1.0, 0.5, 0.001))

    best = max((plan["disaggregated"], plan["coupled"]), key=objective)
    assert f"J = {objective(best):.4g} at {best['goodput_per_s']:.3g} req/s within" in " ".join(seen.split())
    rows = re.findall(r"^(?:1P\+1D|2 coupled).*", seen, re.MULTILINE)
    assert f"{objective(best):.4g}" in rows[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lengths", "100/10", "--devices", "2", "--weights", "0", "0", "0"],
            "at least one must be above 0",
        ),
        (["--lengths", "100/10", "--devices", "2", "--model", "lama3-70b"], "did you mean llama3-70b"),
        (["--lengths", "100/10", "--devices", "1"], "leave no room for KVCache"),
        (["--lengths", "100/10", "--devices", "8", "--tbt-slo", "0.001"], "no request can meet a TBT SLO"),
        (["--lengths", "100/10", "--devices", "8", "--gpus", "16"], "less than one instance needs"),
        (["--lengths", "100/10", "--devices", "8", "--profile", "x.json"], "of one kind of instance"),
    ],
)
def test_refuses_what_cannot_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--ttft-slo", "1"] + ([] if "--tbt-slo" in arguments else ["--tbt-slo", "0.1"])
    assert run([*arguments, *limits]) == 2
    assert message in capsys.readouterr().err
