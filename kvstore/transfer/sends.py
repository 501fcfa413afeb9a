"""Sends: a reservation's blocks are sent to a grant, each layer as soon as it is committed.

This module is the sending half of a transfer (Mooncake, section 3, step 3: streamed layer by layer,
overlapped with the prefill). A page that is being sent is held until none of its bytes will be read
any more.

A send has those layers and heads that both this pool and the receiver have. So each sender of a group sends
its part of the blocks, and each receiver of a group gets its part. The layers' own checksums go with the
layers. If only some of this pool's heads are sent, the layer is verified first, and a checksum of these heads
goes instead.

Owns: which layers of each reservation were sent. Does not know: connections.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from kvstore.pool.claims import Block, PageReservation, layer_mask
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from messenger.sender.outgoing_sessions import OutgoingSessions
from messenger.sender.requests import Urgency, WriteOutcome
from messenger.sender.transfer import Transfer
from messenger.wire.checksums import CHECKSUM_BYTES, layer_checksums
from messenger.wire.messages import WriteEntry
from messenger.wire.protocol import MAX_FRAME_ENTRIES
from mooncake.errors import PoolError, TransferError
from mooncake.messages.blocks import KVLayout, common
from mooncake.messages.pools import Grant, GrantedPage

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Target:
    """A local block and its remote page.

    `submitted` is a mask of the layers that were handed to the transfer, or are not to be sent.
    """

    block: Block
    page: GrantedPage
    submitted: int = 0


@dataclass(slots=True)
class _Range:
    """Consecutive layers of one block in one frame.

    `page` is the local page that has these layers, even if the block gets another page meanwhile.
    """

    target: _Target
    layers: range
    page: int


class Sends:
    """The sends of the reservations of one client of this pool.

    A reservation has one send for its grant, or one send for each grant of a receiving group.
    """

    def __init__(
        self, pool: Pool, segment: Segment, peers: OutgoingSessions, tasks: asyncio.TaskGroup
    ) -> None:
        self._pool, self._segment, self._peers = pool, segment, peers
        self._tasks = tasks
        self._of: dict[int, list[tuple[GrantSend, asyncio.Task[None]]]] = {}
        """Each reservation's sends with their tasks, by reservation id."""

    def start(self, reservation: PageReservation, grant: Grant, ref_text: str) -> None:
        """Start to send a reservation to `grant` and to its `others`, the grants of the receiver's group.

        Raises PoolError if the reservation is being sent already, or has fewer blocks than a grant names.
        """
        if reservation.reservation_id in self._of:
            raise PoolError(f"reservation {reservation.reservation_id} is being sent already")
        sends = [
            GrantSend(self._pool, self._segment, self._peers, reservation, each, ref_text)
            for each in (grant, *grant.others)
        ]
        self._of[reservation.reservation_id] = [(send, self._tasks.create_task(send.run())) for send in sends]

    def wake(self, reservation_id: int) -> None:
        """Send the layers of a reservation that have been committed since the last call."""
        for send, _ in self._of.get(reservation_id, []):
            send.wake()

    async def wait(self, reservation_id: int) -> None:
        """Wait until all layers are acknowledged.

        Raises TransferError if the send fails, PoolError if the reservation is not being sent.
        """
        if reservation_id not in self._of:
            raise PoolError(f"reservation {reservation_id} is not being sent")
        for send, _ in list(self._of[reservation_id]):
            await asyncio.shield(send.outcome)

    def cancel(self, reservation_id: int) -> None:
        """Cancel the sends of a reservation. Idempotent."""
        for send, task in self._of.pop(reservation_id, []):
            task.cancel()
            send.finish(TransferError("released before everything was sent"))

    def cancel_all(self) -> None:
        for reservation_id in list(self._of):
            self.cancel(reservation_id)


class GrantSend:
    """The send to one grant, made by `run`. `outcome` is done when the send has succeeded or failed.

    A layer of a block is first committed by the worker, then *submitted* (handed to the transfer, in a write
    with others), then *placed* (in its remote page).
    """

    def __init__(
        self,
        pool: Pool,
        segment: Segment,
        peers: OutgoingSessions,
        reservation: PageReservation,
        grant: Grant,
        ref_text: str,
    ) -> None:
        self._pool = pool
        self._segment = segment
        self._peers = peers
        self._grant = grant
        self._ref_text = ref_text
        self._targets = [
            _Target(_block_at(reservation, granted.block_index), granted) for granted in grant.pages
        ]
        self._num_unsubmitted = self._num_unplaced = 0
        """The number of layers that are not submitted yet, and the number of layers that are not placed yet.

        Both numbers count the layers of all blocks, and are 0 until the receiver's shard is known.
        """
        self._heads: range | None = None
        """Heads of the model that are sent; None if the receiver has the same heads as this pool."""
        self._layer_bytes = segment.layout.layer_bytes
        """The bytes of a block's layer that are sent."""
        self._changed = asyncio.Event()
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Wake `run`, as layers have been committed, or the transfer has changed."""
        self._changed.set()

    def finish(self, error: TransferError | None) -> None:
        if not self.outcome.done():
            if error is None:
                self.outcome.set_result(None)
            else:
                self.outcome.set_exception(error)
                self.outcome.exception()  # counts as retrieved, if nobody waits for it

    async def run(self) -> None:
        try:
            if self._targets:
                peer = await self._peers.peer(self._grant.messenger)
                self._plan(peer.layout)
                opening = peer.transfer(self._grant.grant_id, self._ref_text, self.wake, heads=self._heads)
                with opening as transfer:
                    await self._stream(transfer, peer.frame_bytes(Urgency.LATENCY))
        except TransferError as error:
            log.info("sending %s to %s failed: %s", self._ref_text, self._grant.messenger.instance, error)
            self.finish(error)
        else:
            self.finish(None)

    def _plan(self, theirs: KVLayout) -> None:
        """Plan the layers and heads to send to a receiver with the shard `theirs`.

        Nothing is sent if the shards have nothing in common.
        """
        ours = self._segment.layout
        layers, heads = common(ours.layers, theirs.layers), common(ours.heads, theirs.heads)
        if not layers or not heads:
            return
        skipped = layer_mask(range(ours.num_layers)) & ~layer_mask(ours.positions(layers))
        for target in self._targets:
            target.submitted = skipped
        self._num_unsubmitted = self._num_unplaced = len(self._targets) * len(layers)
        if ours.heads != theirs.heads:
            self._heads, self._layer_bytes = heads, len(heads) * ours.head_bytes

    async def _stream(self, transfer: Transfer, frame_bytes: int) -> None:
        while self._num_unplaced or not transfer.is_acknowledged:
            transfer.check()
            self._changed.clear()
            ranges = self._take_ready(frame_bytes)
            if not ranges:
                await self._changed.wait()
                continue
            if self._heads is None:
                entries = [self._entry(r) for r in ranges]
            else:
                entries = [entry for r in ranges for entry in self._part_entries(r, self._heads)]
            num_bytes = sum(len(r.layers) for r in ranges) * self._layer_bytes
            for r in ranges:
                self._pool.holds.add(r.page)
            await transfer.write(entries, num_bytes, partial(self._frame_done, ranges))

    def _take_ready(self, frame_bytes: int) -> list[_Range]:
        """Return committed layers that are not submitted yet, as many as fit into the next frame."""
        ranges: list[_Range] = []
        if not self._num_unsubmitted:
            return ranges
        num_layers_left = max(1, frame_bytes // self._layer_bytes)
        if self._heads is not None:  # each layer is an entry
            num_layers_left = min(num_layers_left, MAX_FRAME_ENTRIES)
        for target in self._targets:
            while ready := target.block.arrived & ~target.submitted:
                if not num_layers_left or len(ranges) == MAX_FRAME_ENTRIES:
                    return ranges
                layers = _lowest_run(ready, num_layers_left)
                target.submitted |= layer_mask(layers)
                num_layers_left -= len(layers)
                self._num_unsubmitted -= len(layers)
                ranges.append(_Range(target, layers, target.block.page))
        return ranges

    def _entry(self, r: _Range) -> WriteEntry:
        granted, first_layer = r.target.page, self._segment.layout.first_layer
        return WriteEntry(
            granted.page,
            granted.generation,
            first_layer + r.layers.start,
            first_layer + r.layers.stop,
            self._pool.table.checksums(r.page, r.layers),
            self._segment.layers_offset(r.page, r.layers.start),
        )

    def _part_entries(self, r: _Range, heads: range) -> Iterator[WriteEntry]:
        """Yield an entry for each layer of a range. Raises TransferError for a damaged page.

        Each entry has only one layer. At least one of the two pools has further heads, and their bytes lie
        between the sent heads of one layer and those of the next layer.
        """
        segment, granted, part = self._segment, r.target.page, self._segment.layout.head_positions(heads)
        checksums = self._pool.table.checksums(r.page, r.layers)
        is_part = len(part) < segment.layout.num_kv_heads
        if is_part and not segment.is_intact(r.page, r.layers, checksums):
            self._drop(r.page)
            raise TransferError(f"page {r.page}, which was to be sent, is damaged")
        for number, layer in enumerate(r.layers):
            checksum = checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
            if is_part:
                view = segment.heads_view(r.page, layer, part)
                checksum = layer_checksums(view, len(view))
            first = segment.layout.first_layer + layer
            offset = segment.heads_offset(r.page, layer, part)
            yield WriteEntry(granted.page, granted.generation, first, first + 1, checksum, offset)

    def _frame_done(self, ranges: list[_Range], outcome: WriteOutcome) -> None:
        for r in ranges:
            page = r.page
            if outcome is WriteOutcome.PLACED:
                self._num_unplaced -= len(r.layers)
            if outcome is WriteOutcome.CORRUPT:
                checksums = self._pool.table.checksums(page, r.layers)
                if not self._segment.is_intact(page, r.layers, checksums):
                    self._drop(page)
            self._pool.holds.remove(page)

    def _drop(self, page: int) -> None:
        log.error("page %d is damaged, its block is dropped", page)
        self._pool.drop(page)


def _block_at(reservation: PageReservation, index: int) -> Block:
    if not 0 <= index < len(reservation.blocks):
        raise PoolError(
            f"the grant names block {index}, reservation {reservation.reservation_id} has"
            f" {len(reservation.blocks)} blocks; both sides must name the same prompt"
        )
    return reservation.blocks[index]


def _lowest_run(mask: int, max_len: int) -> range:
    """Return the lowest consecutive set bits of `mask`, at most `max_len` of them."""
    start = (mask & -mask).bit_length() - 1
    run = mask >> start
    length = (~run & (run + 1)).bit_length() - 1
    return range(start, start + min(length, max_len))
