"""Room in DRAM: evictions, and wake-ups of requests that wait for a page.

While the lower tier works, a block may leave DRAM only once that tier holds it. Thus no stored block is lost
when blocks come faster than a disk can write. `make_room` then fails until the mover has caught up.

Owns: evictions, the keys of blocks evicted lately, how many pages are wanted. Does not know: who uses a page.
"""

from collections.abc import Callable
from typing import Protocol

from kvstore.pool.allocator import PageAllocator
from kvstore.pool.hits import Ghosts
from mooncake.errors import PoolFullError
from mooncake.messages.blocks import BlockKey


class LowerTier(Protocol):
    """The interface of the tier below DRAM."""

    @property
    def is_accepting(self) -> bool:
        """Whether the tier accepts blocks.

        While the tier accepts none, evicted blocks that it does not hold are lost.
        """

    def holds(self, key: BlockKey) -> bool:
        """Return whether the block can be read from this tier."""


class Evictor:
    """The component that evicts blocks from DRAM when pages are needed.

    `on_evict` is called with each page before its block is evicted. `on_space` is called by `changed`, when a
    page has become free, idle or evictable; `evict` does not call it. `on_pressure` is called when fewer
    pages are free than `low_watermark`, or than a request needs.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        lower: LowerTier | None,
        *,
        low_watermark: int,
        on_evict: Callable[[int], None],
        on_space: Callable[[], None],
        on_pressure: Callable[[], None],
    ) -> None:
        self.space_epoch = 0
        """A number that grows whenever pages become free or evictable."""
        self.num_wanted = 0
        """The number of free pages for which the mover must make room, for requests that were refused.

        This is the largest number that one of these requests needs, and 0 if there are none. Requests that
        must wait for pages in use do not count.
        """
        self.num_evictions = 0
        """Blocks that were evicted from DRAM since the pool was opened."""
        self.ghosts = Ghosts(allocator.table.num_pages)
        self._allocator = allocator
        self._lower = lower
        self._low_watermark = low_watermark
        self._on_evict = on_evict
        self._on_space = on_space
        self._on_pressure = on_pressure

    def make_room(self, num_pages: int) -> bool:
        """Evict blocks until `num_pages` pages are free. Returns whether so many are free.

        The evictions end at the first page, in the order of eviction, whose block may not leave DRAM yet
        (`is_disposable`), and when no idle page is left. Pages further back in the order are not tried.
        """
        while self._allocator.num_free < num_pages:
            page = self._allocator.coldest()
            if page is None or not self.is_disposable(page):
                return False
            self.evict(page)
        return True

    def require(self, num_pages: int) -> None:
        """Make room for `num_pages` pages (`make_room`). Raises PoolFullError if that is impossible now.

        If enough pages are free or idle, but the lower tier does not hold their blocks yet, `num_wanted`
        becomes at least `num_pages`.
        """
        self.check(num_pages, 0)
        if not self.make_room(num_pages):
            self.num_wanted = max(self.num_wanted, num_pages)
            self._on_pressure()
            raise self._refusal(num_pages, self._allocator.num_idle)

    def check(self, num_pages: int, num_kept: int) -> None:
        """Check that `num_pages` pages are free or idle. `num_kept` idle pages do not count.

        Raises PoolFullError.
        """
        num_evictable = self._allocator.num_idle - num_kept
        if num_pages > self._allocator.num_free + num_evictable:
            raise self._refusal(num_pages, num_evictable)

    def is_disposable(self, page: int) -> bool:
        """Return whether the block in `page` may leave DRAM.

        The block may leave if the lower tier holds it, or if the lower tier accepts no blocks.
        """
        lower = self._lower
        return lower is None or not lower.is_accepting or lower.holds(self._allocator.table.key(page))

    def evict(self, page: int) -> None:
        """Evict the block in an idle page, and count the eviction.

        Tasks that wait for a page are not woken: a caller that frees pages for others calls `changed`.
        """
        key = self._allocator.table.key(page)
        self._on_evict(page)
        self._allocator.evict(page)
        if self._lower is None or not self._lower.holds(key):
            self.ghosts.add(key)
        self.num_evictions += 1

    def left_lower_tier(self, key: BlockKey) -> None:
        """Record that the lower tier no longer holds this block."""
        if key not in self._allocator.index:
            self.ghosts.add(key)

    def _refusal(self, num_missing: int, num_evictable: int) -> PoolFullError:
        num_free, num_pages = self._allocator.num_free, self._allocator.table.num_pages
        return PoolFullError(
            f"{num_missing} pages are needed, {num_free} are free and {num_evictable} evictable of"
            f" {num_pages}",
            self.space_epoch,
        )

    def pages_taken(self) -> None:
        """Record that the number of free pages has decreased."""
        if self._allocator.num_free < self._low_watermark:
            self._on_pressure()

    def users_left(self) -> None:
        """Record that pages have lost users, so that some may be free or idle."""
        if self._allocator.num_free < max(self._low_watermark, self.num_wanted):
            self._on_pressure()
        self.changed()

    def changed(self) -> None:
        """Wake the tasks that wait for a page, as a page has become free, idle or evictable."""
        self.space_epoch += 1
        self._on_space()
