"""Reads: blocks that other messengers fetch from this pool.

Owns: the leases of these reads. Does not know: sockets.
"""

import logging
from collections.abc import Callable, Sequence

from kvstore.pool.claims import NOBODY
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.ssd.mover import Mover
from messenger.receiver.served_pool import Readable
from messenger.wire.checksums import layer_checksums
from mooncake.errors import PoolError
from mooncake.messages.blocks import KEY_BYTES, BlockKey

log = logging.getLogger(__name__)

_LEASE_S = 60.0
"""Seconds of a read's lease. A longer read detects by the checksums that its blocks are gone."""


class Reads:
    """The `ReadSource` over a pool, for reads of other messengers. `now_s` is the clock of its leases."""

    def __init__(self, pool: Pool, mover: Mover, segment: Segment, now_s: Callable[[], float]) -> None:
        self._pool = pool
        self._mover = mover
        self._segment = segment
        self._now_s = now_s

    async def lease(
        self, keys: Sequence[BlockKey], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        """Lease blocks as `ReadSource.lease` does. Raises PoolError for an invalid key.

        Blocks that only SSD has are promoted first, as far as there is room.
        """
        _check(keys)
        async with self._mover.keep_promoted(keys, patiently=False):
            return self._lease(keys, layers, heads)

    def lease_now(
        self, keys: Sequence[BlockKey], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]] | None:
        """Lease blocks now, as `ReadSource.lease_now` does. Returns None if only SSD has one of them."""
        _check(keys)
        return self._lease(keys, layers, heads) if self._mover.is_promoted(keys) else None

    def count_read(self, keys: Sequence[BlockKey]) -> int:
        """Count blocks that a peer has read in place. Returns how many of them are still stored."""
        _check(keys)
        there = [key for key in keys if self._pool.find(key) is not None]
        lease = self._pool.lease(NOBODY, there, self._now_s())
        self._pool.end_lease(lease.lease_id)
        return len(there)

    def verify(self, keys: Sequence[BlockKey], layers: range) -> None:
        """Verify `layers` of each of these blocks that is in DRAM, and drop damaged blocks."""
        positions = self._segment.layout.positions(layers)
        for key in keys:
            page = self._pool.find(key)
            if page is not None:
                self._is_intact(page, positions)

    def _is_intact(self, page: int, layers: range) -> bool:
        """Return whether layers of a page match their checksums. The block is dropped if they do not."""
        is_intact = self._segment.is_intact(page, layers, self._pool.table.checksums(page, layers))
        if not is_intact:
            log.error("page %d is damaged, its block is dropped", page)
            self._pool.drop(page)
        return is_intact

    def _lease(
        self, keys: Sequence[BlockKey], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        lease = self._pool.lease(NOBODY, keys, self._now_s() + _LEASE_S)
        segment, table = self._segment, self._pool.table
        layers = segment.layout.positions(layers)
        if heads is not None:
            blocks = self._parts(lease.pages, layers.start, segment.layout.head_positions(heads))
            return blocks, lambda: self._pool.end_lease(lease.lease_id)
        blocks = [
            Readable(
                index,
                segment.layers_view(page, layers),
                segment.layers_offset(page, layers.start),
                table.checksums(page, layers),
            )
            for index, page in enumerate(lease.pages)
            if page is not None
        ]
        return blocks, lambda: self._pool.end_lease(lease.lease_id)

    def _parts(self, pages: Sequence[int | None], layer: int, heads: range) -> list[Readable]:
        """Return `heads` of one layer of each page, with their checksums.

        A damaged block is dropped first, as the new checksum of a few heads would hide the damage.
        """
        segment, layers, blocks = self._segment, range(layer, layer + 1), []
        for index, page in enumerate(pages):
            if page is None or not self._is_intact(page, layers):
                continue
            view = segment.heads_view(page, layer, heads)
            offset = segment.heads_offset(page, layer, heads)
            blocks.append(Readable(index, view, offset, layer_checksums(view, len(view))))
        return blocks


def _check(keys: Sequence[BlockKey]) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise PoolError(f"a key of {len(key)} bytes; keys have {KEY_BYTES}")
