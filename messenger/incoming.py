"""The answering side of one connection: checks, places, verifies and acknowledges what is written over it;
sends what is fetched.

Owns: a connection after its handshake. Does not know: keys, reservations; whose pages these are
is the `WriteTarget`'s business, what can be read the `ReadSource`'s.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence

from messenger.deadline import Deadline
from messenger.door import Door, Readable, WriteRefused, WriteTarget
from messenger.frames import Frames
from messenger.protocol import (
    MAX_FRAME_BYTES,
    MAX_FRAME_ENTRIES,
    Abandon,
    Close,
    Expose,
    Exposed,
    Fetch,
    FetchDone,
    Found,
    FoundBlock,
    Frame,
    Open,
    Probe,
    RefusalKind,
    Write,
    WriteAck,
    WriteEntry,
    brief,
    encode_frame,
)
from messenger.rdma.exposures import Exposures
from messenger.rdma.windows import Range
from messenger.session import Session, SessionLane
from messenger.stream import Outbox
from messenger.transports import Inlet, Transport
from mooncake.blocks import KVLayout
from mooncake.errors import MooncakeError, TransferError

log = logging.getLogger(__name__)

MOST_FETCHES = 64
"""of one lane that are being answered or read"""
_MOST_ANSWERS = 1024
"""of one lane that wait to be sent"""
_ANSWERED_BYTES = 2 << 20
"""of writes whose acknowledgements leave together at most: the sender waits for them to send more"""
_ACK = encode_frame(WriteAck())


class IncomingLane:
    """One connection, after its handshake."""

    def __init__(
        self,
        door: Door,
        frames: Frames,
        inlet: Inlet,
        exposures: Exposures | None,
        layout: KVLayout | None,
    ) -> None:
        """`layout`: of the sender's blocks, None if it has none and may only probe."""
        self.ended = asyncio.Event()
        """set when nothing that came over it will be placed any more"""
        self._door = door
        self._frames = frames
        self._stream = frames.stream
        self._inlet = inlet
        self._exposures = exposures
        self._may_only_probe = layout is None
        self._layout = door.identity.layout
        self._has_same_heads = layout is not None and layout.heads == self._layout.heads
        self._session: Session
        self._outbox = Outbox(self._stream)
        self._acks: list[bytes] = []
        """that leave together"""
        self._acknowledged_bytes = 0
        """by them"""
        self._deadline = Deadline(door.settings.ack_timeout_s, self._stream.shut_down)
        self._fetches: asyncio.Queue[Coroutine[None, None, None]] = asyncio.Queue()
        self._num_queued = 0
        """fetches that wait to be answered"""
        self._rest: Coroutine[None, None, None] | None = None
        """of a frame that takes a while"""
        self._read: deque[tuple[Callable[[], None], int]] = deque()
        """what ends the lease of blocks that are being read, and their bytes; oldest first"""
        self.awaited: SessionLane | None = None
        """the lane whose end is awaited"""

    def post(self, *buffers: bytes | memoryview) -> None:
        try:
            self._outbox.post(*buffers)
        except OSError:
            self.shut_down()  # the receiving side finds out, and says why
        if len(self._outbox) > _MOST_ANSWERS:
            self.shut_down()  # a sender that does not read its answers

    def shut_down(self) -> None:
        self._stream.shut_down()

    def discard(self) -> None:
        """It will not be run."""
        if self._exposures is not None:
            self._exposures.close()

    def conceal(self, transfer_id: int) -> None:
        if self._exposures is not None:
            self._exposures.conceal(transfer_id)

    def conceal_in_time(self, transfer_id: int) -> None:
        if self._exposures is not None:
            self._exposures.conceal_within(transfer_id, self._door.settings.ack_timeout_s)

    async def run(self, session: Session) -> str:
        """Serves the connection until it is lost. Returns the reason."""
        self._session = session
        answering = asyncio.create_task(self._answer_fetches())
        try:
            while True:
                await self._frames.heard(self._hear)
                if self._rest is not None:
                    rest, self._rest = self._rest, None
                    await rest
                await self._stream.take_turns()
        except (OSError, TransferError) as error:
            return str(error) or "no answer in time"
        finally:
            if self._exposures is not None:
                self._exposures.close()
            self._deadline.close()
            if self._rest is not None:
                self._rest.close()
            answering.cancel()
            try:
                (failure,) = await asyncio.gather(answering, return_exceptions=True)
                if isinstance(failure, Exception):
                    log.error("a fetch of %s could not be answered", session.name, exc_info=failure)
                await self._outbox.close()
            finally:  # also if it is cancelled again
                while not self._fetches.empty():
                    self._fetches.get_nowait().close()
                for end_lease, _ in self._read:
                    end_lease()

    def _hear(self) -> bool:
        """Handles what has come. Whether there is something to wait for: for the rest of it, or while others
        have their turn."""
        while (frame := self._frames.ready()) is not None:
            self._rest = self._handle(frame)
            if self._rest is not None or self._stream.is_turn_over:
                break
        self._send_acks()
        return frame is not None

    def _handle(self, frame: Frame) -> Coroutine[None, None, None] | None:
        """Does what can be done at once, and returns the rest. If either raises, the connection ends."""
        session = self._session
        if self._may_only_probe and not isinstance(frame.message, Probe):
            raise TransferError(f"a probe sent {type(frame.message).__name__}")
        match frame.message:
            case Write() as write:
                return self._write(write, frame.payload_bytes)
            case Open(transfer_id, grant_id, ref_text):
                session.open(transfer_id, grant_id, ref_text)
            case Close(transfer_id, reason):
                session.close(transfer_id, None if reason is None else f"{session.name} gave up: {reason}")
            case Fetch() as fetch:
                self._fetch(fetch)
            case FetchDone():
                if not self._read:
                    raise TransferError("a fetch is done that was not answered")
                end_lease, num_bytes = self._read.popleft()
                end_lease()
                self._door.traffic.sent_bytes[self._inlet.transport] += num_bytes
            case Abandon(number):
                if (lane := session.lanes.get(number)) is not None and lane is not self:
                    return self._abandon(lane)
            case Expose(transfer_id, grant_id):
                return self._expose(transfer_id, grant_id)
            case Probe():
                return self._discard(frame.payload_bytes, WriteAck())
            case _:
                raise AssertionError("the protocol's table lets nothing else through")
        return None

    async def _abandon(self, lane: SessionLane) -> None:
        """Ends `lane`. Returns when nothing that came over it will be placed any more."""
        lane.shut_down()
        waiting: SessionLane | None = lane
        while waiting is not None:
            if waiting is self:
                raise TransferError("its lanes have abandoned each other")
            waiting = waiting.awaited
        self.awaited = lane
        await lane.ended.wait()
        self.awaited = None

    async def _expose(self, transfer_id: int, grant_id: int) -> None:
        """If the device cannot, the connection ends: others may carry what the sender wants to write."""
        if self._exposures is None:
            raise TransferError("pages are to be opened on a connection without RDMA")
        try:
            self._session.ensure_open(transfer_id, grant_id)
            pages, on_closed = self._door.target.expose(grant_id)
        except WriteRefused as error:
            self.post(encode_frame(Exposed(transfer_id, [], brief(str(error)))))
            return
        async with asyncio.timeout(self._door.settings.ack_timeout_s):
            opened = await self._exposures.expose(transfer_id, pages, on_closed)
        if transfer_id in self._session.grants:
            self.post(encode_frame(Exposed(transfer_id, opened)))
        else:
            self.conceal(transfer_id)
            self.post(encode_frame(Exposed(transfer_id, [], "the transfer has ended")))

    # -- writes -----------------------------------------------------------------------------------

    def _write(self, write: Write, payload_bytes: int) -> Coroutine[None, None, None] | None:
        """Places one write, all of it or none."""
        entries = write.entries
        heads, layer_bytes = self._part(write.heads)
        if not 0 < len(entries) <= MAX_FRAME_ENTRIES:
            raise TransferError(f"a write has {len(entries)} entries, allowed are 1 to {MAX_FRAME_ENTRIES}")
        num_bytes = sum([max(0, entry.num_layers) for entry in entries]) * layer_bytes
        if num_bytes > max(MAX_FRAME_BYTES, self._layout.layer_bytes):
            raise TransferError(f"a write of {num_bytes} bytes; a frame has at most {MAX_FRAME_BYTES}")
        placing = _Placing(self._door.target, write, heads, layer_bytes)
        try:
            try:
                self._session.ensure_open(write.transfer_id, write.grant_id)
                placing.begin(is_on_wire=self._inlet.transport is Transport.TCP)
            except WriteRefused as error:
                placing.abandon()
                return self._discard(payload_bytes, WriteAck(RefusalKind.STALE, brief(str(error))))
            self._inlet.check(num_bytes, payload_bytes)
            checksums = self._inlet.place_now(placing.entries, placing.views, layer_bytes)
        except BaseException:
            placing.abandon()
            raise
        if checksums is None:
            return self._receive(placing, num_bytes)
        self._placed(placing, checksums, num_bytes)
        return None

    async def _receive(self, placing: "_Placing", num_bytes: int) -> None:
        try:
            with self._deadline:
                checksums = await self._inlet.place(placing.entries, placing.views, placing.layer_bytes)
        except BaseException:
            placing.abandon()
            raise
        self._placed(placing, checksums, num_bytes)

    def _placed(self, placing: "_Placing", checksums: Sequence[bytes], num_bytes: int) -> None:
        """Verifies what is there, and says so."""
        write = placing.write
        try:
            for entry, actual in zip(placing.entries, checksums, strict=True):
                if actual != entry.checksums:
                    self._acknowledge(self._refuse_corrupt(write.transfer_id, entry), num_bytes)
                    return
            self._door.traffic.received_bytes[self._inlet.transport] += num_bytes
            try:
                if placing.complete():
                    self._session.conceal(write.transfer_id)
            except WriteRefused as error:
                self._acknowledge(WriteAck(RefusalKind.STALE, brief(str(error))), num_bytes)
            else:
                self._acknowledge(None, num_bytes)
        finally:
            placing.abandon()

    def _part(self, heads: tuple[int, int] | None) -> tuple[range | None, int]:
        """Which part of each layer of this side a frame is about, None for all of it, and the bytes of that.

        Raises TransferError for no heads, or if nothing is said and they are not the same at both ends.
        """
        layout = self._layout
        if heads is None:
            if not self._has_same_heads:
                raise TransferError(f"which heads of [{layout.heads.start}, {layout.heads.stop}) is not said")
            return None, layout.layer_bytes
        begin, end = heads
        if begin >= end:
            raise TransferError(f"heads [{begin}, {end}) are no heads")
        part = range(begin, end)
        return (None if part == layout.heads else part), (end - begin) * layout.head_bytes

    async def _discard(self, payload_bytes: int, answer: WriteAck) -> None:
        with self._deadline:
            await self._inlet.discard(payload_bytes)
        self._acknowledge(answer, payload_bytes)

    def _refuse_corrupt(self, transfer_id: int, entry: WriteEntry) -> WriteAck:
        self._door.traffic.num_checksum_failures += 1
        reason = f"checksum of page {entry.page} from {self._session.name} does not match its bytes"
        log.warning("%s", reason)
        self._session.fail(transfer_id, reason)
        return WriteAck(RefusalKind.CORRUPT, brief(reason))

    def _acknowledge(self, answer: WriteAck | None, num_bytes: int) -> None:
        """None: all is well. It leaves with those of the writes that have arrived already."""
        self._acks.append(_ACK if answer is None else encode_frame(answer))
        self._acknowledged_bytes += num_bytes
        if self._acknowledged_bytes >= _ANSWERED_BYTES:
            self._send_acks()

    def _send_acks(self) -> None:
        if self._acks:
            self.post(b"".join(self._acks))
            self._acks.clear()
            self._acknowledged_bytes = 0

    # -- reads ------------------------------------------------------------------------------------

    def _fetch(self, fetch: Fetch) -> None:
        """Answers it, now or after those before it: their answers have no other name."""
        if self._num_queued + len(self._read) >= MOST_FETCHES:
            raise TransferError(f"more than {MOST_FETCHES} fetches at once on one connection")
        if not self._num_queued and self._exposures is None:
            try:
                layers, heads = self._check_fetch(fetch)
                leased = self._door.reads.lease_now(fetch.keys, layers, heads)
            except MooncakeError as error:
                self._refuse_fetch(error)
                return
            if leased is not None:
                self._send_found(*leased)
                return
        self._num_queued += 1
        self._fetches.put_nowait(self._answer(fetch))

    async def _answer_fetches(self) -> None:
        try:
            while True:
                await (await self._fetches.get())
                self._num_queued -= 1
        finally:
            self.shut_down()  # nobody else would answer

    async def _answer(self, fetch: Fetch) -> None:
        try:
            layers, heads = self._check_fetch(fetch)
            blocks, end_lease = await self._door.reads.lease(fetch.keys, layers, heads)
            if self._exposures is None:
                self._send_found(blocks, end_lease)
            else:
                await self._open_found(self._exposures, blocks, end_lease)
        except MooncakeError as error:
            self._refuse_fetch(error)

    def _check_fetch(self, fetch: Fetch) -> tuple[range, range | None]:
        """The layers that are wanted, and the part of each. Raises TransferError."""
        layers = range(fetch.layer_begin, fetch.layer_end)
        heads, layer_bytes = self._part(fetch.heads)
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

    def _refuse_fetch(self, error: MooncakeError) -> None:
        self._read.append((lambda: None, 0))
        self.post(encode_frame(Found([], brief(str(error)))))

    def _send_found(self, blocks: Sequence[Readable], end_lease: Callable[[], None]) -> None:
        """The blocks stay where they are until the reader is through."""
        num_bytes = sum([len(block.view) for block in blocks])
        self._read.append((end_lease, num_bytes))
        found = Found([FoundBlock(b.index, b.checksums, b.source_offset) for b in blocks])
        if self._inlet.transport is Transport.TCP:
            self.post(encode_frame(found, num_bytes), *(block.view for block in blocks))
        else:
            self.post(encode_frame(found))

    async def _open_found(
        self, exposures: Exposures, blocks: Sequence[Readable], end_lease: Callable[[], None]
    ) -> None:
        """The same over RDMA, by which the reader fetches them himself."""
        places = [Range(block.source_offset, len(block.view)) for block in blocks]
        try:
            addresses, keys, close = await exposures.open_to_read(places)
        except BaseException:
            end_lease()
            raise

        def end() -> None:
            close()
            end_lease()

        self._read.append((end, sum(len(block.view) for block in blocks)))
        found = [
            FoundBlock(block.index, block.checksums, block.source_offset, address, key)
            for block, address, key in zip(blocks, addresses, keys, strict=True)
        ]
        self.post(encode_frame(Found(found)))


class _Placing:
    """One write on its way to its pages. `complete` or `abandon` it; after either, `abandon` does nothing."""

    def __init__(self, target: WriteTarget, write: Write, heads: range | None, layer_bytes: int) -> None:
        self.write = write
        self.layer_bytes = layer_bytes
        """of what comes of each layer"""
        self.entries: list[WriteEntry] = []
        """that are to be placed, each in its view"""
        self.views: list[memoryview] = []
        self._target = target
        self._heads = heads
        self._begun: list[WriteEntry] = []

    def begin(self, *, is_on_wire: bool) -> None:
        """What is there already goes nowhere: it is only taken off the wire. Raises WriteRefused."""
        for entry in self.write.entries:
            if entry.num_layers < 1:
                raise WriteRefused(f"layers [{entry.layer_begin}, {entry.layer_end}) are no layers")
            view = self._target.begin(self.write.grant_id, entry, self._heads)
            if view is not None:
                self._begun.append(entry)
            elif is_on_wire:
                view = memoryview(bytearray(entry.num_layers * self.layer_bytes))
            else:
                continue
            self.entries.append(entry)
            self.views.append(view)

    def complete(self) -> bool:
        """Whether these were the last bytes of the grant. Raises WriteRefused."""
        is_last = False
        while self._begun:
            is_last |= self._target.complete(self.write.grant_id, self._begun.pop(), self._heads)
        return is_last

    def abandon(self) -> None:
        while self._begun:
            self._target.abandon(self.write.grant_id, self._begun.pop(), self._heads)
