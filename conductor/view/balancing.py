"""The balancing threshold: a setting, or adapted to evictions (Mooncake, section 6.2).

A copied prefix takes DRAM from blocks that may be wanted again. Algorithm 1 compares the time of a copy, but
not this cost. So the pools report how many lookups missed a block that had been evicted a short while ago. If
these lookups are many, the threshold rises, so that only copies with a large gain are made. If they are few,
the threshold falls, and prefixes spread. The threshold rises faster than it falls.

Owns: the threshold. Does not know: time, prefixes, which instance fetches.
"""

from collections.abc import Iterable

from conductor.settings import DEFAULT_BALANCING_THRESHOLD
from mooncake.messages.pools import PoolStats

LOWEST, HIGHEST = 1.05, 4.0
"""The bounds of an adapted threshold."""
MANY_EVICTED = 0.02
"""The largest share of lookups that may miss a lately evicted block before the threshold rises."""
_LOOKUPS_A_STEP = 1000
"""The number of lookups in all pools after which the threshold is adapted once."""
_RISE, _FALL = 1.25, 0.95
"""The factors by which one step raises or lowers the threshold. It rises faster, as evictions cost blocks."""


class BalancingThreshold:
    """The balancing threshold: the value `fixed`, or one that adapts to evictions if `fixed` is None."""

    def __init__(self, fixed: float | None = DEFAULT_BALANCING_THRESHOLD) -> None:
        self.threshold = DEFAULT_BALANCING_THRESHOLD if fixed is None else fixed
        self._adapts = fixed is None
        self._reported: dict[int, tuple[int, int]] = {}  # by slot: lookups, and misses of evicted blocks
        self._num_lookups = self._num_evicted = 0  # since the last step

    def forget(self, slot: int) -> None:
        """Forget the counts of an instance that has left its slot."""
        self._reported.pop(slot, None)

    def learn(self, slot: int, pools: Iterable[PoolStats]) -> None:
        """Adapt the threshold to the totals that the pools of an instance have counted."""
        if not self._adapts:
            return
        num_lookups = num_evicted = 0
        for pool in pools:
            num_evicted += pool.num_misses.get("evicted", 0)
            num_lookups += sum(pool.num_misses.values()) + sum(tier.num_hits for tier in pool.tiers.values())
        before = self._reported.get(slot)
        self._reported[slot] = num_lookups, num_evicted
        if before is None or num_lookups < before[0]:
            return  # the pools' counts have begun anew
        self._num_lookups += num_lookups - before[0]
        self._num_evicted += num_evicted - before[1]
        if self._num_lookups >= _LOOKUPS_A_STEP:
            self._step()

    def _step(self) -> None:
        many = self._num_evicted > MANY_EVICTED * self._num_lookups
        self.threshold = min(max(self.threshold * (_RISE if many else _FALL), LOWEST), HIGHEST)
        self._num_lookups = self._num_evicted = 0
