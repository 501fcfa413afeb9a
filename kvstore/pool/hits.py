"""Hits and misses: in which tier blocks were before somebody asked for them, and why others were in none.

Owns: these counts, and which pages in DRAM have blocks that the lower tier had. Does not know: the pool.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from kvstore.pool.ghosts import Ghosts
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier


class Hits:
    """Totals since the pool was opened, in blocks. `ghosts` know what was evicted."""

    def __init__(self, ghosts: Ghosts) -> None:
        self.num_hits: Counter[Tier] = Counter()
        """by the tier in which the block was before anybody asked for it"""
        self.num_misses: Counter[str] = Counter()
        """by reason: absent (not seen lately) or evicted"""
        self._ghosts = ghosts
        self._promoted: set[int] = set()
        """pages whose block came from the lower tier and has not been asked for since"""

    def promoted(self, page: int) -> None:
        """The block in `page` has come from the lower tier."""
        self._promoted.add(page)

    def left(self, page: int) -> None:
        """The block in `page` is there no longer."""
        self._promoted.discard(page)

    def tier(self, page: int) -> Tier:
        """Where the block in `page` was before anybody asked for it."""
        return Tier.SSD if page in self._promoted else Tier.DRAM

    def found(self, pages: Collection[int]) -> None:
        """Somebody has asked for the blocks in `pages`."""
        num_promoted = 0
        if self._promoted:
            num_promoted = sum(page in self._promoted for page in pages)
            self._promoted.difference_update(pages)
        self.num_hits[Tier.SSD] += num_promoted
        self.num_hits[Tier.DRAM] += len(pages) - num_promoted

    def missed(self, keys: Iterable[BlockKey]) -> None:
        """Somebody has asked for these blocks, and they are not in DRAM."""
        for key in keys:
            self.num_misses[self._ghosts.reason(key)] += 1
