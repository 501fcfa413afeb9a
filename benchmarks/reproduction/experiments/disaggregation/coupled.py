"""Disaggregated and coupled clusters: Mooncake, section 8.1.3 (arXiv), and effective capacity (FAST'25)."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.reproduction.experiment import SWEEP_REQUESTS, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.pictures import Drawn, draw_latencies
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.simulator.summary import SLOs, summarize

TTFT_SLO_S = 30.0
CHUNK = 2048
SPEEDS = (1.0, 2.0, 3.0, 4.0, 6.0)
ATTAINMENT = 0.9
"""The share of requests that must be effective for a cluster to count as good enough."""
PUBLISHED_GAINS = {0.1: 498, 0.2: 157, 0.3: 59}


def systems(num_nodes: int, model: str) -> list[Setup]:
    """Return the systems that are compared. All have the same number of nodes."""
    half = num_nodes // 2
    base = Setup(model=model, ttft_slo_s=TTFT_SLO_S, rejects=False)
    return [
        msgspec.structs.replace(base, num_prefill=half, num_decode=num_nodes - half),
        msgspec.structs.replace(base, num_coupled=num_nodes),
        msgspec.structs.replace(base, num_coupled=num_nodes, chunk_tokens=CHUNK),
    ]


def run_real_workload(trace: Trace, folder: Path) -> Outcome:
    """Simulate each system at the trace's own speed. The table has one row for each."""
    slos = SLOs(TTFT_SLO_S, 0.1)
    drawn, rows = [], []
    for setup, published in zip(systems(20, "llama2-70b"), (1.0, 0.57, None), strict=True):
        simulated, results = simulate(setup, trace.load())
        drawn.append(Drawn(simulated, results, None))
        s = summarize(results, slos)
        shares = s.tbt_attainment, s.ttft_attainment, s.effective_share
        rows.append([setup.name, published, *shares, s.tbt_s.p90, s.ttft_s.p90])
    picture = "coupled_latencies.svg"
    draw_latencies(drawn, slos, folder / picture)
    header = [
        "cluster",
        "TBT within 0.1 s, published",
        "ours",
        "TTFT within 30 s",
        "both",
        "TBT p90, s",
        "TTFT p90, s",
    ]
    return Outcome([Table(header, rows)], [picture])


def run_capacity(trace: Trace, folder: Path) -> Outcome:
    """Find the rate up to which enough requests are effective, by cluster and TBT SLO."""
    setups = systems(16, "llama3-70b")
    sweeps = [_sweep(setup, trace) for setup in setups]
    rows: list[list[str | float | None]] = []
    for tbt_slo_s, published in PUBLISHED_GAINS.items():
        capacities = [capacity_per_s(sweep, SLOs(TTFT_SLO_S, tbt_slo_s)) for sweep in sweeps]
        ours, whole, chunked = capacities
        rows.append(
            [
                f"{1000 * tbt_slo_s:.0f} ms",
                *capacities,
                f"+{published}%",
                _gain(ours, whole),
                _gain(ours, chunked),
            ]
        )
    header = ["TBT SLO", *(f"{setup.name}, req/s" for setup in setups)]
    header += ["gain, published", "ours, whole prompts", "ours, chunks"]
    return Outcome([Table(header, rows), _prefill_time(setups, sweeps)])


def _prefill_time(setups: Sequence[Setup], sweeps: Sequence[Sequence[tuple[float, Results]]]) -> Table:
    """Return the table of the GPU time of prefills at the trace's own speed.

    Clusters with chunked prefill are left out, as their iterations are not prefills alone.
    """
    ours_s, whole_s = (float(sweep[0][1]["prefill_s"].mean()) for sweep in sweeps[:2])
    ratio = f"{100 * (ours_s / whole_s - 1):+.0f}%"
    header = ["", *(setup.name for setup in setups[:2]), "difference, published", "ours"]
    return Table(header, [["prefill GPU time a request, s", ours_s, whole_s, "-36%", ratio]])


def _gain(ours: float, rivals: float) -> str:
    return f"{100 * (ours / rivals - 1):+.0f}%" if rivals else "the rival serves no load"


def _sweep(setup: Setup, trace: Trace) -> list[tuple[float, Results]]:
    """Return pairs of offered requests a second and results, with growing speed.

    The sweep ends at the first speed at which less than half of the requests are served.
    """
    sweep: list[tuple[float, Results]] = []
    for speed in SPEEDS:
        simulated, results = simulate(setup, trace.load(speed, SWEEP_REQUESTS))
        sweep.append((simulated.rate_per_s, results))
        if summarize(results, SLOs(TTFT_SLO_S, max(PUBLISHED_GAINS))).effective_share < 0.5:
            break
    return sweep


def capacity_per_s(sweep: Sequence[tuple[float, Results]], slos: SLOs) -> float:
    """Return the rate at which the share of effective requests falls below `ATTAINMENT`.

    The rate is interpolated between the measured rates. Below the lowest measured rate, the share is taken to
    fall linearly from 1 at rate 0. If the share never falls so low, the highest measured rate is returned.
    """
    rates = [0.0, *(rate for rate, _ in sweep)]
    shares = [1.0, *(summarize(results, slos).effective_share for _, results in sweep)]
    below = next((index for index, share in enumerate(shares) if share < ATTAINMENT), None)
    if below is None:
        return rates[-1]
    span = slice(below - 1, below + 1)
    return float(np.interp(-ATTAINMENT, [-share for share in shares[span]], rates[span]))


def real_workload_remark(outcome: Outcome) -> str:
    """Return the remark that says which system wins."""
    ours, whole, chunked = outcome.tables[0].rows
    wins = number(ours[2]) > max(number(whole[2]), number(chunked[2]))
    return (
        f"{'The same winner' if wins else 'Not the same winner'}, and TTFT alike, as published. The coupled"
        f" cluster loses less here than there ({number(whole[2]):.0%} within 0.1 s, not 57%): the modelled"
        " nodes"
        " compute prompts faster, so a running request is held up less often and for less long. With chunks"
        " it is"
        f" {number(chunked[2]):.0%}: one of {CHUNK:,} tokens takes longer than 0.1 s. Within both SLOs are"
        f" {number(ours[4]) / number(whole[4]) - 1:+.0%} requests (published +75%)."
    )


def capacity_remark(outcome: Outcome) -> str:
    """Return the remark about the decline of the gain."""
    rows = outcome.tables[0].rows
    gains = [number(row[1]) / number(row[2]) for row in rows]
    falls = gains == sorted(gains, reverse=True)
    shown = ", ".join(f"{100 * (gain - 1):+.0f}% at {row[0]}" for row, gain in zip(rows, gains, strict=True))
    return (
        f"{'As published' if falls else 'Not quite as published'}, the gain over whole prompts is largest"
        " with"
        f" the tightest SLO ({shown}). It is smaller than published at each. With equal halves the eight"
        " prefill"
        " nodes are what is short (TTFT), while the modelled decode nodes have time to spare; the coupled"
        " cluster"
        " uses all sixteen for prompts. Where more nodes prefill the picture is better (see the division of"
        " nodes"
        " below). Prefill takes less GPU time than in coupled instances, each of which has a prefix cache of"
        " its own, as published."
    )


REAL_WORKLOAD = Experiment(
    "coupled",
    "10P+10D against 20 coupled instances",
    "Mooncake (arXiv), section 8.1.3 and Figure 13: about 100% of TBT within 0.1 s against 57%; TTFT alike.",
    "llama2-70b on A800 nodes; coupled instances compute whole prompts, as the published rival did,"
    " or chunks of"
    f" {CHUNK:,} tokens.",
    real_workload_remark,
    run_real_workload,
    cost=24,
)
CAPACITY = Experiment(
    "capacity",
    "Effective capacity by TBT SLO",
    "Mooncake (FAST'25): effective request capacity against vLLM on the conversation trace.",
    f"16 nodes; the first {SWEEP_REQUESTS:,} requests at growing speed, nothing rejected. Capacity:"
    " the rate up to"
    f" which {ATTAINMENT:.0%} of the requests are effective (TTFT within 30 s and TBT within the"
    " SLO), interpolated.",
    capacity_remark,
    run_capacity,
    cost=12,
)
