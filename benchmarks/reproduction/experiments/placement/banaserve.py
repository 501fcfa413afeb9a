"""Load-aware against cache-aware routing on skewed prefixes: BanaServe, Figure 2(a) and Algorithm 2."""

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec

from benchmarks.reproduction.experiment import SEED, Experiment, Outcome, Table, Trace, text_of
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.simulator.summary import summarize
from benchmarks.tools.traces.arrivals import arrivals
from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceRequest
from mooncake.config.policies import Scheduling

SETUP = Setup(model="llama-13b", num_gpus=1, num_prefill=8, num_decode=8, pool_tokens=120_000, rejects=False)
POLICIES = (
    Scheduling.LOAD_BALANCING,
    Scheduling.CACHE_AWARE,
    Scheduling.BANASERVE,
    Scheduling.KVCACHE_CENTRIC,
)
NUM_PREFIXES, PREFIX_BLOCKS, SKEW = 64, 8, 1.2
"""Prefixes, of which the n-th is wanted n ** -SKEW times as often as the first."""
NEW_TOKENS, OUTPUT_TOKENS = 512, 100
RATES_PER_S = (20.0, 40.0, 60.0)
NUM_REQUESTS = 2000


def skewed(rate_per_s: float) -> Iterator[TraceRequest]:
    """Prompts that begin with one of few prefixes, without end."""
    rng = random.Random(SEED)
    weights = [(n + 1) ** -SKEW for n in range(NUM_PREFIXES)]
    new_ids = count(NUM_PREFIXES * PREFIX_BLOCKS)
    num_tokens = PREFIX_BLOCKS * BLOCK_TOKENS + NEW_TOKENS
    for arrival_s in arrivals(rate_per_s, 1.0, rng):
        (prefix,) = rng.choices(range(NUM_PREFIXES), weights)
        ids = range(prefix * PREFIX_BLOCKS, (prefix + 1) * PREFIX_BLOCKS)
        yield TraceRequest(arrival_s, num_tokens, OUTPUT_TOKENS, (*ids, next(new_ids)))


def run(trace: Trace, folder: Path) -> Outcome:
    """A row a rate and policy."""
    rows: list[list[str | float | None]] = []
    for rate_per_s in RATES_PER_S:
        for scheduling in POLICIES:
            cluster = msgspec.structs.replace(SETUP, scheduling=scheduling).cluster()
            assert isinstance(cluster, DisaggregatedCluster)
            load = (request for request, _ in zip(skewed(rate_per_s), range(NUM_REQUESTS), strict=False))
            s = summarize(cluster.run(load))
            busy_s = [prefill.node.busy_s for prefill in cluster.prefills]
            imbalance = max(busy_s) * len(busy_s) / sum(busy_s)
            shares = s.cached_share, s.fetched_share
            rows.append(
                [f"{rate_per_s:g} req/s", scheduling.value, s.ttft_s.mean, s.ttft_s.p90, imbalance, *shares]
            )
    header = ["load", "policy", "TTFT mean, s", "p90, s", "busiest / mean", "input cached", "fetched"]
    return Outcome([Table(header, rows)])


def remark(outcome: Outcome) -> str:
    """What the rows say."""
    of = {(str(row[0]), str(row[1])): row for row in outcome.tables[0].rows}
    heaviest = f"{RATES_PER_S[-1]:g} req/s"
    aware, banaserve = (of[heaviest, policy] for policy in (Scheduling.CACHE_AWARE, Scheduling.BANASERVE))
    ratio = float(aware[2] or 0) / float(banaserve[2] or 1)
    verdict = (
        f"At {heaviest} BanaServe's rule has {ratio:.2f} times shorter TTFT than local cache-awareness, as"
        " published"
        if ratio > 1
        else f"At {heaviest} local cache-awareness has the shorter TTFT, against the paper: BanaServe's rule"
        f" takes {1 / ratio:.2f} times as long"
    )
    least = min(POLICIES, key=lambda policy: float(of[heaviest, policy][2] or 0))
    return (
        f"{verdict}; the busiest prefill instance has {float(aware[4] or 0):.2f} times the mean load with"
        f" `cache_aware`, {float(banaserve[4] or 0):.2f} times with `banaserve`. `cache_aware` is not the"
        " router that the paper draws: it weighs the queue against the prefix, so load does not pile up where"
        f" a prefix is. The least TTFT has `{least.value}`."
    )


EXPERIMENT = Experiment(
    "banaserve",
    "Load-aware routing on skewed prefixes",
    "BanaServe, Figure 2(a) and Algorithm 2: cache-aware routing overloads the instances that hold popular"
    " prefixes; with a store that all share, routing by load alone is better.",
    f"{text_of(SETUP)}, one A800 each, pools of {SETUP.pool_tokens:,} tokens; {NUM_PREFIXES} prefixes of"
    f" {PREFIX_BLOCKS * BLOCK_TOKENS:,} tokens, the n-th wanted n^-{SKEW:g} times as often as the first,"
    f" {NEW_TOKENS} new tokens behind; Poisson arrivals.",
    remark,
    run,
    cost=30,
)
