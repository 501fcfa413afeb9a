"""Pools in memory, whose blocks are nothing but keys and checksums."""

from dataclasses import dataclass, field

from kvstore.pool.claims import Block, PageReservation
from kvstore.pool.pages import PageTable
from kvstore.pool.pool import Pool
from mooncake.messages.blocks import BlockKey

NUM_PAGES, NUM_LAYERS = 6, 2
ALL_LAYERS = range(NUM_LAYERS)
CHECKSUMS = bytes(8 * NUM_LAYERS)
KEYS = [bytes([number]) * 16 for number in range(1, 10)]


@dataclass
class FakeTier:
    """What is below DRAM: says that it holds what the test put there."""

    is_accepting: bool = True
    held: set[BlockKey] = field(default_factory=set)

    def holds(self, key: BlockKey) -> bool:
        return key in self.held


def new_pool(num_pages: int = NUM_PAGES, lower: FakeTier | None = None) -> Pool:
    return Pool(PageTable.in_memory(num_pages, NUM_LAYERS), lower=lower)


def fill(pool: Pool, reservation: PageReservation, block: Block, layers: range = ALL_LAYERS) -> None:
    pool.record_arrival(reservation, block, layers, bytes(8 * len(layers)))


def store(pool: Pool, *keys: BlockKey, tenant: str = "") -> None:
    """Seals `keys` and leaves them to eviction."""
    reservation = pool.reserve(1, keys, 0, tenant=tenant)
    for block in reservation.blocks:
        if not block.found:
            fill(pool, reservation, block)
    pool.release(reservation.reservation_id)


def fill_up(pool: Pool, num_blocks: int = NUM_PAGES) -> None:
    """Stores so many blocks that nobody has seen before."""
    for number in range(num_blocks):
        store(pool, b"other" + number.to_bytes(11, "big"))
