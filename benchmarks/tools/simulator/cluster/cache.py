"""One instance's part of the KVCache pool in the simulator.

It is the real allocator (`kvstore.pool.allocator`), over pages without bytes. The allocator has the index and
the order of eviction. Two parts of the real pool are left out, because the pages have no bytes: transfers
that may still write, and leases that expire. Reservations that wait for free pages are served in the order in
which they came. KV events are collected for `PUBLISH_DELAY_S`, then published as one batch.

Owns: reservations, the wait for pages, KV events. Does not know: how long things take.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.tools.simulator.cluster.machines.clock import Clock
from kvstore.events.batches import EventLog
from kvstore.pool.allocator import PageAllocator
from kvstore.pool.pages import RESERVED, PageTable
from mooncake.config.policies import EvictionPolicy
from mooncake.config.sections import KVCacheConfig
from mooncake.messages.blocks import BlockKey
from mooncake.messages.kv_events import KVEvent
from mooncake.messages.pools import Tier

PUBLISH_DELAY_S = 0.01
"""Seconds for which events are collected into a batch."""
_WATERMARKS = KVCacheConfig()


@dataclass(slots=True, eq=False)
class Reservation:
    """The pages of a request: the pages of its keys, in order, then pages without a key.

    `is_found` says for each key whether the pool had its block.
    """

    keys: Sequence[BlockKey]
    pages: list[int]
    is_found: list[bool]

    @property
    def num_found(self) -> int:
        """The number of leading blocks that the pool had."""
        return self.is_found.index(False) if False in self.is_found else len(self.is_found)

    @property
    def missing(self) -> list[int]:
        """The indices of pages whose blocks the pool lacked, and of pages without a key."""
        missing = [index for index, is_found in enumerate(self.is_found) if not is_found]
        return missing + list(range(len(self.keys), len(self.pages)))


class _Pages(PageTable):
    """A page table for pages without bytes, so seals have no checksums."""

    def _sealed_digest(self, page: int) -> int:
        return 0


class SimulatedPool:
    """The simulated pool of one instance. `publish` gets the events of each batch, oldest first."""

    def __init__(
        self,
        clock: Clock,
        num_pages: int,
        policy: EvictionPolicy,
        publish: Callable[[list[KVEvent]], None] | None = None,
    ) -> None:
        self._clock, self._publish = clock, publish
        self._events = EventLog(capacity_batches=1)
        self._events.seal()
        self._events.on_event(lambda: clock.after(PUBLISH_DELAY_S, self._flush))
        self._table = _Pages.in_memory(num_pages, 1)
        self._evicted: list[BlockKey] = []
        self.allocator = PageAllocator(self._table, policy, self._evicted.append)
        self._low = int(_WATERMARKS.low_watermark * num_pages)
        self._high = int(_WATERMARKS.high_watermark * num_pages)
        self._waiting: deque[tuple[Sequence[BlockKey], int, Callable[[Reservation], None]]] = deque()

    @property
    def num_pages(self) -> int:
        return self._table.num_pages

    def reserve(
        self, keys: Sequence[BlockKey], num_private: int, on_reserved: Callable[[Reservation], None]
    ) -> Callable[[], None]:
        """Call `on_reserved` as soon as there are enough pages, perhaps at once.

        Returns a callback that cancels the wait.
        """
        wish = (keys, num_private, on_reserved)
        self._waiting.append(wish)
        self._serve()

        def take_back() -> None:
            if wish in self._waiting:
                self._waiting.remove(wish)
                self._serve()

        return take_back

    def _serve(self) -> None:
        while self._waiting:
            keys, num_private, on_reserved = self._waiting[0]
            reservation = self._try_to_reserve(keys, num_private)
            if reservation is None:
                return
            self._waiting.popleft()
            on_reserved(reservation)

    def _try_to_reserve(self, keys: Sequence[BlockKey], num_private: int) -> Reservation | None:
        """Return a reservation of found blocks, and of fresh pages for the others.

        Returns None if too few pages are free or can be evicted.
        """
        allocator = self.allocator
        places = list(map(allocator.index.get, keys))
        found = [page for page in places if page is not None]
        num_missing = len(keys) - len(found) + num_private
        allocator.add_user(found)  # the evictions below must not take them
        if num_missing > allocator.num_free + allocator.num_idle:
            allocator.remove_user(found, used=False)
            return None
        self._make_room(num_missing)
        for page in found:
            self._table.use(page)
        fresh = allocator.take(num_missing)
        pages = fresh
        if found:
            left = iter(fresh)
            pages = [next(left) if page is None else page for page in places]
            pages += left
        return Reservation(keys, pages, [page is not None for page in places])

    def _make_room(self, num_pages: int) -> None:
        if self.allocator.num_free < num_pages:
            self.allocator.evict_coldest(num_pages - self.allocator.num_free)
            self._events.removed_all(Tier.DRAM, self._evicted)
            self._evicted.clear()

    def arrived(self, reservation: Reservation, blocks: range) -> None:
        """Record that the reservation's `blocks` have arrived. From now on their keys are found."""
        pages, keys, known, state_of = (
            reservation.pages,
            reservation.keys,
            self.allocator.index,
            self._table.state_of,
        )
        new = [i for i in blocks if state_of[pages[i]] == RESERVED and keys[i] not in known]
        if new:
            new_keys = [keys[i] for i in new]
            self.allocator.seal_all([pages[i] for i in new], new_keys, new)
            self._events.stored_all(Tier.DRAM, new_keys)

    def release(self, reservation: Reservation) -> None:
        """Release the pages of a reservation.

        Pages with blocks may be evicted from now on, the last block first. Pages without blocks are free at
        once.
        """
        self._unclaim(reservation.pages[::-1])

    def lease(self, keys: Sequence[BlockKey]) -> list[int]:
        """Lease the leading blocks of `keys` that the pool has, and return their pages."""
        pages: list[int] = []
        for key in keys:
            page = self.allocator.index.get(key)
            if page is None:
                break
            pages.append(page)
        self.allocator.add_user(pages)
        return pages

    def end_lease(self, pages: list[int]) -> None:
        """End a lease. The reader has finished."""
        self._unclaim(pages[::-1])

    def _unclaim(self, pages: list[int]) -> None:
        for page in self.allocator.remove_user(pages):
            self.allocator.free(page)
        if self.allocator.num_free < self._low:
            self._make_room(self._high)  # as the server does in the background
        if self._waiting:
            self._clock.after(0.0, self._serve)

    def _flush(self) -> None:
        batch = self._events.seal()
        if batch is not None and self._publish is not None:
            self._publish(batch.events)
