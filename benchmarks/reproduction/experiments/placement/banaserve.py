"""Routing by measured utilisation, by queues, and by Algorithm 1 (BanaServe, Figure 2(a), Algorithm 2)."""

import random
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.reproduction.experiment import (
    FIVE_SEEDS,
    SEED,
    Cell,
    Experiment,
    Outcome,
    Table,
    Trace,
    mean_of,
    number,
    text_of,
)
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.simulator.summary import Summary, summarize
from benchmarks.tools.traces.arrivals import arrivals
from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceRequest
from mooncake.config.policies import Scheduling

SETUP = Setup(model="llama-13b", num_gpus=1, num_prefill=8, num_decode=8, pool_tokens=120_000, rejects=False)
TRACE_SETUP = Setup(num_prefill=8, num_decode=8, rejects=False)
QUEUES, CACHE, MEASURED, TTFT = "fewest requests", "cache-aware", "utilisation", "Algorithm 1"
POLICIES = {
    CACHE: (Scheduling.CACHE_AWARE, SETUP.load_threshold),
    QUEUES: (Scheduling.BANASERVE, 0.0),
    MEASURED: (Scheduling.BANASERVE, SETUP.load_threshold),
    TTFT: (Scheduling.KVCACHE_CENTRIC, SETUP.load_threshold),
}
"""The policy and delta_L of each rule. With delta_L = 0 Algorithm 2 always chooses by its queues."""
NUM_PREFIXES, PREFIX_BLOCKS, SKEW = 64, 8, 1.2
"""The number of prefixes, their length in blocks, and the skew of their use.

The n-th prefix is wanted n ** -SKEW times as often as the first.
"""
NEW_TOKENS, OUTPUT_TOKENS = 512, 100
RATE_PER_S = 20.0
NUM_REQUESTS = 1000
_SKEWED, _TRACE = f"skewed prefixes, {RATE_PER_S:g} req/s", "conversation trace"


class _Run(NamedTuple):
    summary: Summary
    imbalance: float
    """The busy time of the busiest prefill instance, divided by the mean busy time."""


def skewed(rate_per_s: float, seed: int = SEED) -> Iterator[TraceRequest]:
    """Yield prompts without end. Each begins with one of a few prefixes."""
    rng = random.Random(seed)
    weights = [(n + 1) ** -SKEW for n in range(NUM_PREFIXES)]
    new_ids = count(NUM_PREFIXES * PREFIX_BLOCKS)
    num_tokens = PREFIX_BLOCKS * BLOCK_TOKENS + NEW_TOKENS
    for arrival_s in arrivals(rate_per_s, 1.0, rng):
        (prefix,) = rng.choices(range(NUM_PREFIXES), weights)
        ids = range(prefix * PREFIX_BLOCKS, (prefix + 1) * PREFIX_BLOCKS)
        yield TraceRequest(arrival_s, num_tokens, OUTPUT_TOKENS, (*ids, next(new_ids)))


def run(trace: Trace, folder: Path) -> Outcome:
    """Simulate each load and rule. The table has one row for each pair."""
    rows: list[list[Cell]] = []
    for load in (_SKEWED, _TRACE):
        for rule, (scheduling, threshold) in POLICIES.items():
            setup = SETUP if load == _SKEWED else TRACE_SETUP
            setup = msgspec.structs.replace(setup, scheduling=scheduling, load_threshold=threshold)
            runs = [_simulated(setup, _load_of(load, trace, seed)) for seed in FIVE_SEEDS]
            figures = (
                [of.summary.ttft_s.mean for of in runs],
                [of.summary.ttft_s.p90 for of in runs],
                [of.imbalance for of in runs],
                [of.summary.cached_share for of in runs],
                [of.summary.fetched_share for of in runs],
            )
            rows.append([load, rule, *map(mean_of, figures)])
    header = ["load", "rule", "TTFT mean, s", "p90, s", "busiest / mean", "input cached", "fetched"]
    return Outcome([Table(header, rows)])


def _load_of(load: str, trace: Trace, seed: int) -> Iterator[TraceRequest]:
    if load == _SKEWED:
        return islice(skewed(RATE_PER_S, seed), NUM_REQUESTS)
    return trace.load(num_requests=NUM_REQUESTS, seed=seed)


def _simulated(setup: Setup, load: Iterator[TraceRequest]) -> _Run:
    cluster = setup.cluster()
    assert isinstance(cluster, DisaggregatedCluster)
    summary = summarize(cluster.run(load))
    busy_s = [prefill.node.busy_s for prefill in cluster.prefills]
    return _Run(summary, max(busy_s) * len(busy_s) / sum(busy_s))


def remark(outcome: Outcome) -> str:
    """Return the remark that compares the rules."""
    of = {(str(row[0]), str(row[1])): number(row[2]) for row in outcome.tables[0].rows}
    ratios = {
        other: [of[load, MEASURED] / of[load, other] for load in (_SKEWED, _TRACE)]
        for other in (CACHE, QUEUES, TTFT)
    }
    told = "; ".join(
        f"{found[0]:.2f} and {found[1]:.2f} times that of `{other}`" for other, found in ratios.items()
    )
    busiest = [number(row[4]) for row in outcome.tables[0].rows if row[1] == MEASURED]
    least = [min(POLICIES, key=lambda rule: of[load, rule]) for load in (_SKEWED, _TRACE)]
    return (
        f"By measured utilisation the mean TTFT is, on the two loads, {told}. The least has"
        f" {' and '.join(f'`{rule}`' for rule in dict.fromkeys(least))}. Utilisation does what it is for:"
        f" the busiest instance computes {busiest[0]:.2f} and {busiest[1]:.2f} times as long as the mean"
        " one. But a measured load is up to a heartbeat old, and does not tell a long queue from a short"
        " one: an instance that computes all the time has C = Cmax with either. The `cache-aware` rule is"
        " not the router that the paper draws: it weighs the queue against the prefix, so load does not pile"
        " up where a prefix is."
    )


EXPERIMENT = Experiment(
    "banaserve",
    "Load-aware routing",
    "BanaServe, Figure 2(a) and Algorithm 2: cache-aware routing overloads the instances that hold popular"
    " prefixes; with a store that all share, routing by load alone is better.",
    f"Skewed prefixes: {text_of(SETUP)}, one A800 each, pools of {SETUP.pool_tokens:,} tokens;"
    f" {NUM_PREFIXES} prefixes of {PREFIX_BLOCKS * BLOCK_TOKENS:,} tokens, the n-th wanted n^-{SKEW:g} times"
    f" as often as the first, {NEW_TOKENS} new tokens behind; Poisson arrivals. Trace:"
    f" {text_of(TRACE_SETUP)}; the seeds draw where in a tick of its clock a request arrives. The"
    f" first {NUM_REQUESTS:,} requests. Means of {len(FIVE_SEEDS)} seeds with 95% confidence intervals."
    f" `{MEASURED}` is Algorithm 2 (`banaserve`), `{QUEUES}` the same with delta_L = 0;"
    " both let every instance fetch.",
    remark,
    run,
    cost=40,
)
