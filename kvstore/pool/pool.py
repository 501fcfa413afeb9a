"""The DRAM tier of one instance's part of the KVCache pool: allocation and users of pages.

A block is found only while it is sealed. A *reservation* is one request's claim on pages, without a deadline:
on the pages of its sealed blocks, and on fresh pages for its other blocks. A *lease* is a claim to read
pages, and ends at its deadline at the latest. A *hold* is a claim on one page while its bytes may be read or
written (`holds`). A *pin* keeps a block that is not in use (`pins`). (Mooncake, section 3: paged blocks,
deduplicated by key, eviction by policy.)

Invariants:

- the only users of a page (see `PageAllocator`) are its reservations, its leases, its hard pin and its holds;
- a page is RESERVED iff exactly one reservation has it and its block was never sealed there: the block is
  incomplete, has no key, or another block was sealed under its key first;
- a page with a user is never evicted, and never reused for another block.

`check_integrity` checks the first invariant, and that each RESERVED page is in exactly one reservation.

Owns: reservations, leases. Does not know: bytes, sockets, the clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from kvstore.events.batches import EventLog
from kvstore.pool.allocator import PageAllocator
from kvstore.pool.claims import NOBODY, Block, PageLease, PageReservation, layer_mask
from kvstore.pool.deadlines import Deadlines
from kvstore.pool.evictor import Evictor, LowerTier
from kvstore.pool.hits import Hits, PoolCounters
from kvstore.pool.holds import Holds
from kvstore.pool.pages import RESERVED, SEALED, PageTable, PageWriter
from kvstore.pool.pins import Pins
from mooncake.config.policies import EvictionPolicy
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier


class Pool:
    """The states and users of all pages of a table. The table's sealed blocks are adopted.

    `on_sealed` is called with pages whose blocks can be found from then on, adopted ones included.
    `low_watermark`, `on_space` and `on_pressure` are described at `Evictor`.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        events: EventLog | None = None,
        lower: LowerTier | None = None,
        low_watermark: int = 0,
        on_sealed: Callable[[Sequence[int]], None] = lambda pages: None,
        on_space: Callable[[], None] = lambda: None,
        on_pressure: Callable[[], None] = lambda: None,
    ) -> None:
        self.table = table
        self.allocator = PageAllocator(table, policy, self._removed, on_sealed)
        self.counters = PoolCounters()
        self.evictor = Evictor(
            self.allocator,
            lower,
            low_watermark=low_watermark,
            on_evict=self._evicting,
            on_space=on_space,
            on_pressure=on_pressure,
        )
        self.hits = Hits(self.evictor.ghosts)
        self.pins = Pins(self.allocator, self._remove_user)
        self._events = events
        self._lower = lower
        self._all_layers = (1 << table.num_layers) - 1
        self._last_id = 0
        self.reservations: dict[int, PageReservation] = {}
        """Open reservations by id. Other modules only read this dict."""
        self.leases: dict[int, PageLease] = {}
        """Leases by id. Other modules only read this dict."""
        self._lease_deadlines = Deadlines[int]()
        self.holds = Holds(self.allocator, self._remove_user)

    # -- blocks -----------------------------------------------------------------------------------

    def find(self, key: BlockKey) -> int | None:
        """Return the page of the sealed block with this key; None if there is no such block."""
        return self.allocator.index.get(key)

    def locate(self, keys: Iterable[BlockKey]) -> list[Tier | None]:
        """Return the fastest tier of each block; None for a missing block."""
        index, lower = self.allocator.index, self._lower
        if lower is None:
            return [Tier.DRAM if key in index else None for key in keys]
        return [Tier.DRAM if key in index else Tier.SSD if lower.holds(key) else None for key in keys]

    def remove(self, key: BlockKey) -> bool:
        """Remove a block from the index. Returns whether the block was there. Reads in flight may finish."""
        page = self.find(key)
        if page is None:
            return False
        self.counters.num_removed += 1
        self._unseal(page)
        return True

    def drop(self, page: int) -> None:
        """Drop the damaged block in `page`. Does nothing if the page is not SEALED."""
        if self.table.state_of[page] == SEALED:
            self.counters.num_dropped += 1
            self._unseal(page)

    def _unseal(self, page: int) -> None:
        self.pins.remove([self.table.key(page)])
        self.allocator.unseal(page)
        if not self.allocator.num_users_of[page]:
            self._free(page)
            self.evictor.users_left()

    def _evicting(self, page: int) -> None:
        """Record that the block in this idle page is about to leave DRAM."""
        self.pins.remove([self.table.key(page)])
        self.hits.left(page)

    def _removed(self, key: BlockKey) -> None:
        """Record that the index has lost a block."""
        if self._events is not None:
            self._events.removed(Tier.DRAM, key)

    # -- reservations -----------------------------------------------------------------------------

    def reserve(
        self,
        owner: int,
        keys: Sequence[BlockKey],
        num_private: int,
        writer: PageWriter | None = None,
        tenant: str = "",
    ) -> PageReservation:
        """Reserve a page for each key and `num_private` pages without a key, all or none.

        A sealed block keeps its page. `writer` will write the fresh pages through its own mapping; None if
        this process writes them. The pages count towards the share of `tenant`; an empty name stands for no
        tenant. Raises PoolFullError if too few pages are free or can be evicted now, PoolError if the pool
        has too few pages at all.
        """
        self._check_size(len(keys) + num_private)
        number = self.allocator.shares.enter(tenant)  # the evictions below spare its share
        index = self.allocator.index
        places = [index.get(key) for key in keys]
        found = list(dict.fromkeys(page for page in places if page is not None))
        num_missing = places.count(None) + num_private
        self.allocator.add_user(found)  # the evictions below must not take them
        try:
            self.evictor.require(num_missing)
        except PoolFullError:
            self.allocator.remove_user(found, used=False)
            raise
        blocks = self._blocks([*keys, *[None] * num_private], places, writer)
        for block in blocks:
            if block.found:
                block.tier = self.hits.tier(block.page)
        self._use(found)
        self.allocator.shares.use(number, [block.page for block in blocks if not block.found], found)
        self.hits.missed(key for key, page in zip(keys, places, strict=True) if page is None)
        reservation = PageReservation(self._next_id(), owner, blocks)
        self.reservations[reservation.reservation_id] = reservation
        return reservation

    def check_room(self, keys: Sequence[BlockKey], num_private: int) -> None:
        """Check that free and idle pages suffice for these blocks. Raises the errors of `reserve`."""
        self._check_size(len(keys) + num_private)
        places = [self.find(key) for key in keys]
        found = {page for page in places if page is not None}
        self.evictor.check(places.count(None) + num_private, sum(map(self.allocator.is_idle, found)))

    def _check_size(self, num_blocks: int) -> None:
        if num_blocks > self.table.num_pages:
            raise PoolError(f"{num_blocks} blocks do not fit into a pool of {self.table.num_pages} pages")

    def renew_pages(self, reservation: PageReservation, blocks: Sequence[Block]) -> None:
        """Replace the pages of blocks of `reservation`, as a transfer may still write the old pages.

        Layers that have arrived are lost. Does nothing if the reservation has been released. Raises
        PoolFullError, and changes nothing, if there is no room.
        """
        if self.reservations.get(reservation.reservation_id) is not reservation:
            return
        self.evictor.require(len(blocks))
        old_pages = [block.page for block in blocks]
        writer = self.table.writer(old_pages[0]) if blocks else None
        pages = self.allocator.take(len(blocks), writer)
        self.allocator.shares.move(old_pages, pages)
        for block, page in zip(blocks, pages, strict=True):
            del reservation.by_page[block.page]
            block.page, block.generation, block.arrived = page, self.table.generation(page), 0
            reservation.by_page[page] = block
        self._remove_user(old_pages)

    def is_complete(self, block: Block) -> bool:
        return block.arrived == self._all_layers

    def record_arrival(self, block: Block, layers: range, checksums: bytes) -> None:
        """Record that `layers` of `block` are in its page.

        No layer may arrive twice. `checksums`: the little-endian xxh3-64 of these layers, concatenated. The
        last layer seals the block, unless the block is private, or a block with its key is sealed in another
        page.
        """
        assert not block.arrived & layer_mask(layers), "a layer arrives once"
        self.table.set_checksums(block.page, layers, checksums)
        block.arrived |= layer_mask(layers)
        if self.is_complete(block) and block.key is not None and self.find(block.key) is None:
            self.allocator.seal(block.page, block.key, block.position)
            if self._events is not None:
                self._events.stored(Tier.DRAM, block.key, block.tokens)

    def begin_promotion(self, key: BlockKey, position: int) -> PageReservation:
        """Reserve a page for a block that the lower tier holds. Raises PoolFullError without room.

        `position`: the block's position (`Block.position`) that the lower tier has kept.
        """
        self.evictor.require(1)
        (block,) = self._blocks([key], [None], None)
        block.position = position
        reservation = PageReservation(self._next_id(), NOBODY, [block])
        self.reservations[reservation.reservation_id] = reservation
        return reservation

    def finish_promotion(self, reservation: PageReservation, checksums: bytes, num_uses: int) -> None:
        """Record that the whole block of `begin_promotion` is in its page and verified."""
        (block,) = reservation.blocks
        self.record_arrival(block, range(self.table.num_layers), checksums)
        if self.table.state_of[block.page] == SEALED:
            self.table.num_uses[block.page] = num_uses
            self.hits.promoted(block.page)

    def release(self, reservation_id: int) -> None:
        """Release all pages of a reservation. Idempotent."""
        reservation = self.reservations.pop(reservation_id, None)
        if reservation is not None:
            # Last block first: it is of no use without those before it, so it should be evicted first.
            self._remove_user(list(reversed(reservation.by_page)))

    # -- leases -----------------------------------------------------------------------------------

    def lease(self, owner: int, keys: Sequence[BlockKey], deadline_s: float) -> PageLease:
        """Lease the blocks of `keys` that are in DRAM.

        The blocks stay in their pages until `end_lease`, or until `expire` is called after `deadline_s`.
        """
        index = self.allocator.index
        lease = PageLease(self._next_id(), owner, [index.get(key) for key in keys], deadline_s)
        found = lease.claimed_pages
        self._use(found)
        self.hits.missed(key for key, page in zip(keys, lease.pages, strict=True) if page is None)
        self.allocator.add_user(found)
        self.leases[lease.lease_id] = lease
        self._lease_deadlines.set(lease.lease_id, deadline_s)
        return lease

    def end_lease(self, lease_id: int) -> None:
        """End a lease. Idempotent."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self._lease_deadlines.remove(lease_id)
            self._remove_user(lease.claimed_pages[::-1])

    def claims_of(self, owner: int) -> tuple[list[int], list[int]]:
        """Return the ids of `owner`'s reservations, and of its leases."""
        reservations = [r.reservation_id for r in self.reservations.values() if r.owner == owner]
        return reservations, [lease.lease_id for lease in self.leases.values() if lease.owner == owner]

    # -- time -------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """End the leases and pins whose deadline has passed."""
        for lease_id in self._lease_deadlines.take_expired(now_s):
            self.counters.num_expired_leases += 1
            self._remove_user(self.leases.pop(lease_id).claimed_pages[::-1])
        self.pins.expire(now_s)
        self.allocator.shares.tick(now_s)

    # ---------------------------------------------------------------------------------------------

    def _blocks(
        self, keys: Sequence[BlockKey | None], places: list[int | None], writer: PageWriter | None
    ) -> list[Block]:
        """Return a block for each key, in its page or in a fresh page.

        `places` has an entry for each of the first keys: the key's page, or None for a fresh page. The keys
        after these get fresh pages.
        """
        fresh = self.allocator.take(len(keys) - len(places) + places.count(None), writer)
        self.evictor.pages_taken()
        pages_left = iter(fresh)
        pages = [next(pages_left) if page is None else page for page in places] + list(pages_left)
        is_fresh = set(fresh)
        blocks = []
        for position, (key, page) in enumerate(zip(keys, pages, strict=True)):
            found = page not in is_fresh
            arrived = self._all_layers if found else 0
            blocks.append(Block(key, page, self.table.generation(page), found, arrived, position))
        return blocks

    def _use(self, pages: Collection[int]) -> None:
        self.hits.found(pages)
        for page in pages:
            self.table.use(page)

    def _remove_user(self, pages: Collection[int], *, used: bool = True) -> None:
        for page in self.allocator.remove_user(pages, used=used):
            self._free(page)
        if self.holds.num_of:
            for page in pages:
                # A RESERVED page whose users are holds only has lost its reservation. It is out of use until
                # the holds end: late bytes must not reach its next owner. (A SEALED page is only read.)
                if self.table.state_of[page] == RESERVED and self.holds.are_all_users(page):
                    self.table.quarantine(page)
        self.evictor.users_left()

    def _free(self, page: int) -> None:
        self.hits.left(page)
        self.allocator.free(page)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # -- checks -----------------------------------------------------------------------------------

    @property
    def num_changes(self) -> int:
        """A number that grows with every reservation or lease, and when a page becomes free or evictable.

        It does not grow when layers arrive, or when a hold or pin begins. While the number stays the same,
        the pool counts as idle.
        """
        return self._last_id + self.evictor.space_epoch

    @property
    def num_used_pages(self) -> int:
        """The number of pages that a reservation, lease, hold or hard pin uses."""
        return int(np.count_nonzero(self.allocator.num_users))

    def orphans(self) -> list[int]:
        """Return the pages whose number of users differs from the number of claims, pins and holds on them.

        There should be none: a page with too many users never becomes free.
        """
        known: Counter[int] = Counter(self.holds.num_of)
        known.update(page for r in self.reservations.values() for page in r.by_page)
        known.update(page for lease in self.leases.values() for page in lease.claimed_pages)
        known.update(self.pins.hard_pages())
        users = self.allocator.num_users.copy()
        pages = np.fromiter(known.keys(), np.int64, len(known))
        users[pages] -= np.fromiter(known.values(), np.int32, len(known))
        orphans: list[int] = np.flatnonzero(users).tolist()
        return orphans

    def check_integrity(self) -> str | None:
        """Check that claims, pins, holds and page table agree. Returns what is wrong; None if all is well."""
        problems = list(self.allocator.problems())
        if self.orphans():
            problems.append("a page's users are not its reservations, leases, pins and holds")
        if min(self.holds.num_of.values(), default=1) < 1:
            problems.append("a hold count is not positive")
        writers = Counter(
            page
            for r in self.reservations.values()
            for page in r.by_page
            if self.table.state_of[page] == RESERVED
        )
        if writers != Counter(np.flatnonzero(self.table.states == RESERVED).tolist()):
            problems.append("a RESERVED page has no reservation, or several")
        return "; ".join(problems) or None
