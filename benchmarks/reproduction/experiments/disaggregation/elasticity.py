"""Roles that follow the load, compared with the best fixed numbers of prefill and decode instances."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.reproduction.experiment import Cell, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.simulator.summary import Summary
from benchmarks.tools.traces.request import TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, Values, synthesize

NUM_INSTANCES = 4
TTFT_SLO_S, TBT_SLO_S = 4.0, 0.025
BASE = Setup(
    model="llama-3.1-8b",
    num_gpus=1,
    num_prefill=2,
    num_decode=2,
    ttft_slo_s=TTFT_SLO_S,
    tbt_slo_s=TBT_SLO_S,
    block_tokens=128,
)
OF_TRACE = Setup(model="llama3-70b", num_prefill=4, num_decode=4, ttft_slo_s=10.0, tbt_slo_s=0.05)
TUNED_SEED, SEEDS = 1, (11, 12)
"""The seed with which thresholds were tuned, and the seeds of the experiment.

Loads that rarely change use only the first seed of the experiment.
"""
NUM_TRACE_REQUESTS = 1500


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of requests: the mean lengths of their prompts and answers."""

    num_input_tokens: int
    num_output_tokens: int

    def at(self, rate_per_s: float, duration_s: float) -> "Part":
        """Return a part of a load: `rate_per_s` requests of this kind a second, for `duration_s` seconds."""
        return Part(self, rate_per_s, duration_s)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a load: a span of time with requests of one kind."""

    kind: Kind
    rate_per_s: float
    duration_s: float

    def requests(self, seed: int) -> Iterator[TraceRequest]:
        """Yield Poisson arrivals with random lengths."""
        load = SyntheticLoad(
            self.rate_per_s, _spread(self.kind.num_input_tokens), _spread(self.kind.num_output_tokens)
        )
        return itertools.takewhile(
            lambda request: request.arrival_s < self.duration_s, synthesize(load, seed)
        )


LONG_PROMPTS, LONG_ANSWERS, EVEN = Kind(4096, 128), Kind(1024, 1024), Kind(2048, 400)
"""Kinds of requests with different ratios of prefill time to decode time.

Prefill takes four times as long as decode for LONG_PROMPTS, a quarter as long for LONG_ANSWERS, and equally
long for EVEN.
"""


def _spread(mean: int) -> Values:
    return (0.4 * mean, 0.7 * mean, mean, 1.9 * mean)


def swing(duration_s: float, num_parts: int) -> list[Part]:
    """Return parts with long prompts and with long answers, in turn."""
    both = LONG_PROMPTS.at(8.0, duration_s), LONG_ANSWERS.at(9.2, duration_s)
    return [part for part, _ in zip(itertools.cycle(both), range(num_parts), strict=False)]


def growth(kind: Kind, rate_per_s: float) -> list[Part]:
    """Return a load that grows to five times its rate within a minute, and then stays the same."""
    steps = [kind.at((1 + 4 * step / 10) * rate_per_s, 6.0) for step in range(1, 11)]
    return [kind.at(rate_per_s, 60.0), *steps, kind.at(5 * rate_per_s, 120.0)]


BURSTS = [LONG_ANSWERS.at(4.0, 50.0), LONG_PROMPTS.at(16.0, 10.0)] * 5
LOADS: list[tuple[str, list[Part]]] = [
    ("swing, every 180 s", swing(180.0, 4)),
    ("swing, every 60 s", swing(60.0, 6)),
    ("bursts, 10 s in 60", BURSTS),
    ("growth, long prompts", growth(LONG_PROMPTS, 1.4)),
    ("growth, long answers", growth(LONG_ANSWERS, 1.6)),
    ("steady, long prompts", [LONG_PROMPTS.at(6.5, 180.0)]),
    ("steady, long answers", [LONG_ANSWERS.at(7.5, 180.0)]),
    ("steady, even", [EVEN.at(8.0, 180.0)]),
]


def requests_of(parts: Sequence[Part], seed: int) -> Iterator[TraceRequest]:
    """Yield the requests of all parts, one part after the other. No two parts share a prefix."""
    began_s = 0.0
    for index, part in enumerate(parts):
        for request in part.requests(1000 * seed + index):
            blocks = tuple((index << 32) + block for block in request.hash_ids)
            yield request._replace(arrival_s=began_s + request.arrival_s, hash_ids=blocks)
        began_s += part.duration_s


def run(trace: Trace, folder: Path) -> Outcome:
    """Simulate all loads. The table has one row for each load and seed."""
    rows = []
    for name, parts in LOADS:
        num_steps = len(parts) if not name.startswith("growth") else 2
        changes_often = name in (LOADS[1][0], LOADS[2][0])
        seeds = SEEDS if changes_often else SEEDS[:1]
        rows += [
            _row(f"{name}, seed {seed}", BASE, partial(requests_of, parts, seed), num_steps) for seed in seeds
        ]
    inlining = msgspec.structs.replace(BASE, inlining=True)
    name, parts = LOADS[0]
    load = partial(requests_of, parts, SEEDS[0])
    rows.append(_row(f"{name}, seed {SEEDS[0]}, inlining", inlining, load, len(parts)))
    of_trace = partial(trace.load, 2.5, NUM_TRACE_REQUESTS)
    rows.append(_row("trace x2.5, 8 nodes", OF_TRACE, of_trace, None))
    header = ["load", "best division", "effective", "rebalancing", "by the best division"]
    header += ["changes of the load", "of roles", "moves"]
    return Outcome([Table(header, rows)])


def _row(
    name: str, setup: Setup, load: Callable[[], Iterator[TraceRequest]], num_parts: int | None
) -> list[Cell]:
    """Compare a rebalancing cluster with all fixed numbers of prefill and decode instances.

    The rebalancing cluster begins with equal numbers. `num_parts`: the number of parts of the load; None if
    the load has no parts.
    """
    num = setup.num_prefill + setup.num_decode
    fixed = [
        msgspec.structs.replace(setup, num_prefill=prefill, num_decode=num - prefill)
        for prefill in range(1, num)
    ]
    summaries: dict[str, Summary] = {one.name: simulate(one, load())[0].summary for one in fixed}
    best = max(summaries, key=lambda division: summaries[division].num_effective)
    followed, _ = simulate(msgspec.structs.replace(setup, rebalancing=True), load())
    assert followed.conductor is not None
    shares = summaries[best].effective_share, followed.summary.effective_share
    return [
        name,
        best.partition(",")[0],
        *shares,
        shares[1] / shares[0],
        None if num_parts is None else num_parts - 1,
        followed.conductor["num_switches"],
        followed.conductor["num_moves"],
    ]


def remark(outcome: Outcome) -> str:
    """Return the remark about the gain by rebalancing, and the frequency of changes of roles."""
    rows = outcome.tables[0].rows

    def ratios(beginning: str) -> str:
        found = [number(row[4]) for row in rows if str(row[0]).startswith(beginning)]
        return f"{min(found):.2f} to {max(found):.2f}"

    most = max(number(row[6]) / (number(row[5]) + 1) for row in rows if row[5] is not None)
    return (
        f"On loads that swing every 180 s {ratios('swing, every 180')} times as many requests are effective"
        f" as on the best fixed division; every 60 s it is {ratios('swing, every 60')} times, for the long"
        " answers of the part before are decoded for half a minute, and no instance can be spared before they"
        f" fit the others. On bursts it is {ratios('bursts')} times: they are over before a change would"
        " help, and the division that is best for them and the time between is learned from the first one."
        f" It is {ratios('growth')} times on growth, {ratios('steady')} times on steady loads and"
        f" {ratios('trace')} times on the trace, though rebalancing begins with an equal division, which is"
        f" seldom the best. There are at most {most:.1f} changes of roles for each part of a load."
    )


EXPERIMENT = Experiment(
    "elasticity",
    "Roles that follow the load",
    "Mooncake (arXiv), section 10, has prefill instances that become decode instances as future work; for"
    " BanaServe and Splitwise the fixed division is what loses most when loads change. No figures for this.",
    f"{NUM_INSTANCES} instances of {BASE.model}, one A800 each, TTFT within {TTFT_SLO_S:g} s, TBT within"
    f" {1000 * TBT_SLO_S:g} ms. Swings have prompts of {LONG_PROMPTS.num_input_tokens:,} and answers of"
    f" {LONG_PROMPTS.num_output_tokens} tokens, for which prefill takes four times as long as decode, then"
    f" {LONG_ANSWERS.num_input_tokens:,} and {LONG_ANSWERS.num_output_tokens:,}, with a quarter."
    " Bursts are 10 s of the former in 60 s of the latter; growth is by 5 within a minute. Lengths vary from"
    " 0.4 to 1.9 times the mean; Poisson arrivals. Effective: requests within both SLOs, of all. The best"
    " division is the best of all fixed ones for this very load. Thresholds were chosen on swings and bursts"
    f" with seed {TUNED_SEED}, and on the trace at 1.5 and 2 times its speed.",
    remark,
    run,
    cost=95,
)
