"""Prefill scheduling, and the replicas of hot keys that result from it: Mooncake (FAST'25)."""

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.reproduction.experiment import Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from benchmarks.tools.simulator.setup import Setup, simulate
from mooncake.config.policies import Scheduling
from mooncake.messages.blocks import BlockKey

SETUP = Setup(num_prefill=8, num_decode=8, ttft_slo_s=30.0, rejects=False)
PUBLISHED_TTFT_S = {
    Scheduling.RANDOM: 19.65,
    Scheduling.LOAD_BALANCING: 5.27,
    Scheduling.CACHE_AWARE: 3.58,
    Scheduling.KVCACHE_CENTRIC: 3.07,
    Scheduling.BANASERVE: None,
}
HOT_KEYS = (1, 10, 100, 1000)
SAMPLED_EVERY_S = 20


def run_policies(trace: Trace, folder: Path) -> Outcome:
    """Simulate each policy. The table has one row for each."""
    rows: list[list[str | float | None]] = []
    for scheduling, published_s in PUBLISHED_TTFT_S.items():
        setup = msgspec.structs.replace(SETUP, scheduling=scheduling)
        simulated, _ = simulate(setup, trace.load())
        s = simulated.summary
        rows.append(
            [
                scheduling.value,
                published_s,
                s.ttft_s.mean,
                s.ttft_s.p90,
                s.ttft_attainment,
                s.cached_share,
                s.fetched_share,
            ]
        )
    within = f"within {SETUP.ttft_slo_s:g} s"
    header = ["policy", "TTFT published, s", "ours, s", "ours p90, s", within, "input cached", "fetched"]
    return Outcome([Table(header, rows)])


class Replicas:
    """A callback `on_second` of a cluster that counts replicas.

    `most` has for each key the largest number of prefill instances that had it at the same time.
    """

    def __init__(self, keys: list[BlockKey]) -> None:
        self._keys = keys
        self.most = np.zeros(len(keys), np.int64)

    def __call__(self, cluster: DisaggregatedCluster) -> None:
        if int(cluster.clock.now_s) % SAMPLED_EVERY_S == 0:
            pools = [prefill.node.pool.allocator.index for prefill in cluster.prefills]
            now = [sum(key in pool for pool in pools) for key in self._keys]
            self.most = np.maximum(self.most, now)


def run_replicas(trace: Trace, folder: Path) -> Outcome:
    """Count the prefill instances that hold the most used keys."""
    uses: Counter[BlockKey] = Counter()
    for request in trace.load():
        uses.update(SimulatedRequest.of(0, request).block_keys)
    hot = uses.most_common(HOT_KEYS[-1])
    replicas = Replicas([key for key, _ in hot])
    cluster = SETUP.cluster(replicas)
    assert isinstance(cluster, DisaggregatedCluster)
    cluster.run(trace.load())
    rows: list[list[str | float | None]] = []
    for num_keys in HOT_KEYS:
        most = replicas.most[:num_keys]
        rows.append(
            [f"top {num_keys:,}", hot[num_keys - 1][1], float(most.mean()), float((most >= 4).mean())]
        )
    return Outcome([Table(["keys", "uses of the last one", "most replicas, mean", "on half or more"], rows)])


def policies_remark(outcome: Outcome) -> str:
    """Return the remark about the order of the policies, and the steps between them."""
    ours = {str(row[0]): number(row[2]) for row in outcome.tables[0].rows}
    theirs = {policy.value: seconds for policy, seconds in PUBLISHED_TTFT_S.items() if seconds is not None}
    random, balanced, aware, centric = theirs  # from the longest to the shortest
    is_same = ours[random] > ours[balanced] > ours[aware] > ours[centric]
    saved = [1 - of[centric] / of[aware] for of in (ours, theirs)]
    best = min(ours, key=lambda name: ours[name])
    within = {str(row[0]): number(row[4]) for row in outcome.tables[0].rows}
    return (
        f"The order is {'' if is_same else 'not '}the published one: random takes"
        f" {ours[random] / ours[balanced]:.1f} times as long as load balancing (published"
        f" {theirs[random] / theirs[balanced]:.1f}), load balancing {ours[balanced] / ours[aware]:.1f} times"
        " as"
        f" long as local cache-awareness ({theirs[balanced] / theirs[aware]:.1f}), and fetching prefixes"
        " takes"
        f" another {saved[0]:.0%} off ({saved[1]:.0%}). All times are"
        f" {min(ours[n] / theirs[n] for n in theirs):.2g} to {max(ours[n] / theirs[n] for n in theirs):.2g}"
        " times"
        " the published ones: the modelled nodes compute a prompt faster than the testbed did. BanaServe's"
        " rule"
        f" takes {ours['banaserve'] / ours[best]:.2f} times as long as the best, `{best}`."
        " Within the TTFT SLO are"
        f" {within[random]:.1%} with random scheduling, {within[balanced]:.1%} with load balancing,"
        f" {within[centric]:.1%} with `{centric}`."
    )


def replicas_remark(outcome: Outcome) -> str:
    """Return the remark about the spread of hot keys."""
    first, _, hundred, _ = outcome.tables[0].rows
    return (
        "As published: the hottest keys spread over the instances without anybody predicting what will be"
        " hot."
        f" The one block that all prompts begin with is on {number(first[2]):.0f}; {number(hundred[3]):.0%}"
        " of"
        f" the top 100 are on half of the instances or more at some time, on {number(hundred[2]):.1f} of 8 on"
        f" average. The hundredth is used {number(hundred[1]):.0f} times in this hour."
    )


POLICIES = Experiment(
    "scheduling",
    "Prefill scheduling",
    "Mooncake (FAST'25): average TTFT of the conversation trace on 16 nodes. Mooncake (arXiv), Figure 8: TTFT"
    " and the share of requests within its SLO, KVCache-centric best in both.",
    "8P+8D, nothing is rejected. `cache_aware` knows prefixes but fetches none; `banaserve` is BanaServe's"
    " Algorithm 2, which looks at measured loads alone and lets every instance fetch.",
    policies_remark,
    run_policies,
    cost=66,
)
REPLICAS = Experiment(
    "replicas",
    "Replicas of hot keys",
    "Mooncake (FAST'25): the 100 hottest keys end up on nearly every prefill instance.",
    "8P+8D, `kvcache_centric`. Each key counts at the moment when most of the 8 prefill instances have it.",
    replicas_remark,
    run_replicas,
    cost=15,
)
