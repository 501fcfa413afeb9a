"""Fetches: a reservation gets the blocks that it lacks from the pools of other messengers.

The source is one pool, or the pools of a group, each of which has a shard. The blocks come layer by layer. So
a prefill computes its first layers, and streams them on to the decode side, while later layers travel
(Mooncake, sections 3 and 5.2). Pages are held until no transfer can write them.

Owns: which layers of one reservation have arrived. Does not know: connections, who waits.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvstore.pool.claims import Block, PageReservation
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.transfer.shard_split import Overlap, overlaps, steps
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.outgoing_sessions import OutgoingSessions
from messenger.sender.requests import Urgency
from messenger.wire.checksums import layer_checksums
from messenger.wire.protocol import MAX_FRAME_ENTRIES
from mooncake.errors import PoolError, TransferError
from mooncake.messages.blocks import common
from mooncake.messages.pools import PoolShard

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 4
"""The most requests in flight over each connection: one is answered while the next requests travel."""
_LEAST_PART_BYTES = 128 << 10
"""The least bytes of a part, when the layers of a step, of all blocks, are split over several connections.

The last part may be smaller. With less than twice as many bytes nothing is split.
"""
_SEVERAL_LAYERS_BYTES = 512 << 10
"""The most bytes of a request for several layers, so that the first layers arrive soon."""
_SETTLING_S = 0.1
"""Seconds in which a stopped fetch may end its writes. Afterwards the blocks get other pages."""
_FEWEST_STEPS = 4
"""The least number of steps in which the layers are fetched, if the model has as many layers."""
_SIGN_OF_LIFE_S = 0.2
"""Seconds between two checks whether bytes arrive, while a request is being answered."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for `layers` of the blocks `[first, end)` of the fetch."""

    layers: range
    first: int
    end: int


_Asking = asyncio.Task[list[bytes]]
_InFlight = deque[tuple[_Request, list[_Asking]]]
"""The requests in flight, oldest first, each with one task for each source."""


class BlockFetch:
    """A fetch for one reservation. `run` is called once.

    The constructor raises PoolError if a block of the call does not exist, is named twice, has no key, or has
    layers already.

    `on_layers(num_blocks, num_layers)` is called when the first `num_layers` layers of the first `num_blocks`
    blocks have arrived. A call with the same numbers means that the sources go on sending.
    """

    def __init__(
        self,
        pool: Pool,
        segment: Segment,
        peers: OutgoingSessions,
        reservation: PageReservation,
        indices: Sequence[int],
        on_layers: Callable[[int, int], None],
    ) -> None:
        self._pool, self._segment, self._peers = pool, segment, peers
        self._reservation = reservation
        self._blocks = [_block_at(reservation, index) for index in indices]
        self._on_layers = on_layers
        self._num_wanted = len(self._blocks)
        """Number of blocks before the first block that a source is known to lack."""
        self._pages = {block.page for block in self._blocks}
        """Pages of the blocks that have not been given up. No request for other blocks is in flight."""
        if len(self._pages) < len(indices):
            raise PoolError("a fetch names a block twice")
        self._num_layers = 0
        """Number of leading layers that all wanted blocks have."""
        self._said = self._num_wanted, self._num_layers
        """Arguments of the latest call of `on_layers`."""
        self._streaming: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def writes(self, page: int) -> bool:
        """Return whether this fetch writes `page`."""
        return page in self._pages

    def stop(self) -> None:
        """Stop the fetch: no more layers count as arrived. `run` returns when nothing is written any more.

        Idempotent.
        """
        if not self._is_stopped and self._streaming is not None:
            self._streaming.cancel()
        self._stopped.set()

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of the fetch, in the order of their indices in the call."""
        return self._blocks

    @property
    def _is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def run(
        self,
        sources: Sequence[PoolShard],
        tasks: asyncio.TaskGroup,
        urgency: Urgency = Urgency.LATENCY,
    ) -> None:
        """Run the fetch until nothing more arrives, and no source writes the pages of `blocks`.

        A source that fails ends the fetch without an error. If a source hangs when the fetch is stopped, the
        blocks that have not arrived get other pages; raises PoolFullError if there are no other pages.
        """
        if self._is_stopped:  # before it has begun
            return
        self._streaming = tasks.create_task(self._stream(sources, urgency))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([self._streaming, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        await asyncio.wait([self._streaming], timeout=_SETTLING_S)
        if not self._streaming.done():
            mine = [block for block in self._blocks if block.page in self._pages]
            self._pool.renew_pages(
                self._reservation, [block for block in mine if not self._pool.is_complete(block)]
            )

    async def _stream(self, sources: Sequence[PoolShard], urgency: Urgency) -> None:
        in_flight: _InFlight = deque()
        pages = [block.page for block in self._blocks]
        for page in pages:
            self._pool.holds.add(page)
        try:
            parts = overlaps(self._segment.layout, sources)
            peers = [await self._peers.peer(overlap.messenger) for overlap in parts]
            most_at_once = _MOST_AT_ONCE * self._num_parts(peers)
            for request in self._requests(peers, parts, urgency):
                asking = [
                    asyncio.create_task(self._ask(peer, overlap, request, urgency))
                    for peer, overlap in zip(peers, parts, strict=True)
                    if common(overlap.layers, self._model_layers(request))
                ]
                in_flight.append((request, asking))
                if len(in_flight) >= most_at_once:
                    await self._take(peers, in_flight)
            while in_flight:
                await self._take(peers, in_flight)
        except TransferError as error:
            names = ", ".join(shard.messenger.instance for shard in sources)
            log.info("fetching from %s failed: %s", names, error)
        finally:
            await _end([task for _, asking in in_flight for task in asking])
            for page in pages:
                self._pool.holds.remove(page)

    def _requests(
        self, peers: Sequence[OutgoingSession], parts: Sequence[Overlap], urgency: Urgency
    ) -> Iterator[_Request]:
        """Yield requests layer by layer, each as large as the peers allow when it is made.

        With few blocks a request is for several layers, with many blocks a layer takes several requests. Over
        several connections, parts of a layer travel at the same time, so that no layer waits for later ones.
        """
        layer_bytes, num_at_once = self._segment.layout.layer_bytes, self._num_layers_at_once
        share = -(-len(self._blocks) // self._num_parts(peers))
        for layers in steps(self._segment.layout, parts, num_at_once):
            first = 0
            while first < self._num_wanted:
                frame_bytes = min(peer.frame_bytes(urgency) for peer in peers)
                blocks_at_once = min(max(1, frame_bytes // (num_at_once * layer_bytes)), MAX_FRAME_ENTRIES)
                end = min(first + min(blocks_at_once, share), self._num_wanted)
                yield _Request(layers, first, end)
                first = end

    @property
    def _num_layers_at_once(self) -> int:
        """The number of layers of a request."""
        layout = self._segment.layout
        num_at_once = _SEVERAL_LAYERS_BYTES // (len(self._blocks) * layout.layer_bytes)
        return max(1, min(num_at_once, layout.num_layers // _FEWEST_STEPS))

    def _num_parts(self, peers: Sequence[OutgoingSession]) -> int:
        """Return the number of requests for one layer: at most one for each connection to a peer."""
        num_bytes = self._num_layers_at_once * len(self._blocks) * self._segment.layout.layer_bytes
        return max(1, min(num_bytes // _LEAST_PART_BYTES, *(len(peer.lanes) for peer in peers)))

    def _model_layers(self, request: _Request) -> range:
        return self._segment.layout.layers[request.layers.start : request.layers.stop]

    async def _ask(
        self, peer: OutgoingSession, overlap: Overlap, request: _Request, urgency: Urgency
    ) -> list[bytes]:
        """Request the layers and heads of the blocks that a peer has. Raises TransferError.

        Returns the checksums of the leading blocks that have arrived.
        """
        blocks = self._blocks[request.first : request.end]
        keys = [block.key for block in blocks if block.key is not None]
        layers, heads = self._model_layers(request), None
        if overlap.has_same_heads:
            views = [self._segment.layers_view(block.page, request.layers) for block in blocks]
        else:
            heads, layer = overlap.heads, request.layers.start
            positions = self._segment.layout.head_positions(heads)
            views = [self._segment.heads_view(block.page, layer, positions) for block in blocks]
        checksums = await peer.fetch(keys, views, layers, urgency, heads)
        return [checksums[index] for index in takewhile(checksums.__contains__, range(len(blocks)))]

    async def _take(self, peers: Sequence[OutgoingSession], in_flight: _InFlight) -> None:
        """Record the answers to the oldest request, and call `on_layers`.

        If a block turns out to be missing, the answers to all other requests are recorded first: a block is
        given up only when nothing is in flight to its page any more.
        """
        num_wanted = self._num_wanted
        await self._take_first(peers, in_flight)
        while in_flight and self._num_wanted < num_wanted:
            await self._take_first(peers, in_flight)
        if not self._is_stopped:
            self._pages.difference_update(block.page for block in self._blocks[self._num_wanted :])
            self._said = self._num_wanted, self._num_layers
            self._on_layers(*self._said)

    async def _take_first(self, peers: Sequence[OutgoingSession], in_flight: _InFlight) -> None:
        """Record the answers to the oldest request. Thus a block's layers are recorded in order."""
        request, asking = in_flight[0]
        await self._answered(peers, asking)
        answers = [await task for task in asking]
        in_flight.popleft()
        if self._is_stopped:
            return
        num_there = min(len(checksums) for checksums in answers)
        end = min(request.first + num_there, self._num_wanted)
        for index, block in enumerate(self._blocks[request.first : end]):
            # Sources that have a part of the layer send the checksum of their part only.
            packed = answers[0][index] if len(answers) == 1 else self._checksums(block, request.layers)
            self._pool.record_arrival(block, request.layers, packed)
        if request.first + num_there < request.end:
            self._num_wanted = end
        if request.end >= self._num_wanted:  # all wanted blocks have these layers
            self._num_layers = request.layers.stop

    def _checksums(self, block: Block, layers: range) -> bytes:
        view = self._segment.layers_view(block.page, layers)
        return layer_checksums(view, self._segment.layout.layer_bytes)

    async def _answered(self, peers: Sequence[OutgoingSession], asking: Sequence[_Asking]) -> None:
        """Wait for all answers. While their bytes keep arriving on a slow path, call `on_layers` again."""
        num_bytes = _num_received_bytes(peers)
        while not all(task.done() for task in asking):
            await asyncio.wait(asking, timeout=_SIGN_OF_LIFE_S)
            is_over = self._is_stopped or all(task.done() for task in asking)
            if _num_received_bytes(peers) != num_bytes and not is_over:
                num_bytes = _num_received_bytes(peers)
                self._on_layers(*self._said)


def _num_received_bytes(peers: Sequence[OutgoingSession]) -> int:
    return sum(peer.num_received_bytes for peer in peers)


async def _end(asking: Sequence[_Asking]) -> None:
    """Cancel tasks, and wait until all have ended and none writes any more.

    The wait goes on if the caller is cancelled meanwhile.
    """
    for task in asking:
        task.cancel()
    while not all(task.done() for task in asking):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(asking)


def _block_at(reservation: PageReservation, index: int) -> Block:
    """Return the block at `index`. Raises PoolError unless it may be fetched."""
    if not 0 <= index < len(reservation.blocks):
        raise PoolError(f"block {index} of a fetch; the reservation has {len(reservation.blocks)} blocks")
    block = reservation.blocks[index]
    if block.key is None or block.arrived:
        raise PoolError(f"block {index} cannot be fetched: it is private, or some of it is there already")
    return block
