"""The planner's advice for three workloads, and the goodput of neighbouring clusters.

The planner is DistServe's placement search on our simulator.
"""

from functools import partial
from pathlib import Path

import msgspec

from benchmarks.reproduction.experiment import SEED, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.planner import workload as workloads
from benchmarks.tools.planner.goodput import Goodputs
from benchmarks.tools.planner.search import FINE, Candidate, Search
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.synthetic import SyntheticLoad

BASE = Setup(model="llama-3.1-8b", num_gpus=1, rejects=False)
NUM_DEVICES = 6
MOST_REQUESTS = 500
NUM_SEEDS = 3
ATTAINMENT = 0.9
WORKLOADS = {
    "4,000 in, 200 out": (SyntheticLoad(1.0, (4000.0,), (200.0,)), 2.0, 0.05),
    "500 in, 400 out": (SyntheticLoad(1.0, (500.0,), (400.0,)), 1.0, 0.025),
    "6,000 in, 4,608 of them shared, 300 out": (
        SyntheticLoad(1.0, (6000.0,), (300.0,), shared_prefix_tokens=4608),
        2.0,
        0.05,
    ),
}


def run(trace: Trace, folder: Path) -> Outcome:
    """Plan for each workload. The table has one row for each."""
    rows: list[list[str | float | None]] = []
    for name, (synthetic, ttft_slo_s, tbt_slo_s) in WORKLOADS.items():
        base = msgspec.structs.replace(BASE, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s)
        workload = workloads.of_synthetic(synthetic, SEED, MOST_REQUESTS)
        load = partial(workload.at, slos=base.slos, most_requests=MOST_REQUESTS)
        goodputs = Goodputs(load, ATTAINMENT, num_seeds=NUM_SEEDS)
        plan = Search(goodputs, base, NUM_DEVICES, [1], workload.sizes).run()
        advised = plan.disaggregated
        assert advised is not None
        slos = f"{ttft_slo_s:g} s, {1000 * tbt_slo_s:g} ms"
        nearby = max(plan.neighbours, key=lambda candidate: candidate.goodput_per_s)
        rows.append(
            [name, slos, *_shown(advised), *_shown(nearby), *_shown(plan.coupled), plan.num_simulations]
        )
    header = ["workload", "TTFT, TBT SLO"]
    for name in ("best disaggregated", "best neighbour", "best coupled"):
        header += [name, "req/s", "by seed"]
    header += ["simulations"]
    return Outcome([Table(header, rows)])


def _shown(candidate: Candidate) -> tuple[str, float, str]:
    by_seed = f"{candidate.least_per_s:.3g} to {candidate.most_per_s:.3g}"
    return candidate.setup.name, candidate.goodput_per_s, by_seed


def remark(outcome: Outcome) -> str:
    """Return the remark that says whether the simulations confirm the advice."""
    rows = outcome.tables[0].rows
    wrong = [str(row[0]) for row in rows if number(row[6]) > (1 + FINE) * number(row[3])]
    better = [str(row[0]) for row in rows if number(row[3]) > number(row[9])]
    confirmed = (
        f"Not confirmed: a neighbour serves more for {'; '.join(wrong)}"
        if wrong
        else "Confirmed: no neighbour serves more than the best division"
    )
    return f"{confirmed}. Disaggregation pays for {len(better)} of {len(rows)} workloads."


EXPERIMENT = Experiment(
    "planner",
    "What the planner advises",
    "DistServe's placement search; whether disaggregation pays depends on the workload.",
    f"{BASE.model}, {NUM_DEVICES} A800, one an instance. Goodput: the rate up to which {ATTAINMENT:.0%} of"
    f" the requests of {NUM_SEEDS} loads together are within both SLOs, to {FINE:.0%}; by seed: each load by"
    " itself. Coupled instances compute whole prompts, or chunks of the best size. The neighbours have one"
    " instance in the other role.",
    remark,
    run,
    cost=78,
)
