"""Allocation of the pages of one table, in DRAM or on SSD.

The allocator knows the page of each block, the free pages, and which sealed block is evicted next. A page
with users (reservations, leases, holds, hard pins) is not evicted. A SEALED page without users is *idle*: it
may be evicted at any time, in the order of the policy. Allocating and freeing take constant time; victims of
eviction are chosen many at a time.

A block in the index costs about 130 to 190 bytes: its key and page as Python objects, its place in the dict,
and the arrays here and in the table.

Owns: index, free pages, users, order of eviction. Does not know: who the users are, what is in a page.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvstore.pool.eviction import first_victims, unprotected
from kvstore.pool.pages import FREE, QUARANTINED, RESERVED, SEALED, Array, PageTable, PageWriter
from kvstore.pool.shares import NO_TENANT, Shares
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import BlockKey

_VICTIMS_SHARE = 64
"""The number of victims chosen at a time is the number of pages divided by this number."""


class PageAllocator:
    """The pages of one table, the blocks in them, and their users.

    The constructor adopts the sealed pages that an earlier process has left in `table`. `on_removed` is
    called with the key of each block that leaves the index, `on_sealed` with the pages of blocks that enter
    it.
    """

    def __init__(
        self,
        table: PageTable,
        policy: EvictionPolicy,
        on_removed: Callable[[BlockKey], None],
        on_sealed: Callable[[Sequence[int]], None] = lambda pages: None,
    ) -> None:
        self.table = table
        self.policy = policy
        self._on_removed = on_removed
        self._on_sealed = on_sealed
        adopted = table.adopt()
        self.adopted_writers: dict[int, PageWriter] = adopted.quarantined
        """QUARANTINED pages of a former messenger process, and the processes that may still write them."""
        keys = table.keys(np.asarray(adopted.sealed, np.int64))
        self.index: dict[BlockKey, int] = dict(zip(keys, adopted.sealed, strict=True))
        """Page of every block that can be found."""
        on_sealed(adopted.sealed)
        free = np.flatnonzero(table.states == FREE)[::-1].astype(np.int32)
        self._free = array("i", free.tobytes())
        self.num_users: Array = np.zeros(table.num_pages, np.int32)
        self.num_users_of = self.num_users.data
        """`num_users` as a memoryview, which is faster for a single page."""
        self.shares = Shares(table.num_pages)
        self.soft_pinned: Array = np.zeros(table.num_pages, np.bool_)
        self.num_idle = len(adopted.sealed)
        """Number of SEALED pages without users."""
        self._victims: deque[tuple[int, int]] = deque()
        """The next victims, and the last use of each when it was chosen."""
        # Uses are counted anew: a damaged `last_use` may be any number, even the largest.
        self._last_use = len(adopted.sealed)
        table.last_uses[adopted.sealed] = range(1, self._last_use + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_idle(self, page: int) -> bool:
        return self.table.state_of[page] == SEALED and not self.num_users_of[page]

    # -- users ------------------------------------------------------------------------------------

    def add_user(self, pages: Iterable[int]) -> None:
        """Add a user to each of `pages`."""
        state_of, num_users_of = self.table.state_of, self.num_users_of
        for page in pages:
            num_users = num_users_of[page]
            if not num_users and state_of[page] == SEALED:
                self.num_idle -= 1
            num_users_of[page] = num_users + 1

    def remove_user(self, pages: Iterable[int], *, used: bool = True) -> list[int]:
        """Remove a user from each of `pages`. Returns the pages that are not SEALED and have no user left.

        If `used`, SEALED pages count as used just now, the last one as the most recent. The caller must free
        the returned pages.
        """
        state_of, num_users_of, last_use_of = self.table.state_of, self.num_users_of, self.table.last_use_of
        ended = []
        for page in pages:
            num_users = num_users_of[page] - 1
            assert num_users >= 0
            num_users_of[page] = num_users
            if state_of[page] != SEALED:
                if not num_users:
                    ended.append(page)
                continue
            if not num_users:
                self.num_idle += 1
            if used:
                self._last_use += 1
                last_use_of[page] = self._last_use
        return ended

    # -- blocks -----------------------------------------------------------------------------------

    def take(self, num_pages: int, writer: PageWriter | None = None) -> list[int]:
        """Return `num_pages` free pages, now RESERVED, with the caller as their first user.

        The caller must make sure that as many pages are free (`num_free`).
        """
        split = len(self._free) - num_pages
        pages = self._free[split:].tolist()[::-1]
        assert len(pages) == num_pages
        del self._free[split:]
        self.table.reserve_all(pages, writer)
        self.shares.use(NO_TENANT, pages, ())
        num_users_of = self.num_users_of
        for page in pages:
            num_users_of[page] = 1
        return pages

    def seal(self, page: int, key: BlockKey, position: int, num_uses: int = 1) -> None:
        """Seal the block in a RESERVED page with a user, so that the block can be found by `key`.

        The index must not have the key yet.
        """
        assert key not in self.index
        assert self.num_users_of[page] > 0
        self.table.seal(page, key, self._next_use(), position, num_uses)
        self.index[key] = page
        self._on_sealed([page])

    def seal_all(self, pages: Sequence[int], keys: Sequence[BlockKey], positions: Sequence[int]) -> None:
        """Seal many blocks at once, which is faster than one `seal` for each. The keys must be distinct."""
        num_blocks = len(self.index) + len(pages)
        self.table.seal_all(pages, keys, self._last_use + 1, positions)
        self._last_use += len(pages)
        self.index.update(zip(keys, pages, strict=True))
        self._on_sealed(pages)
        assert len(self.index) == num_blocks
        assert self.num_users[pages].all()

    def unseal(self, page: int) -> None:
        """Remove the block in `page` from the index. The page is QUARANTINED until its last user has gone.

        If the page has no users, the caller must free it.
        """
        if self.num_users_of[page] == 0:
            self.num_idle -= 1
        self.table.quarantine(page)
        self._forget(page)

    def free(self, page: int) -> None:
        """Free a page that is not SEALED and has no users."""
        assert self.num_users_of[page] == 0
        self.table.free(page)
        self._free.append(page)

    # -- eviction ---------------------------------------------------------------------------------

    def coldest(self) -> int | None:
        """Return the idle page to be evicted next, without evicting it; None if no page is idle."""
        while True:
            while self._victims:
                page, last_use = self._victims[0]
                if self.is_idle(page) and self.table.last_use_of[page] == last_use:
                    return page
                self._victims.popleft()
            if self.num_idle == 0:
                return None
            idle = np.flatnonzero((self.table.states == SEALED) & (self.num_users == 0))
            if not len(idle):
                return None  # `num_idle` is wrong, which `problems` reports; do not search for ever
            self._victims.extend((page, self.table.last_use_of[page]) for page in self._chosen(idle))

    def _chosen(self, idle: Array) -> list[int]:
        """Return the next victims among the `idle` pages.

        If tenants have protected shares, the victims are pages that neither a share nor a soft pin protects.
        If there are no such pages, or no shares, the policy chooses among all idle pages, softly pinned ones
        last.
        """
        num_victims = max(1, self.table.num_pages // _VICTIMS_SHARE)
        num_disposable = self.shares.num_disposable(np.flatnonzero(self.table.states != FREE))
        if num_disposable is not None:
            may_go = num_disposable[self.shares.tenants_of(idle)] > 0
            plain = idle[may_go & ~self.soft_pinned[idle]]
            if len(plain):
                no_pins = np.zeros(len(plain), np.bool_)
                chosen = first_victims(self.policy, self.table, plain, no_pins, num_victims)
                return unprotected(chosen, self.shares.tenants_of(np.asarray(chosen)), num_disposable)
        return first_victims(self.policy, self.table, idle, self.soft_pinned[idle], num_victims)

    def evict(self, page: int) -> None:
        """Evict the block in an idle page, and free the page. For pages in DRAM, see `Evictor.evict`."""
        assert self.is_idle(page)
        self.num_idle -= 1
        self.table.free(page)
        self._free.append(page)
        self._forget(page)

    def evict_coldest(self, num_pages: int) -> None:
        """Evict the blocks in the `num_pages` coldest idle pages, or in all idle pages if there are fewer.

        The result is that of `coldest` and `evict` for each page; this is faster.
        """
        while num_pages > 0 and self.coldest() is not None:
            chosen: list[int] = []
            while self._victims and len(chosen) < num_pages:
                page, last_use = self._victims.popleft()
                if self.is_idle(page) and self.table.last_use_of[page] == last_use:
                    chosen.append(page)
            keys = self.table.keys(np.asarray(chosen))
            self.num_idle -= len(chosen)
            self.table.free_all(chosen)
            self._free.extend(chosen)
            self.soft_pinned[chosen] = False
            for key in keys:
                del self.index[key]
                self._on_removed(key)
            num_pages -= len(chosen)

    def pin_softly(self, page: int, is_pinned: bool) -> None:
        self.soft_pinned[page] = is_pinned
        self._victims.clear()

    def _forget(self, page: int) -> None:
        key = self.table.key(page)
        del self.index[key]
        self.soft_pinned[page] = False
        self._on_removed(key)

    def _next_use(self) -> int:
        self._last_use += 1
        return self._last_use

    # -- checks -----------------------------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        """Yield contradictions between index, free list and table. Looks at every page."""
        states = self.table.states
        sealed = np.flatnonzero(states == SEALED)
        free = np.sort(np.asarray(self._free, np.int64))
        if not np.array_equal(free, np.flatnonzero(states == FREE)):
            yield "the free list differs from the FREE pages"
        if self.num_users.min(initial=0) < 0:
            yield "a page has less than no users"
        if np.any(self.num_users[free]):
            yield "a FREE page is in use"
        if dict(zip(self.table.keys(sealed), sealed.tolist(), strict=True)) != self.index:
            yield "the index differs from the SEALED pages"
        if self.num_idle != np.count_nonzero(self.num_users[sealed] == 0):
            yield "the number of idle pages is wrong"
        if np.any((states == QUARANTINED) & (self.num_users == 0)):
            yield "a QUARANTINED page is used by nobody"
        if np.any((states == RESERVED) & (self.num_users == 0)):
            yield "a RESERVED page is used by nobody"
