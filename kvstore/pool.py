"""The KVCache pool of one instance: which page holds which block, who uses it, which goes next.

A block is found only while it is sealed. A *reservation* is one request's claim: leases on the blocks
that are there, fresh pages for those that are not. A *hold* is one transfer's claim on one page, from
the moment its bytes may be read or written until nobody can do so any more. A page is reused only when
it has neither (Mooncake, section 3: paged blocks, LRU eviction, deduplication by key).

Owns: index, leases, holds, eviction. Does not know: bytes, sockets, time.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.pages import PageState, PageTable
from mooncake.blocks import BlockKey
from mooncake.errors import PoolError, PoolFullError


@dataclass(slots=True)
class Block:
    """One block of a reservation. Invariant: SEALED or lost the race for its key iff all layers are there."""

    key: BlockKey | None
    page: int
    generation: int
    found: bool
    """sealed already when it was reserved"""
    arrived: int
    """bit l is set when layer l is there"""


@dataclass(slots=True)
class Reservation:
    """A request's pages: those of its keys, in order, then private ones."""

    reservation_id: int
    owner: int
    blocks: list[Block]
    by_page: dict[int, Block] = field(init=False)

    def __post_init__(self) -> None:
        self.by_page = {block.page: block for block in self.blocks}


@dataclass(slots=True)
class PoolCounters:
    """Totals since the pool was opened, in blocks."""

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_dropped: int = 0


class Pool:
    """State machine over a page table; adopts the sealed pages that are already in it.

    `on_space` is called whenever a page becomes free or evictable.
    """

    def __init__(self, table: PageTable, on_space: Callable[[], None]) -> None:
        self.table = table
        self._on_space = on_space
        self.counters = PoolCounters()
        self.space_epoch = 0
        """number of times that a page became free or evictable"""
        self._all_layers = (1 << table.num_layers) - 1
        self._reservations: dict[int, Reservation] = {}
        self._last_reservation_id = 0
        self._num_leases: Counter[int] = Counter()
        """reservations that use a page, by page; no zeros"""
        self._num_holds: Counter[int] = Counter()
        """outstanding transfers that touch a page, by page; no zeros"""
        sealed = table.adopt()
        self._index: dict[BlockKey, int] = {table.key(page): page for page in sealed}
        self._evictable: OrderedDict[int, None] = OrderedDict.fromkeys(sealed)
        """sealed pages that nobody uses, least recently used first"""
        self._free = [p for p in reversed(range(table.num_pages)) if table.state(p) is PageState.FREE]
        self._last_use = max((table.last_use(page) for page in sealed), default=0)

    # -- reservations -----------------------------------------------------------------------------

    def reserve(self, owner: int, keys: Sequence[BlockKey], num_private: int) -> Reservation:
        """Leases what is sealed and reserves a page for everything else; all or nothing.

        Raises PoolFullError if not enough pages are free or evictable now, PoolError if the pool has
        not enough pages at all.
        """
        num_blocks = len(keys) + num_private
        if num_blocks > self.table.num_pages:
            raise PoolError(f"{num_blocks} blocks do not fit into a pool of {self.table.num_pages} pages")
        found = {key: self._index[key] for key in keys if key in self._index}
        num_evictable = len(self._evictable) - sum(page in self._evictable for page in found.values())
        num_missing = sum(key not in found for key in keys) + num_private
        if num_missing > len(self._free) + num_evictable:
            raise PoolFullError(
                f"{num_missing} pages are needed, {len(self._free)} are free and {num_evictable} evictable"
                f" of {self.table.num_pages}"
            )
        for page in found.values():
            self._evictable.pop(page, None)
        blocks = [
            self._found_block(key, found[key]) if key in found else self._fresh_block(key)
            for key in (*keys, *[None] * num_private)
        ]
        self.counters.num_hits += len(keys) + num_private - num_missing
        self.counters.num_misses += num_missing - num_private
        self._last_reservation_id += 1
        reservation = Reservation(self._last_reservation_id, owner, blocks)
        self._reservations[reservation.reservation_id] = reservation
        self._num_leases.update(iter(reservation.by_page))
        return reservation

    def find(self, reservation_id: int) -> Reservation | None:
        return self._reservations.get(reservation_id)

    def is_complete(self, block: Block) -> bool:
        return block.arrived == self._all_layers

    def arrived(self, reservation: Reservation, block: Block, layers: range, checksums: bytes) -> None:
        """`layers` of `block` are in its page. The last one seals the block, if its key is still free."""
        assert not block.arrived & layer_mask(layers), "a layer arrives once"
        self.table.set_checksums(block.page, layers, checksums)
        block.arrived |= layer_mask(layers)
        if self.is_complete(block) and block.key is not None and block.key not in self._index:
            self._index[block.key] = block.page
            self.table.seal(block.page, block.key, self._next_use())

    def release(self, reservation_id: int) -> None:
        """Gives up all of a reservation's pages. Idempotent."""
        reservation = self._reservations.pop(reservation_id, None)
        if reservation is None:
            return
        # Last block first: a block is of no use without those before it, so it should be evicted first.
        for page in reversed(reservation.by_page):
            _decrement(self._num_leases, page)
            self._settle(page)

    def reservations_of(self, owner: int) -> list[int]:
        """Ids of what `owner` has reserved."""
        return [r.reservation_id for r in self._reservations.values() if r.owner == owner]

    # -- transfers --------------------------------------------------------------------------------

    def hold(self, page: int) -> None:
        """A transfer may read or write `page` from now on. Only for pages of a reservation."""
        assert self._num_leases[page], f"page {page} is not reserved"
        self._num_holds[page] += 1

    def unhold(self, page: int) -> None:
        """That transfer can not touch `page` any more."""
        _decrement(self._num_holds, page)
        self._settle(page)

    def drop(self, page: int) -> None:
        """The sealed block in `page` is damaged: nobody finds it any more."""
        if self.table.state(page) is PageState.SEALED:
            self.counters.num_dropped += 1
            self._unseal(page)
            self._settle(page)

    # -- pages ------------------------------------------------------------------------------------

    def _found_block(self, key: BlockKey, page: int) -> Block:
        return Block(key, page, self.table.generation(page), found=True, arrived=self._all_layers)

    def _fresh_block(self, key: BlockKey | None) -> Block:
        if not self._free:
            page, _ = self._evictable.popitem(last=False)
            del self._index[self.table.key(page)]
            self.table.free(page)
            self._free.append(page)
            self.counters.num_evictions += 1
        page = self._free.pop()
        self.table.reserve(page)
        return Block(key, page, self.table.generation(page), found=False, arrived=0)

    def _unseal(self, page: int) -> None:
        self.table.quarantine(page)
        del self._index[self.table.key(page)]
        self._evictable.pop(page, None)

    def _settle(self, page: int) -> None:
        """Moves a page on after it lost a user."""
        state = self.table.state(page)
        if page in self._num_leases:
            return
        if page in self._num_holds:
            if state is PageState.RESERVED:
                self.table.quarantine(page)
            return
        if state is PageState.SEALED:
            self.table.touch(page, self._next_use())
            self._evictable[page] = None
        else:
            self.table.free(page)
            self._free.append(page)
        self.space_epoch += 1
        self._on_space()

    def _next_use(self) -> int:
        self._last_use += 1
        return self._last_use

    # -- checks -----------------------------------------------------------------------------------

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    @property
    def num_used_pages(self) -> int:
        """Pages that some reservation or transfer uses."""
        return len(self._num_leases.keys() | self._num_holds.keys())

    def check_integrity(self) -> str | None:
        """What is wrong, or None: every page is accounted for exactly once."""
        pages = range(self.table.num_pages)
        states = {page: self.table.state(page) for page in pages}
        leases = Counter(page for r in self._reservations.values() for page in r.by_page)
        used = self._num_leases.keys() | self._num_holds.keys()
        sealed = {page for page in pages if states[page] is PageState.SEALED}
        writers = Counter(
            page
            for r in self._reservations.values()
            for page in r.by_page
            if states[page] is PageState.RESERVED
        )
        checks = {
            "lease counts differ from the reservations": leases != self._num_leases,
            "a hold or lease count is not positive": min(
                (*self._num_holds.values(), *self._num_leases.values()), default=1
            )
            < 1,
            "the free list differs from the FREE pages": sorted(self._free)
            != [page for page in pages if states[page] is PageState.FREE],
            "a FREE page is in use": any(page in used for page in self._free),
            "the index differs from the SEALED pages": sealed != set(self._index.values())
            or any(self.table.key(page) != key for key, page in self._index.items()),
            "the eviction order differs from the unused SEALED pages": set(self._evictable) != sealed - used,
            "a RESERVED page has not exactly one reservation": writers
            != Counter(page for page in pages if states[page] is PageState.RESERVED),
            "a QUARANTINED page is used by nobody": any(
                states[page] is PageState.QUARANTINED and page not in used for page in pages
            ),
        }
        return "; ".join(text for text, is_wrong in checks.items() if is_wrong) or None


def layer_mask(layers: range) -> int:
    """Bits `[layers.start, layers.stop)`."""
    return (1 << layers.stop) - (1 << layers.start)


def _decrement(counts: Counter[int], page: int) -> None:
    counts[page] -= 1
    assert counts[page] >= 0
    if counts[page] == 0:
        del counts[page]
