"""Pools in memory. Their blocks have only keys and checksums."""

from dataclasses import dataclass, field

from kvstore.pool.claims import Block
from kvstore.pool.pages import PageTable
from kvstore.pool.pool import Pool
from mooncake.messages.blocks import BlockKey

NUM_PAGES, NUM_LAYERS = 6, 2
ALL_LAYERS = range(NUM_LAYERS)
CHECKSUMS = bytes(8 * NUM_LAYERS)
KEYS = [bytes([number]) * 16 for number in range(1, 10)]


@dataclass
class FakeTier:
    """A fake tier below DRAM, with the blocks that a test says it has."""

    is_accepting: bool = True
    held: set[BlockKey] = field(default_factory=set)

    def holds(self, key: BlockKey) -> bool:
        return key in self.held


def new_pool(num_pages: int = NUM_PAGES, lower: FakeTier | None = None) -> Pool:
    return Pool(PageTable.in_memory(num_pages, NUM_LAYERS), lower=lower)


def fill(pool: Pool, block: Block, layers: range = ALL_LAYERS) -> None:
    pool.record_arrival(block, layers, bytes(8 * len(layers)))


def store(pool: Pool, *keys: BlockKey, tenant: str = "") -> None:
    """Seal the blocks of `keys`, and leave them to eviction."""
    reservation = pool.reserve(1, keys, 0, tenant=tenant)
    for block in reservation.blocks:
        if not block.found:
            fill(pool, block)
    pool.release(reservation.reservation_id)


def fill_up(pool: Pool, num_blocks: int = NUM_PAGES) -> None:
    """Store this number of new blocks."""
    for number in range(num_blocks):
        store(pool, b"other" + number.to_bytes(11, "big"))
