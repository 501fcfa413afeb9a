"""The overload policies: Mooncake (arXiv), Table 3 and Figures 9 and 10."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import NormalDist, fmean

import msgspec
import numpy as np

from benchmarks.reproduction.experiment import SEED, Cell, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.pictures import Drawn, draw_load
from benchmarks.tools.simulator.series import LoadSeries
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.simulator.summary import Summary
from benchmarks.tools.traces.request import TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, Values, synthesize
from mooncake.config.policies import Overload

PUBLISHED = {
    Overload.BASELINE: "4,183 of 23,000",
    Overload.EARLY_REJECTION: "3,771",
    Overload.PREDICTION: "3,589",
    Overload.REQUEST_PREDICTION: None,
}
PAPERS = Setup(model="llama2-70b", num_prefill=8, num_decode=8, ttft_slo_s=30.0, tbt_slo_s=0.1)
PAPERS_SPEED = 2.0
DECODE_BOUND = Setup(model="llama2-70b", num_prefill=12, num_decode=4, ttft_slo_s=30.0, tbt_slo_s=0.028)
BOTH_BOUND = msgspec.structs.replace(DECODE_BOUND, num_prefill=8)
SPEED = 3.0
NUM_REQUESTS = 1500
SEEDS = (SEED, SEED + 1, SEED + 2)
PICTURE = "overload.svg"
MAX_WAITING = (0, 16, 128)
"""The lengths of the queue of deferred requests. The last one is so large that the queue is never full."""


def _lognormal(median: float, sigma: float, least: float, most: float) -> Values:
    quantiles = [NormalDist().inv_cdf((nth + 0.5) / 64) for nth in range(64)]
    return tuple(min(most, max(least, median * math.exp(sigma * quantile))) for quantile in quantiles)


CHATS = SyntheticLoad(
    rate_per_s=28.0,
    burstiness=1.5,
    first_input_tokens=_lognormal(3000, 0.9, 200, 30_000),
    output_tokens=_lognormal(300, 0.8, 10, 2000),
    follow_up_share=0.3,
    turn_gap_s=(20.0, 60.0, 120.0),
    added_input_tokens=_lognormal(500, 0.7, 20, 4000),
)


def run(trace: Trace, folder: Path) -> Outcome:
    """Simulate the paper's cluster, and clusters that are short of decode capacity.

    One of the clusters short of decode capacity also checks the TBT SLO when pages are reserved.
    """
    rows: list[list[str | float | None]] = []
    for policy, published in PUBLISHED.items():
        setup = msgspec.structs.replace(PAPERS, overload=policy)
        s = simulate(setup, trace.load(PAPERS_SPEED))[0].summary
        rows.append([policy.value, published, s.num_rejected, s.num_requests, s.num_effective])
    papers = Table(["policy", "rejected, published", "ours", "of", "effective"], rows)
    early = msgspec.structs.replace(DECODE_BOUND, checks_reservations=True)

    def conversations(seed: int) -> Iterator[TraceRequest]:
        return trace.load(SPEED, NUM_REQUESTS, seed)

    drawn: list[Drawn] = []
    tables = [papers]
    predicted: dict[str, list[Summary]] = {}
    for name, base, load in (
        ("conversations", DECODE_BOUND, conversations),
        ("chats", DECODE_BOUND, _chats),
        (f"conversations, {BOTH_BOUND.name}", BOTH_BOUND, conversations),
        ("conversations, check also at reservation", early, conversations),
    ):
        runs = {policy: [_Run(base, policy, load(seed)) for seed in SEEDS] for policy in PUBLISHED}
        header = [name, "rejected", "wasted prefills", "effective"]
        header += ["effective, by seed", "prefill load, std", "decode load, std", "correlation"]
        tables.append(Table(header, [_row(policy.value, of_policy) for policy, of_policy in runs.items()]))
        drawn = drawn or [of_policy[0].drawn for of_policy in runs.values()]
        predicted[name] = [run.summary for run in runs[Overload.PREDICTION]]
    draw_load(drawn, folder / PICTURE)
    deferral = Table(
        ["deferral", "may wait", "rejected", "effective", "effective, by seed", "TTFT p90, s"],
        [
            _deferral_row(name, num, _deferred(num, load) if num else predicted[name])
            for name, load in (("conversations", conversations), ("chats", _chats))
            for num in MAX_WAITING
        ],
    )
    return Outcome([*tables, deferral], [PICTURE])


def _deferred(max_waiting: int, load: Callable[[int], Iterable[TraceRequest]]) -> list[Summary]:
    """Return a summary for each seed under `prediction`, with up to `max_waiting` deferred requests."""
    setup = msgspec.structs.replace(DECODE_BOUND, overload=Overload.PREDICTION, max_waiting=max_waiting)
    return [simulate(setup, load(seed))[0].summary for seed in SEEDS]


def _deferral_row(name: str, max_waiting: int, summaries: list[Summary]) -> list[Cell]:
    """Return a row of means over the seeds."""
    effective = [summary.num_effective for summary in summaries]
    return [
        name,
        max_waiting,
        round(fmean(summary.num_rejected for summary in summaries)),
        round(fmean(effective)),
        ", ".join(map(str, effective)),
        fmean(summary.ttft_s.p90 for summary in summaries),
    ]


def _chats(seed: int) -> Iterator[TraceRequest]:
    return itertools.islice(synthesize(CHATS, seed), NUM_REQUESTS)


class _Run:
    """The results of one simulation."""

    def __init__(self, base: Setup, policy: Overload, load: Iterable[TraceRequest]) -> None:
        setup = msgspec.structs.replace(base, overload=policy)
        series = LoadSeries(setup.slos)
        simulated, results = simulate(setup, load, policy.value, series)
        self.drawn = Drawn(simulated, results, series)
        self.summary: Summary = simulated.summary
        self.num_wasted = int(((results["prefill_s"] > 0) & np.isnan(results["ttft_s"])).sum())
        prefill, decode = (_middle(series[name]) for name in ("prefill_load", "decode_load"))
        correlation = float(np.corrcoef(prefill, decode)[0, 1])
        self.swings = float(prefill.std()), float(decode.std()), correlation


def _row(name: str, runs: list[_Run]) -> list[str | float | None]:
    """Return a row of means over the seeds."""
    effective = [run.summary.num_effective for run in runs]
    counts = ([run.summary.num_rejected for run in runs], [run.num_wasted for run in runs], effective)
    swings = np.mean([run.swings for run in runs], axis=0).tolist()
    return [name, *(round(float(np.mean(of))) for of in counts), ", ".join(map(str, effective)), *swings]


def _middle(load: np.ndarray) -> np.ndarray:
    """Return a load over time without its first and last tenth."""
    return load[len(load) // 10 : -(len(load) // 10)]


def _order(values: list[float], *, falls: bool) -> str:
    """Return a text that says whether the first three policies are in the published order.

    They are baseline, early rejection and prediction. `falls`: whether the published values fall in this
    order.
    """
    signed = [-value if falls else value for value in values[:3]]
    return "in the published order" if signed == sorted(set(signed)) else "not in the published order"


def _found(table: Table) -> str:
    rejected, effective = ([number(row[column]) for row in table.rows] for column in (1, 3))
    _, at_arrival, predicted, _ = table.rows
    steadier = [number(predicted[column]) / number(at_arrival[column]) for column in (5, 6)]
    return (
        f"On {table.header[0]}: {effective[0]:.0f}, {effective[1]:.0f} and {effective[2]:.0f} requests are"
        f" effective with the baseline, early rejection and prediction, {_order(effective, falls=False)};"
        f" {rejected[0]:.0f}, {rejected[1]:.0f} and {rejected[2]:.0f} are rejected,"
        f" {_order(rejected, falls=True)}. With prediction the prefill load's standard deviation is"
        f" {steadier[0]:.2f} times that with early rejection, the decode load's {steadier[1]:.2f} times."
    )


def remark(outcome: Outcome) -> str:
    """Return the remark about the differences between the policies."""
    papers, *decode_bound, _, deferral = outcome.tables
    rejected = [number(row[2]) for row in papers.rows]
    span = " to ".join(dict.fromkeys(f"{count:,.0f}" for count in (min(rejected), max(rejected))))
    order = "equally many with each policy" if len(set(rejected)) == 1 else _order(rejected, falls=True)
    return (
        f"At the paper's setting {span} of {number(papers.rows[0][3]):,.0f} are rejected, {order}. The"
        " modelled decode nodes are far from a TBT of 0.1 s there, so it is the TTFT SLO that rejects. Where"
        f" decoding is short the policies differ. {' '.join(map(_found, decode_bound))} The number of"
        f" rejections alone ranks no policies with {DECODE_BOUND.name}: its prefill nodes have time to spare,"
        " so a wasted prefill delays nobody, and what is let in beyond the SLO is late instead of rejected. A"
        " request with few tokens cannot be effective: the second one waits for the KVCache, and is one of"
        " the longest gaps. A check at reservation counts all requests that are on their way to the instance."
        f" It is stricter than any of the policies and decides before they do. {_worth(deferral)}"
    )


def _worth(deferral: Table) -> str:
    """Return a text about the effect of deferral on rejections and on effective requests."""
    parts = []
    for of_load in range(0, len(deferral.rows), len(MAX_WAITING)):
        none, *_, all_ = deferral.rows[of_load : of_load + len(MAX_WAITING)]
        parts.append(
            f"{number(all_[2]):.0f} instead of {number(none[2]):.0f} {none[0]} are rejected,"
            f" {number(all_[3]):.0f} instead of {number(none[3]):.0f} effective"
        )
    return (
        "Deferral (section 7): requests wait for decode's load to fall while their TTFT SLO allows it. If all"
        f" may wait, {'; '.join(parts)}: who comes later finds the batches as full as the SLO allows. If few"
        " may, the queue is full of long prompts, and rejects."
    )


EXPERIMENT = Experiment(
    "overload",
    "Overload policies",
    "Mooncake (arXiv), Table 3: rejected requests at twice the replay speed, 8P+8D; Figures 9 and 10: early"
    " rejection lets prefill and decode load swing in anti-phase, prediction damps that.",
    "llama2-70b, TTFT SLO 30 s. First table: the paper's 8P+8D, the whole trace"
    f" at {PAPERS_SPEED:g}x, TBT SLO 0.1 s. Others: {DECODE_BOUND.name} unless said otherwise, with a TBT SLO"
    f" of 28 ms, so that decoding is short; {NUM_REQUESTS:,} requests, means over {len(SEEDS)} seeds."
    f" Conversations are the first requests of the trace at {SPEED:g}x; chats are synthetic,"
    f" {CHATS.rate_per_s:g} req/s, prompts of 3,000 and answers of 300 tokens in the median, both lognormal."
    " In the last table but one decode instances check also when pages are reserved; in the paper and in this"
    " server only when prefill has ended. A wasted prefill is one of a request that was rejected then.",
    remark,
    run,
    cost=146,
)
