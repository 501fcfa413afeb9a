"""Grants: pages of a reservation that other messengers may write to.

This module is the receiving half of a transfer. Every remote write names grant, page and generation. A
write to an open grant is refused unless page and generation are those of the grant. Layers that have arrived
already are not written again; a repeated write of the same bytes is acknowledged. A write to one of the last
1,024 complete grants is acknowledged unseen: nothing of it is checked, and nothing is placed. A write to any
other grant is refused. A grant may have several writers, each with other layers, heads or blocks.
The loss of any writer before the grant is complete fails the grant.

Where this process receives the bytes (over TCP, and over shared memory without a copy slot), a write is
refused before a byte is placed, and a sealed page is never written. A writer that places the bytes itself
(over shared memory, or over RDMA in the pages that are open to it) can do so until the grant ends; it is
trusted not to write a page that has been sealed meanwhile. Its report of the write is checked like any write.

A layer that comes in parts (ranges of heads, see `partial_layers`) counts as arrived when all of its parts
have arrived. Each part is verified by its own checksum; the layer's checksum is then computed from the page.

Owns: open grants. Does not know: sockets.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.pool.claims import Block, PageReservation, layer_mask
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.transfer.partial_layers import PartialLayers
from messenger.receiver.served_pool import GrantWriter, WriteRefused
from messenger.shm.copy_table import CopyTable
from messenger.transport.exposures import Range
from messenger.wire.checksums import CHECKSUM_BYTES, layer_checksums
from messenger.wire.messages import WriteEntry
from mooncake.doubling import Doubling
from mooncake.errors import PoolError, TransferError
from mooncake.messages.pools import Grant, GrantedPage, MessengerAddress

log = logging.getLogger(__name__)

_NUM_COMPLETED = 1024
"""The number of completed grants that are remembered: the latest ones."""
_NUM_TRIES = 8
"""Attempts to find a free entry of the copy table."""


@dataclass(slots=True, eq=False)
class _OpenGrant:
    grant_id: int
    reservation: PageReservation
    incomplete_pages: dict[int, int]
    """The incomplete pages, each with a mask of its layers that have begun to arrive and are not complete.

    Bit l is set while a write of all heads of layer l is received, or while `partial_layers` knows layer l.
    """
    pages: list[int]
    """All granted pages."""
    partial_layers: PartialLayers
    arrived: asyncio.Future[None]
    """The future of the grant: done when all pages have arrived, or failed when they never will."""
    writers: list[GrantWriter] = field(default_factory=list)


class Grants:
    """The open grants of a pool and its segment: a `messenger.receiver.served_pool.WriteTarget`."""

    def __init__(
        self, pool: Pool, segment: Segment, address: MessengerAddress, copy_table: CopyTable | None
    ) -> None:
        """Make an object without grants.

        `copy_table` tells peers on this host which grants they may write to by themselves. It is None if such
        peers cannot write by themselves.
        """
        self._pool = pool
        self._segment = segment
        self._address = address
        self._copy_table = copy_table
        self._open: dict[int, _OpenGrant] = {}
        self._by_reservation: dict[int, _OpenGrant] = {}
        self._completed: dict[int, None] = {}
        """The ids of the latest completed grants, oldest first.

        A write to one of them may come again, if its acknowledgement was lost with a connection.
        """
        self.num_unlisted = 0
        """Grants that peers of this host could not write to themselves, as the copy table was full."""
        self._unlisted = Doubling(1)

    # -- the worker's side ------------------------------------------------------------------------

    def grant(self, reservation: PageReservation) -> Grant:
        """Open the incomplete blocks of `reservation` to remote writes.

        Raises PoolError if the reservation has a grant already, or if the worker has begun to write one of
        these blocks.
        """
        if reservation.reservation_id in self._by_reservation:
            raise PoolError(f"reservation {reservation.reservation_id} has a grant already")
        missing = [(i, b) for i, b in enumerate(reservation.blocks) if not self._pool.is_complete(b)]
        if any(block.arrived for _, block in missing):
            raise PoolError("a block that the worker has begun to write cannot be granted")
        grant = _OpenGrant(
            grant_id=self._new_id(),
            reservation=reservation,
            incomplete_pages={block.page: 0 for _, block in missing},
            pages=[block.page for _, block in missing],
            partial_layers=PartialLayers(self._segment.layout.num_kv_heads),
            arrived=asyncio.get_running_loop().create_future(),
        )
        self._by_reservation[reservation.reservation_id] = grant
        self._open[grant.grant_id] = grant
        self._finish_if_complete(grant)
        pages = [GrantedPage(index, block.page, block.generation) for index, block in missing]
        return Grant(grant.grant_id, self._address, pages)

    def is_granted(self, reservation: PageReservation, page: int) -> bool:
        """Return whether `page` is or was open to remote writes, so that the worker must not write it."""
        return reservation.reservation_id in self._by_reservation and not reservation.by_page[page].found

    async def wait_arrived(self, reservation: PageReservation) -> None:
        """Wait until all granted pages are complete.

        Raises TransferError if they never will be, PoolError if the reservation has no grant.
        """
        grant = self._by_reservation.get(reservation.reservation_id)
        if grant is None:
            raise PoolError(f"reservation {reservation.reservation_id} has no grant")
        await asyncio.shield(grant.arrived)

    def revoke(self, reservation_id: int, reason: str) -> None:
        """Revoke the grant of a reservation that ends, so that nothing more may be written. Idempotent."""
        grant = self._by_reservation.pop(reservation_id, None)
        if grant is not None and grant.grant_id in self._open:
            self._fail(grant, reason)

    # -- the messenger's side (WriteTarget) -------------------------------------------------------

    def add_writer(self, grant_id: int, writer: GrantWriter) -> None:
        if grant_id not in self._completed and writer not in self._find(grant_id).writers:
            self._find(grant_id).writers.append(writer)

    def begin(self, grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview | None:
        if grant_id in self._completed:
            return None
        grant = self._find(grant_id)
        block = grant.reservation.by_page.get(entry.page)
        if block is None or block.found:
            raise WriteRefused(f"page {entry.page} is no part of grant {grant_id}")
        if entry.generation != block.generation:
            raise WriteRefused(
                f"page {entry.page} has generation {block.generation}, the write names {entry.generation}"
            )
        try:
            layers = self._positions(entry)
        except ValueError as error:
            raise WriteRefused(str(error)) from None
        if len(entry.checksums) != entry.num_layers * CHECKSUM_BYTES:
            raise WriteRefused(
                f"{entry.num_layers} layers came with {len(entry.checksums)} bytes of checksums"
            )
        if heads is not None:
            return self._begin_part(grant, block, entry, layers, heads)
        if not layer_mask(layers) & ~block.arrived:
            if self._pool.table.checksums(entry.page, layers) == entry.checksums:
                return None
            what = f"layers [{entry.layer_begin}, {entry.layer_end}) of page {entry.page}"
            raise self._other_is_there(grant, entry.page, what)
        receiving = grant.incomplete_pages[entry.page]
        if (receiving | block.arrived) & layer_mask(layers):
            raise WriteRefused(
                f"layers [{entry.layer_begin}, {entry.layer_end}) of page {entry.page} were written before"
            )
        grant.incomplete_pages[entry.page] = receiving | layer_mask(layers)
        self._pool.holds.add(entry.page)
        return self._segment.layers_view(entry.page, layers)

    def _begin_part(
        self, grant: _OpenGrant, block: Block, entry: WriteEntry, layers: range, heads: range
    ) -> memoryview | None:
        """Begin the write of some heads of a layer, after `begin` has checked page and layers.

        Returns the target; None if the same bytes are there already. Raises WriteRefused.
        """
        try:
            positions = self._segment.layout.head_positions(heads)
        except ValueError as error:
            raise WriteRefused(str(error)) from None
        if len(layers) > 1:
            raise WriteRefused(
                f"some heads of {len(layers)} layers in one range, they are no such range here"
            )
        page, layer = entry.page, layers.start
        what = f"heads [{heads.start}, {heads.stop}) of layer {entry.layer_begin} of page {page}"
        view = self._segment.heads_view(page, layer, positions)
        if block.arrived & layer_mask(layers) or grant.partial_layers.have_arrived(page, layer, positions):
            # No checksum is kept of a part that has arrived, only its bytes.
            if layer_checksums(view, len(view)) == entry.checksums:
                return None
            raise self._other_is_there(grant, page, what)
        has_begun = grant.incomplete_pages[page] & layer_mask(layers)
        is_received_whole = has_begun and not grant.partial_layers.knows(page, layer)
        if is_received_whole or not grant.partial_layers.begin(page, layer, positions):
            raise WriteRefused(f"{what} were written before")
        grant.incomplete_pages[page] |= layer_mask(layers)
        self._pool.holds.add(page)
        return view

    def _other_is_there(self, grant: _OpenGrant, page: int, what: str) -> WriteRefused:
        """Fail the grant and drop the block, because its page already has other bytes than the write.

        Returns the refusal of the write.
        """
        self._pool.drop(page)
        reason = f"{what} are there already, and differ"
        self._fail(grant, reason)
        return WriteRefused(reason)

    def expose(self, grant_id: int) -> tuple[list[tuple[int, Range]], Callable[[], None]]:
        if grant_id in self._completed:
            return [], lambda: None
        pages = list(self._find(grant_id).incomplete_pages)
        for page in pages:
            self._pool.holds.add(page)

        def on_closed() -> None:
            for page in pages:
                self._pool.holds.remove(page)

        block_bytes = self._segment.layout.block_bytes
        return [(page, Range(self._segment.page_offset(page), block_bytes)) for page in pages], on_closed

    def is_open(self, grant_id: int) -> bool:
        return grant_id in self._open

    def complete(self, grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
        grant = self._open.get(grant_id)
        if grant is None:
            self._pool.holds.remove(entry.page)
            raise WriteRefused("the grant was revoked while this write was being received")
        layers, checksums = self._positions(entry), entry.checksums
        if heads is not None:
            layout = self._segment.layout
            if not grant.partial_layers.complete(entry.page, layers.start, layout.head_positions(heads)):
                self._pool.holds.remove(entry.page)
                return False
            checksums = layer_checksums(self._segment.layers_view(entry.page, layers), layout.layer_bytes)
        block = grant.reservation.by_page[entry.page]
        self._pool.record_arrival(block, layers, checksums)
        self._pool.holds.remove(entry.page)
        grant.incomplete_pages[entry.page] &= ~layer_mask(layers)
        if self._pool.is_complete(block):
            del grant.incomplete_pages[entry.page]
            self._finish_if_complete(grant)
        return not grant.incomplete_pages

    def abandon(self, grant_id: int, entry: WriteEntry, heads: range | None) -> None:
        grant = self._open.get(grant_id)
        if grant is not None:
            layers, layout = self._positions(entry), self._segment.layout
            if heads is None or grant.partial_layers.abandon(
                entry.page, layers.start, layout.head_positions(heads)
            ):
                grant.incomplete_pages[entry.page] &= ~layer_mask(layers)
        self._pool.holds.remove(entry.page)

    def remove_writer(self, grant_id: int, writer: GrantWriter, reason: str | None) -> None:
        grant = self._open.get(grant_id)
        if grant is None or writer not in grant.writers:
            return
        grant.writers.remove(writer)
        if reason is not None:
            self._fail(grant, reason)

    # ---------------------------------------------------------------------------------------------

    def _positions(self, entry: WriteEntry) -> range:
        """Return the positions of an entry's layers in this pool's blocks. Raises ValueError."""
        return self._segment.layout.positions(range(entry.layer_begin, entry.layer_end))

    def _find(self, grant_id: int) -> _OpenGrant:
        grant = self._open.get(grant_id)
        if grant is None:
            raise WriteRefused(f"grant {grant_id} is unknown here: complete, revoked or of an earlier life")
        return grant

    def _new_id(self) -> int:
        """Return a random id for a grant, and enter the id in the copy table for writers of this host.

        If the table has no free entry, writers of this host leave the copying to this messenger, like writers
        without a copy slot. Ids are random, so that ids of an earlier messenger process are unknown.
        """
        for _ in range(_NUM_TRIES):
            grant_id = secrets.randbits(63)
            if self._copy_table is None or self._copy_table.open(grant_id):
                return grant_id
        self.num_unlisted += 1
        if self._unlisted.is_due(self.num_unlisted):
            log.warning(
                "%d grants had no entry in the copy table, as too many are open: this messenger copies what"
                " peers of this host write to them",
                self.num_unlisted,
            )
        return grant_id

    def _close_to_copiers(self, grant: _OpenGrant) -> None:
        """Close a grant to writers of this host.

        Its pages are held while such a writer may still be copying.
        """
        if self._copy_table is None:
            return

        def on_quiet() -> None:
            for page in grant.pages:
                self._pool.holds.remove(page)

        if not self._copy_table.close(grant.grant_id, on_quiet):
            for page in grant.pages:
                self._pool.holds.add(page)

    def _finish_if_complete(self, grant: _OpenGrant) -> None:
        if not grant.incomplete_pages:
            self._close_to_copiers(grant)
            del self._open[grant.grant_id]
            self._completed[grant.grant_id] = None
            if len(self._completed) > _NUM_COMPLETED:
                del self._completed[next(iter(self._completed))]
            for writer in grant.writers:
                writer.completed(grant.grant_id)
            grant.arrived.set_result(None)

    def _fail(self, grant: _OpenGrant, reason: str) -> None:
        """Fail an open grant, and tell its writers to stop."""
        del self._open[grant.grant_id]
        self._close_to_copiers(grant)
        for writer in grant.writers:
            writer.revoke(grant.grant_id, reason)
        grant.arrived.set_exception(TransferError(reason))
        grant.arrived.exception()  # counts as retrieved, if nobody waits for it
