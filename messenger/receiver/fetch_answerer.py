"""Answers to the fetches of one connection, in the order of the fetches.

Owns: which blocks are being read over the connection. Does not know: how requests arrive, the pool.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from messenger.receiver.pending_write import HeadRanges
from messenger.receiver.replies import Replies
from messenger.receiver.served_pool import Readable, ServedPool
from messenger.transport.exposures import Exposures, Range
from messenger.transport.transports import Inlet
from messenger.wire.messages import Fetch, Found, FoundBlock, brief
from messenger.wire.protocol import MAX_FRAME_BYTES, MAX_FRAME_ENTRIES, encode_frame
from mooncake.errors import MooncakeError, TransferError


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer whose blocks the sender has yet to read."""

    fetch: Fetch
    end_lease: Callable[[], None] = lambda: None
    num_bytes: int = 0


MOST_FETCHES = 64
"""The most fetches of one lane whose answers are awaited or being read."""


class FetchAnswerer:
    """The answers to the fetches of one connection.

    The lane runs `run` as long as the connection lasts, and calls `close` afterwards.
    """

    def __init__(
        self,
        served_pool: ServedPool,
        inlet: Inlet,
        exposures: Exposures,
        parts: HeadRanges,
        replies: Replies,
    ) -> None:
        self._layout = served_pool.identity.layout
        self._reads = served_pool.reads
        self._traffic = served_pool.traffic
        self._inlet = inlet
        self._exposures = exposures
        self._parts = parts
        self._replies = replies
        self._fetches: asyncio.Queue[Coroutine[None, None, None]] = asyncio.Queue()
        self._num_queued = 0
        """Fetches that wait to be answered."""
        self._read: deque[_Answer] = deque()
        """Answers whose blocks are being read, the oldest first."""

    def fetch(self, fetch: Fetch) -> None:
        """Answer a fetch after all earlier fetches. Raises TransferError.

        The sender tells answers apart by their order alone.
        """
        if fetch.is_read:
            self._count_read(fetch)
            return
        if self._num_queued + len(self._read) >= MOST_FETCHES:
            raise TransferError(f"more than {MOST_FETCHES} fetches at once on one connection")
        if not self._num_queued and not self._exposures.opens_ranges:
            try:
                layers, heads = self._check_fetch(fetch)
                leased = self._reads.lease_now(fetch.keys, layers, heads)
            except MooncakeError as error:
                self._refuse_fetch(fetch, error)
                return
            if leased is not None:
                self._send_found(fetch, *leased)
                return
        self._num_queued += 1
        self._fetches.put_nowait(self._answer(fetch))

    def _count_read(self, fetch: Fetch) -> None:
        """Count blocks that the sender has read by itself, in its mapping of this side's segment.

        Raises TransferError if the sender cannot have read them, or names unknown layers.
        """
        if not self._inlet.is_mapped:
            raise TransferError("blocks are said to be read where nobody can see them")
        layers, heads = self._check_fetch(fetch)
        if heads is not None:
            raise TransferError("some heads are said to be read, which have no checksum")
        try:
            num_blocks = self._reads.count_read(fetch.keys)
        except MooncakeError as error:
            raise TransferError(str(error)) from error
        self._traffic.sent_bytes[self._inlet.transport] += num_blocks * len(layers) * self._layout.layer_bytes

    async def run(self) -> None:
        """Answer, until cancelled, the fetches that could not be answered at once."""
        try:
            while True:
                await (await self._fetches.get())
                self._num_queued -= 1
        finally:
            self._replies.shut_down()  # nobody else would answer

    def close(self) -> None:
        """End all leases, after `run` has ended."""
        while not self._fetches.empty():
            self._fetches.get_nowait().close()
        for answer in self._read:
            answer.end_lease()

    def fetched(self, damaged: Sequence[int]) -> None:
        """End the lease of the oldest answer, which the peer has read; verify blocks that the peer suspects.

        `damaged`: the indices of blocks that did not match their checksums at the peer. Raises TransferError
        if there is no such answer, or no such block.
        """
        if not self._read:
            raise TransferError("a fetch is done that was not answered")
        answer = self._read.popleft()
        try:
            self._verify(answer, damaged)
        finally:
            answer.end_lease()
        self._traffic.sent_bytes[self._inlet.transport] += answer.num_bytes

    def _verify(self, answer: _Answer, damaged: Sequence[int]) -> None:
        if not damaged:
            return
        keys, layers = answer.fetch.keys, range(answer.fetch.layer_begin, answer.fetch.layer_end)
        if not answer.num_bytes or any(not 0 <= index < len(keys) for index in damaged):
            raise TransferError(f"blocks {list(damaged)} are said to be damaged, which were not sent")
        self._reads.verify([keys[index] for index in set(damaged)], layers)

    async def _answer(self, fetch: Fetch) -> None:
        try:
            layers, heads = self._check_fetch(fetch)
            blocks, end_lease = await self._reads.lease(fetch.keys, layers, heads)
            if self._exposures.opens_ranges:
                await self._open_found(fetch, blocks, end_lease)
            else:
                self._send_found(fetch, blocks, end_lease)
        except MooncakeError as error:
            self._refuse_fetch(fetch, error)

    def _check_fetch(self, fetch: Fetch) -> tuple[range, range | None]:
        """Return the wanted layers, and the wanted heads of each (None: all heads). Raises TransferError."""
        layers = range(fetch.layer_begin, fetch.layer_end)
        heads, layer_bytes = self._parts.of(fetch.heads)
        try:
            self._layout.positions(layers)
            if heads is not None:
                self._layout.head_positions(heads)
        except ValueError as error:
            raise TransferError(str(error)) from None
        if heads is not None and len(layers) > 1:
            raise TransferError(
                f"some heads of {len(layers)} layers in one fetch; ask for one layer at a time"
            )
        num_bytes = len(fetch.keys) * len(layers) * layer_bytes
        if len(fetch.keys) > 1 and (num_bytes > MAX_FRAME_BYTES or len(fetch.keys) > MAX_FRAME_ENTRIES):
            raise TransferError(
                f"{num_bytes} bytes of {len(fetch.keys)} blocks in one fetch; ask for fewer blocks"
            )
        return layers, heads

    def _refuse_fetch(self, fetch: Fetch, error: MooncakeError) -> None:
        self._read.append(_Answer(fetch))
        self._replies.post(encode_frame(Found([], brief(str(error)))))

    def _send_found(self, fetch: Fetch, blocks: Sequence[Readable], end_lease: Callable[[], None]) -> None:
        """Send blocks, which stay in their pages until the reader has confirmed their arrival."""
        num_bytes = sum([len(block.view) for block in blocks])
        self._read.append(_Answer(fetch, end_lease, num_bytes))
        found = Found([FoundBlock(b.index, b.checksums, b.source_offset) for b in blocks])
        if self._inlet.has_payload:
            self._replies.post(encode_frame(found, num_bytes), *(block.view for block in blocks))
        else:
            self._replies.post(encode_frame(found))

    async def _open_found(
        self, fetch: Fetch, blocks: Sequence[Readable], end_lease: Callable[[], None]
    ) -> None:
        """Open blocks to the reader, which reads them by itself."""
        places = [Range(block.source_offset, len(block.view)) for block in blocks]
        try:
            addresses, keys, close = await self._exposures.open_to_read(places)
        except BaseException:
            end_lease()
            raise

        def end() -> None:
            close()
            end_lease()

        self._read.append(_Answer(fetch, end, sum(len(block.view) for block in blocks)))
        found = [
            FoundBlock(block.index, block.checksums, block.source_offset, address, key)
            for block, address, key in zip(blocks, addresses, keys, strict=True)
        ]
        self._replies.post(encode_frame(Found(found)))
