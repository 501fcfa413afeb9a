"""Order of eviction. Each policy gives each page one number, and the smallest numbers go first.

The policies are those of Mooncake's Table 1:

LRU          the block that was not used for the longest time
LFU          the block used least often; of equals, the block that was not used for the longest time
LengthAware  the block used least often; of equals, the block furthest from the start of its prompt, as far as
             the pool knows (`Block.position`)

Softly pinned blocks are evicted after all others. Which tenants' blocks are evicted first is decided in
`shares`, not here. Choosing costs one pass over the candidates, so callers choose many blocks at a time.

Owns: the order. Does not know: which blocks may be evicted.
"""

from typing import assert_never

import numpy as np

from kvstore.pool.pages import Array, PageTable
from mooncake.config.policies import EvictionPolicy

# The fields of a page's number, which together leave its highest bit free.
_AGE_BITS = 32
_POSITION_BITS = 20
_USES_BITS = 11
_SOFT = np.uint64(1 << 63)
"""The highest bit of a uint64, set for softly pinned blocks."""


def first_victims(
    policy: EvictionPolicy, table: PageTable, candidates: Array, is_soft: Array, num_pages: int
) -> list[int]:
    """Return the `num_pages` of `candidates` (page numbers) that the policy evicts first, in that order.

    Softly pinned candidates (`is_soft`, bool of the same length) come last. If there are fewer candidates
    than `num_pages`, all are returned.
    """
    warmth = _warmth(policy, table, candidates)
    warmth[is_soft] |= _SOFT
    if num_pages < len(candidates):
        chosen = np.argpartition(warmth, num_pages - 1)[:num_pages]
    else:
        chosen = np.arange(len(candidates))
    ordered: list[int] = candidates[chosen[np.argsort(warmth[chosen], kind="stable")]].tolist()
    return ordered


def unprotected(chosen: list[int], tenants: Array, num_disposable: Array) -> list[int]:
    """Return the `chosen` pages that can be evicted while every tenant keeps its protected share.

    `chosen` and the result are in order, coldest first. `tenants` are the numbers of the pages' tenants. At
    most `num_disposable[tenant]` pages of each tenant may be evicted.
    """
    num_left = num_disposable.tolist()
    kept = []
    for page, tenant in zip(chosen, tenants.tolist(), strict=True):
        if num_left[tenant] > 0:
            num_left[tenant] -= 1
            kept.append(page)
    return kept


def _warmth(policy: EvictionPolicy, table: PageTable, pages: Array) -> Array:
    """Return a uint64 for each page, larger for pages that should stay. The highest bit is 0."""
    last_uses = table.last_uses[pages]
    match policy:
        case EvictionPolicy.LRU:
            return last_uses
        case EvictionPolicy.LFU:
            return _clipped(table.num_uses[pages], 63 - _AGE_BITS) << np.uint64(_AGE_BITS) | _ages(last_uses)
        case EvictionPolicy.LENGTH_AWARE:
            from_end = np.uint64((1 << _POSITION_BITS) - 1) - _clipped(table.positions[pages], _POSITION_BITS)
            frequency = _clipped(table.num_uses[pages], _USES_BITS) << np.uint64(_POSITION_BITS)
            return (frequency | from_end) << np.uint64(_AGE_BITS) | _ages(last_uses)
        case _:
            assert_never(policy)


def _ages(last_uses: Array) -> Array:
    """Return the last uses as differences from the oldest use."""
    return _clipped(last_uses - last_uses.min(), _AGE_BITS)


def _clipped(values: Array, num_bits: int) -> Array:
    return np.minimum(values.astype(np.uint64), np.uint64((1 << num_bits) - 1))
