"""The threshold of copies follows what they drive out."""

from dataclasses import dataclass

import msgspec
import pytest

from conductor.settings import DEFAULT_BALANCING_THRESHOLD
from conductor.view.balancing import HIGHEST, LOWEST, BalancingThreshold
from mooncake.messages.pools import PoolStats, Tier, TierStats
from tests.conductor.small_cluster import POOL


@dataclass
class Pool:
    """Counts, as a pool does."""

    num_hits: int = 0
    num_evicted: int = 0

    def after(self, num_hits: int, num_evicted: int) -> list[PoolStats]:
        self.num_hits += num_hits
        self.num_evicted += num_evicted
        dram = TierStats(10, 10, self.num_hits, 0, 0)
        misses = {"evicted": self.num_evicted, "absent": 0}
        return [msgspec.structs.replace(POOL, tiers={Tier.DRAM: dram}, num_misses=misses)]


@pytest.mark.parametrize(("num_evicted", "limit"), [(0, LOWEST), (20, LOWEST), (21, HIGHEST)])
def test_many_misses_of_evicted_blocks_raise_it_and_few_lower_it(num_evicted: int, limit: float) -> None:
    balancing, pool = BalancingThreshold(None), Pool()
    balancing.learn(0, pool.after(5, 5))
    assert balancing.threshold == DEFAULT_BALANCING_THRESHOLD
    seen = [DEFAULT_BALANCING_THRESHOLD]
    for _ in range(10):
        balancing.learn(0, pool.after(1000 - num_evicted, num_evicted))
        seen.append(balancing.threshold)
    assert seen == sorted(seen, reverse=limit == LOWEST)
    assert seen[-1] == limit


def test_it_waits_for_enough_lookups_and_ignores_counters_that_begin_anew() -> None:
    balancing, pool = BalancingThreshold(None), Pool()
    balancing.learn(0, pool.after(0, 5000))  # before it was known
    balancing.learn(0, pool.after(0, 999))
    assert balancing.threshold == DEFAULT_BALANCING_THRESHOLD
    balancing.learn(0, Pool().after(0, 900))
    assert balancing.threshold == DEFAULT_BALANCING_THRESHOLD
    balancing.forget(0)
    balancing.learn(0, pool.after(0, 1))
    assert balancing.threshold == DEFAULT_BALANCING_THRESHOLD
    balancing.learn(0, pool.after(0, 1))
    assert balancing.threshold > DEFAULT_BALANCING_THRESHOLD


def test_a_given_one_stays() -> None:
    balancing, pool = BalancingThreshold(2.0), Pool()
    for _ in range(5):
        balancing.learn(0, pool.after(0, 2000))
    assert balancing.threshold == 2.0
