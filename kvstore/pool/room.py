"""Room in DRAM: which blocks leave for others, and that whoever waits for a page hears of one.

With a lower tier that works a block may leave DRAM only once that tier holds it: nothing that was stored is
lost by being pushed out faster than a disk can write. `make` then fails until the mover has caught up.

Owns: evictions, memories of what was evicted, how many pages are wanted. Does not know: who uses a page.
"""

from collections.abc import Callable
from typing import Protocol

from kvstore.pool.ghosts import Ghosts
from kvstore.pool.shelf import Shelf
from mooncake.errors import PoolFullError
from mooncake.messages.blocks import BlockKey


class LowerTier(Protocol):
    """What is below DRAM."""

    @property
    def is_accepting(self) -> bool:
        """Whether it takes blocks now; if not, they are evicted to nowhere."""

    def holds(self, key: BlockKey) -> bool:
        """Whether the block can be had from there."""


class Room:
    """Of one shelf.

    `on_evict` is called with each page before its block is taken out, `on_space` whenever a page becomes free
    or idle, `on_pressure` when fewer pages are free than `low_watermark`, or too few for somebody.
    """

    def __init__(
        self,
        shelf: Shelf,
        lower: LowerTier | None,
        *,
        low_watermark: int,
        on_evict: Callable[[int], None],
        on_space: Callable[[], None],
        on_pressure: Callable[[], None],
    ) -> None:
        self.epoch = 0
        """number of times that a page became free or evictable"""
        self.num_wanted = 0
        """free pages that somebody could not get"""
        self.num_evictions = 0
        """blocks, since the pool was opened"""
        self.ghosts = Ghosts(shelf.table.num_pages)
        self._shelf = shelf
        self._lower = lower
        self._low_watermark = low_watermark
        self._on_evict = on_evict
        self._on_space = on_space
        self._on_pressure = on_pressure

    def make(self, num_pages: int) -> bool:
        """Evicts until `num_pages` are free. Whether they are: the lower tier may not be that far yet."""
        while self._shelf.num_free < num_pages:
            page = self._shelf.coldest()
            if page is None or not self.is_disposable(page):
                return False
            self.evict(page)
        return True

    def is_disposable(self, page: int) -> bool:
        """Whether the block in `page` may leave DRAM: the lower tier holds it, or takes nothing."""
        lower = self._lower
        return lower is None or not lower.is_accepting or lower.holds(self._shelf.table.key(page))

    def evict(self, page: int) -> None:
        """Takes the block in an idle page out of DRAM."""
        key = self._shelf.table.key(page)
        self._on_evict(page)
        self._shelf.evict(page)
        if self._lower is None or not self._lower.holds(key):
            self.ghosts.add(key)
        self.num_evictions += 1

    def left_lower_tier(self, key: BlockKey) -> None:
        """The lower tier has not this block any more."""
        if key not in self._shelf.index:
            self.ghosts.add(key)

    def refusal(self, num_missing: int, num_evictable: int) -> PoolFullError:
        """For somebody who needs so many pages now. They are wanted from now on, if that is not in vain."""
        num_free = self._shelf.num_free
        if num_missing <= num_free + num_evictable:
            self.num_wanted = max(self.num_wanted, num_missing)
            self._on_pressure()
        return PoolFullError(
            f"{num_missing} pages are needed, {num_free} are free and {num_evictable} evictable"
            f" of {self._shelf.table.num_pages}"
        )

    def pages_taken(self) -> None:
        """Fewer are free than before."""
        if self._shelf.num_free < self._low_watermark:
            self._on_pressure()

    def users_left(self) -> None:
        """Pages have lost users: some may be free or idle now."""
        if self._shelf.num_free < max(self._low_watermark, self.num_wanted):
            self._on_pressure()
        self.changed()

    def changed(self) -> None:
        """A page became free or idle, or idle ones may be evicted now: whoever waits should try again."""
        self.epoch += 1
        self._on_space()
