"""Overload policies: Mooncake (arXiv), Table 3 and Figures 9 and 10."""

from pathlib import Path

import msgspec
import numpy as np

from benchmarks.reproduction.experiment import Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.pictures import Drawn, draw_load
from benchmarks.tools.simulator.series import LoadSeries
from benchmarks.tools.simulator.setup import Setup, simulate
from mooncake.config.policies import Overload

PUBLISHED = {
    Overload.BASELINE: "4,183 of 23,000",
    Overload.EARLY_REJECTION: "3,771",
    Overload.PREDICTION: "3,589",
    Overload.REQUEST_PREDICTION: None,
}
NUM_REQUESTS = 1500
PAPERS = Setup(model="llama2-70b", num_prefill=8, num_decode=8, ttft_slo_s=30.0, tbt_slo_s=0.1)
PAPERS_SPEED = 2.0
DECODE_BOUND = Setup(model="llama2-70b", num_prefill=12, num_decode=4, ttft_slo_s=30.0, tbt_slo_s=0.028)
DECODE_BOUND_SPEED = 3.0
PICTURE = "overload.svg"


def run(trace: Trace, folder: Path) -> Outcome:
    """The paper's cluster, then one in which decoding is short, with the double check after prefill, and
    also before it."""
    rows: list[list[str | float | None]] = []
    for policy, published in PUBLISHED.items():
        setup = msgspec.structs.replace(PAPERS, overload=policy)
        s = simulate(setup, trace.load(PAPERS_SPEED))[0].summary
        rows.append([policy.value, published, s.num_rejected, s.num_requests, s.num_effective])
    papers = Table(["policy", "rejected, published", "ours", "of", "effective"], rows)
    early = msgspec.structs.replace(DECODE_BOUND, checks_reservations=True)
    drawn: list[Drawn] = []
    tables = [papers, _decode_bound(DECODE_BOUND, trace, drawn), _decode_bound(early, trace, [])]
    draw_load(drawn, folder / PICTURE)
    return Outcome(tables, [PICTURE])


def _decode_bound(base: Setup, trace: Trace, drawn: list[Drawn]) -> Table:
    rows: list[list[str | float | None]] = []
    for policy in PUBLISHED:
        setup = msgspec.structs.replace(base, overload=policy)
        series = LoadSeries(setup.slos)
        load = trace.load(DECODE_BOUND_SPEED, NUM_REQUESTS)
        simulated, results = simulate(setup, load, policy.value, series)
        drawn.append(Drawn(simulated, results, series))
        wasted = (results["prefill_s"] > 0) & np.isnan(results["ttft_s"])
        prefill, decode = (_middle(series[name]) for name in ("prefill_load", "decode_load"))
        s = simulated.summary
        swings = float(prefill.std()), float(decode.std()), float(np.corrcoef(prefill, decode)[0, 1])
        rows.append([policy.value, s.num_rejected, int(wasted.sum()), s.num_effective, *swings])
    when = "also at reservation" if base.checks_reservations else "after prefill"
    header = [f"double check {when}", "rejected", "wasted prefills", "effective"]
    return Table([*header, "prefill load, std", "decode load, std", "correlation"], rows)


def _middle(load: np.ndarray) -> np.ndarray:
    """Without the beginning and the end."""
    return load[len(load) // 10 : -(len(load) // 10)]


def remark(outcome: Outcome) -> str:
    """What differs between the policies."""
    papers, late, early = outcome.tables
    rejected = [number(row[2]) for row in papers.rows]
    span = " to ".join(dict.fromkeys(f"{count:,.0f}" for count in (min(rejected), max(rejected))))
    order = "equally many with each policy" if len(set(rejected)) == 1 else "not in the published order"
    if rejected[0] > rejected[1] > rejected[2]:
        order = "in the published order"
    baseline, at_arrival, predicted, _ = late.rows
    steadier = [number(predicted[column]) / number(at_arrival[column]) for column in (4, 5)]
    best = max(late.rows, key=lambda row: number(row[3]))
    equal = len({tuple(row[1:4]) for row in early.rows[1:]}) == 1
    return (
        f"At the paper's setting {span} of {number(papers.rows[0][3]):,.0f} are rejected, {order}. The"
        " modelled"
        " decode nodes are far from a TBT of 0.1 s there, so it is the TTFT SLO that rejects. Where decoding"
        " is short the policies differ. The baseline wastes"
        f" {number(baseline[2]):.0f} prefills, early rejection {number(at_arrival[2]):.0f}, prediction"
        f" {number(predicted[2]):.0f}; rejected are {number(baseline[1]):.0f}, {number(at_arrival[1]):.0f}"
        " and"
        f" {number(predicted[1]):.0f}. With prediction the prefill load's standard deviation is"
        f" {steadier[0]:.2f} times that with early rejection, the decode load's {steadier[1]:.2f} times. Most"
        f" requests are effective with `{best[0]}` ({number(best[3]):.0f}). The correlation of both loads"
        " with early"
        f" rejection is {number(at_arrival[6]):+.2f}; in Figure 9 they swing in anti-phase. A check at"
        " reservation"
        " counts all requests that are on their way to the instance. It is stricter than any of the policies"
        " and"
        " decides before they do"
        + (", so they are equal but for the baseline, which does not use it." if equal else ".")
    )


EXPERIMENT = Experiment(
    "overload",
    "Overload policies",
    "Mooncake (arXiv), Table 3: rejected requests at twice the replay speed, 8P+8D; Figures 9 and 10: early"
    " rejection lets prefill and decode load swing in anti-phase, prediction damps that.",
    "llama2-70b, TTFT SLO 30 s. First table: the paper's 8P+8D, the whole trace"
    f" at {PAPERS_SPEED:g}x, TBT SLO 0.1 s. Second and third: {DECODE_BOUND.name}, its first"
    f" {NUM_REQUESTS:,} requests at {DECODE_BOUND_SPEED:g}x with a"
    " TBT SLO of 28 ms, so that decoding is short; in the second the decode instances check only when prefill"
    " has ended, as in the paper and in this server, in the third also when pages are reserved. A wasted"
    " prefill was computed for a request that was rejected then.",
    remark,
    run,
    cost=70,
)
