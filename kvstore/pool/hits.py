"""Hits and misses of blocks that requests ask for: hits by tier, misses by reason.

Owns: these counts, the pages of promoted blocks, keys evicted lately. Does not know: the pool.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier

_MOST_GHOSTS = 1 << 20
"""The largest `num_blocks` of a table of ghosts, which then takes 16 MiB."""
_ID_BYTES = 8
"""Bytes of a key that a ghost keeps."""


class Ghosts:
    """A table of keys evicted lately. A miss of such a key would have been a hit with more memory.

    A direct-mapped table of about `num_blocks` key prefixes: a new ghost may replace an old one.
    """

    def __init__(self, num_blocks: int) -> None:
        size = 1 << min(num_blocks, _MOST_GHOSTS).bit_length()
        self._ids = np.zeros(size, np.uint64)
        self._mask = size - 1

    def add(self, key: BlockKey) -> None:
        ghost = int.from_bytes(key[:_ID_BYTES], "little")
        self._ids[ghost & self._mask] = ghost

    def reason(self, key: BlockKey) -> str:
        """Return why a block is missing: "evicted" lately, or "absent"."""
        ghost = int.from_bytes(key[:_ID_BYTES], "little")
        return "evicted" if self._ids[ghost & self._mask] == ghost else "absent"


@dataclass(slots=True)
class PoolCounters:
    """Totals since the pool was opened.

    `num_dropped`: damaged blocks in DRAM. `num_removed`: blocks in DRAM that a user removed, for example by
    `mooncake-kv drop`.
    `num_expired_leases`: leases that ended at their deadline.
    """

    num_dropped: int = 0
    num_removed: int = 0
    num_expired_leases: int = 0


class Hits:
    """Counts of hits and misses since the pool was opened, in blocks; `ghosts` remembers evicted keys."""

    def __init__(self, ghosts: Ghosts) -> None:
        self.num_hits: Counter[Tier] = Counter()
        """Hits by tier: SSD if the block was promoted and no request has asked for it since, else DRAM."""
        self.num_misses: Counter[str] = Counter()
        """Misses by reason: evicted lately, or absent."""
        self._ghosts = ghosts
        self._promoted: set[int] = set()
        """Pages of promoted blocks for which no request has asked since."""

    def promoted(self, page: int) -> None:
        """Record that the block in `page` was promoted from the lower tier."""
        self._promoted.add(page)

    def left(self, page: int) -> None:
        """Record that the block in `page` has left DRAM."""
        self._promoted.discard(page)

    def tier(self, page: int) -> Tier:
        """Return SSD if the block in `page` was promoted and no request has asked for it since, else DRAM."""
        return Tier.SSD if page in self._promoted else Tier.DRAM

    def found(self, pages: Collection[int]) -> None:
        """Record that a request has asked for the blocks in `pages`."""
        num_promoted = 0
        if self._promoted:
            num_promoted = sum(page in self._promoted for page in pages)
            self._promoted.difference_update(pages)
        self.num_hits[Tier.SSD] += num_promoted
        self.num_hits[Tier.DRAM] += len(pages) - num_promoted

    def missed(self, keys: Iterable[BlockKey]) -> None:
        """Record that a request has asked for these blocks, which are not in DRAM."""
        for key in keys:
            self.num_misses[self._ghosts.reason(key)] += 1
