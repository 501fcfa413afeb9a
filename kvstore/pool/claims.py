"""What users hold of a pool: reservations (pages to write) and leases (pages to read, for a while).

Owns: what they consist of, the deadlines of leases. Does not know: pages' states, who the users are.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.events.batches import BlockTokens
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier

NOBODY = 0
"""Owner of what the pool does for itself"""
_SPARE_DEADLINES = 1000


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
    position: int
    """index in its prompt"""
    tokens: BlockTokens | None = None
    tier: Tier | None = None
    """of a found block: where it was before anybody asked for it"""


@dataclass(slots=True)
class Reservation:
    """A request's pages: those of its keys, in order, then private ones."""

    reservation_id: int
    owner: int
    blocks: list[Block]
    by_page: dict[int, Block] = field(init=False)

    def __post_init__(self) -> None:
        self.by_page = {block.page: block for block in self.blocks}


def layer_mask(layers: range) -> int:
    """Bits `[layers.start, layers.stop)`, as in `Block.arrived`."""
    return (1 << layers.stop) - (1 << layers.start)


@dataclass(frozen=True, slots=True)
class Lease:
    """Somebody reads these pages. `pages` has None for the keys that were not there."""

    lease_id: int
    owner: int
    pages: list[int | None]
    deadline_s: float

    @property
    def claimed_pages(self) -> list[int]:
        """Each page once: keys may have been named twice."""
        return list(dict.fromkeys(page for page in self.pages if page is not None))


class Leases:
    """All leases of a pool."""

    def __init__(self) -> None:
        self._by_id: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        """also of some that have ended"""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_id.values())

    def put(self, lease: Lease) -> None:
        self._by_id[lease.lease_id] = lease
        heapq.heappush(self._deadlines, (lease.deadline_s, lease.lease_id))
        if len(self._deadlines) > 2 * len(self._by_id) + _SPARE_DEADLINES:
            self._deadlines = [(lease.deadline_s, lease.lease_id) for lease in self]
            heapq.heapify(self._deadlines)

    def find(self, lease_id: int) -> Lease | None:
        return self._by_id.get(lease_id)

    def take(self, lease_id: int) -> Lease | None:
        """Takes a lease away."""
        return self._by_id.pop(lease_id, None)

    def take_expired(self, now_s: float) -> Iterator[Lease]:
        """Takes away every lease whose deadline has come."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.take(lease_id)
            if lease is not None:
                yield lease
