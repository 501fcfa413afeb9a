"""The receiving side of one connection, which checks, places, verifies and acknowledges writes.

Owns: a connection after its handshake. Does not know: keys, reservations, pages (`WriteTarget`), fetches
(`messenger.receiver.fetch_answerer`).
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence

from messenger.receiver.fetch_answerer import FetchAnswerer
from messenger.receiver.incoming_session import IncomingSession, SessionLane
from messenger.receiver.pending_write import HeadRanges, PendingWrite
from messenger.receiver.replies import Replies
from messenger.receiver.served_pool import ServedPool, WriteRefused
from messenger.transport.deadline import Deadline
from messenger.transport.exposures import Exposures
from messenger.transport.frames import Frames
from messenger.transport.transports import Inlet
from messenger.wire.messages import (
    Abandon,
    Close,
    Expose,
    Exposed,
    Fetch,
    FetchDone,
    Open,
    Probe,
    RefusalKind,
    Write,
    WriteAck,
    WriteEntry,
    brief,
)
from messenger.wire.protocol import MAX_FRAME_BYTES, MAX_FRAME_ENTRIES, NOT_URGENT_S, Frame, encode_frame
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout

log = logging.getLogger(__name__)

_ANSWERED_BYTES = 2 << 20
"""Acknowledgements wait to be sent together until their writes have this many bytes.

The sender may wait for them before it sends more.
"""
_MOST_ACKS = 16
"""The most waiting acknowledgements of writes whose bytes the sender has placed itself."""
_ACK = encode_frame(WriteAck())


class IncomingLane:
    """One connection of a sender after its handshake."""

    def __init__(
        self,
        served_pool: ServedPool,
        frames: Frames,
        inlet: Inlet,
        exposures: Exposures,
        layout: KVLayout | None,
    ) -> None:
        """Prepare the lane of a sender whose blocks have `layout`.

        `layout` is None for a sender that has no blocks and may only probe.
        """
        self.ended = asyncio.Event()
        """Event that is set when no more bytes from this lane will be placed."""
        self._served_pool = served_pool
        self._frames = frames
        self._stream = frames.stream
        self._inlet = inlet
        self._exposures = exposures
        self._may_only_probe = layout is None
        self._most_bytes = max(MAX_FRAME_BYTES, served_pool.identity.layout.layer_bytes)
        """The most bytes of one write."""
        self._parts = HeadRanges(served_pool.identity.layout, layout)
        self._session: IncomingSession
        self._replies = Replies(self._stream)
        self._acks: list[bytes] = []
        """Acknowledgements that leave together."""
        self._acknowledged_bytes = 0
        """Bytes of the writes that `_acks` acknowledge."""
        self._are_acks_urgent = False
        """Whether the sender waits for one of `_acks`."""
        self._acks_due: asyncio.TimerHandle | None = None
        self._deadline = Deadline(served_pool.settings.ack_timeout_s, self._stream.shut_down)
        self._rest: Coroutine[None, None, None] | None = None
        """The part of a frame's handling that has to be awaited; None if there is no such part."""
        self._placing: PendingWrite | None = None
        """The write whose payload is awaited."""
        self._answerer = FetchAnswerer(served_pool, inlet, exposures, self._parts, self._replies)
        self.awaited: SessionLane | None = None
        """The lane whose end this lane awaits; None if this lane awaits no lane."""

    def post(self, *buffers: bytes | memoryview) -> None:
        self._replies.post(*buffers)

    def shut_down(self) -> None:
        self._stream.shut_down()

    def discard(self) -> None:
        """Free the resources of a lane that will not be run."""
        self._exposures.close()

    def conceal(self, transfer_id: int) -> None:
        self._exposures.conceal(transfer_id)

    def conceal_in_time(self, transfer_id: int) -> None:
        self._exposures.conceal_within(transfer_id, self._served_pool.settings.ack_timeout_s)

    async def run(self, session: IncomingSession) -> str:
        """Serve the connection until it is lost. Returns the reason of the loss."""
        self._session = session
        session.lets_place |= self._exposures.lets_place
        answering = asyncio.create_task(self._answerer.run())
        try:
            while True:
                await self._frames.dispatch(self._handle_frames)
                if self._rest is not None:
                    rest, self._rest = self._rest, None
                    await rest
                if self._stream.num_ahead:
                    await self._stream.take_turns()
        except (OSError, TransferError) as error:
            return str(error) or "no answer in time"
        finally:
            self._exposures.close()
            if self._acks_due is not None:
                self._acks_due.cancel()
            self._deadline.close()
            if self._rest is not None:
                self._rest.close()
            if self._placing is not None:
                self._placing.abandon()  # also if nobody has begun to wait for its bytes
            answering.cancel()
            try:
                (failure,) = await asyncio.gather(answering, return_exceptions=True)
                if isinstance(failure, Exception):
                    log.error("a fetch of %s could not be answered", session.name, exc_info=failure)
                await self._replies.close()
            finally:  # also if it is cancelled again
                self._answerer.close()

    def _handle_frames(self) -> bool:
        """Handle the received frames.

        Returns True if the caller must act before more is handled: await `_rest`, or let other tasks have a
        turn.
        """
        while (frame := self._frames.ready()) is not None:
            self._rest = self._handle(frame)
            if self._rest is not None or (self._stream.is_turn_over and self._stream.num_ahead):
                break
        if self._are_acks_urgent:
            self._send_acks()
        elif self._acks and self._acks_due is None:
            self._acks_due = asyncio.get_running_loop().call_later(NOT_URGENT_S, self._send_acks)
        return frame is not None

    def _handle(self, frame: Frame) -> Coroutine[None, None, None] | None:
        """Handle one frame as far as possible at once.

        Returns a coroutine for the rest; None if nothing is left. An exception of this call or of the
        coroutine ends the connection.
        """
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
                self._answerer.fetch(fetch)
            case FetchDone(damaged):
                self._answerer.fetched(damaged)
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
        """End `lane`, and wait until no more of its bytes will be placed."""
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
        """Open the pages of a grant to the sender.

        If the device fails, the connection ends, and other lanes carry the writes.
        """
        if not self._exposures.opens_ranges:
            raise TransferError("pages are to be opened on a connection on which none can be")
        try:
            self._session.ensure_open(transfer_id, grant_id)
            pages, on_closed = self._served_pool.target.expose(grant_id)
        except WriteRefused as error:
            self.post(encode_frame(Exposed(transfer_id, [], brief(str(error)))))
            return
        async with asyncio.timeout(self._served_pool.settings.ack_timeout_s):
            opened = await self._exposures.expose(transfer_id, pages, on_closed)
        failure = None if transfer_id in self._session.grants else "the transfer has ended"
        if failure is not None or not self._served_pool.target.is_open(grant_id):  # it has ended meanwhile
            self.conceal(transfer_id)
            opened = []
        self.post(encode_frame(Exposed(transfer_id, opened, failure)))

    # -- writes -----------------------------------------------------------------------------------

    def _write(self, write: Write, payload_bytes: int) -> Coroutine[None, None, None] | None:
        """Place one write, all of it or none. Returns a coroutine if its bytes must be awaited."""
        entries = write.entries
        heads, layer_bytes = self._parts.of(write.heads)
        if not 0 < len(entries) <= MAX_FRAME_ENTRIES:
            raise TransferError(f"a write has {len(entries)} entries, allowed are 1 to {MAX_FRAME_ENTRIES}")
        num_bytes = sum([max(0, entry.num_layers) for entry in entries]) * layer_bytes
        if num_bytes > self._most_bytes:
            raise TransferError(f"a write of {num_bytes} bytes; a frame has at most {MAX_FRAME_BYTES}")
        if write.is_placed and not self._session.lets_place:
            raise TransferError("bytes are said to be in pages that nobody can write")
        placing = PendingWrite(self._served_pool.target, write, heads, layer_bytes)
        try:
            try:
                self._session.ensure_open(write.transfer_id, write.grant_id)
                placing.begin(is_on_wire=self._inlet.has_payload)
            except WriteRefused as error:
                placing.abandon()
                return self._discard(payload_bytes, WriteAck(RefusalKind.STALE, brief(str(error))))
            self._inlet.check(num_bytes, payload_bytes)
            if write.is_placed:
                self._complete(placing, num_bytes)
                return None
            checksums = self._inlet.fill_now(placing.entries, placing.views, layer_bytes)
        except BaseException:
            placing.abandon()
            raise
        if checksums is None:
            self._placing = placing
            return self._receive(placing, num_bytes)
        self._placed(placing, checksums, num_bytes)
        return None

    async def _receive(self, placing: PendingWrite, num_bytes: int) -> None:
        with self._deadline:
            checksums = await self._inlet.fill(placing.entries, placing.views, placing.layer_bytes)
        self._placing = None
        self._placed(placing, checksums, num_bytes)

    def _placed(self, placing: PendingWrite, checksums: Sequence[bytes], num_bytes: int) -> None:
        """Verify a write whose bytes have arrived, and acknowledge it."""
        write = placing.write
        try:
            for entry, actual in zip(placing.entries, checksums, strict=True):
                if actual != entry.checksums:
                    self._acknowledge(self._refuse_corrupt(write.transfer_id, entry), num_bytes)
                    return
            self._complete(placing, num_bytes)
        finally:
            placing.abandon()

    def _complete(self, placing: PendingWrite, num_bytes: int) -> None:
        """Complete a write that has been verified."""
        write = placing.write
        self._served_pool.traffic.received_bytes[self._inlet.transport] += num_bytes
        try:
            is_last = placing.complete()
        except WriteRefused as error:
            placing.abandon()
            self._acknowledge(WriteAck(RefusalKind.STALE, brief(str(error))), num_bytes)
            return
        if write.is_placed and not is_last:
            self._acks.append(_ACK)
            if len(self._acks) >= _MOST_ACKS:
                self._send_acks()
        else:
            self._acknowledge(None, num_bytes)

    async def _discard(self, payload_bytes: int, answer: WriteAck) -> None:
        with self._deadline:
            await self._inlet.discard(payload_bytes)
        self._acknowledge(answer, payload_bytes)

    def _refuse_corrupt(self, transfer_id: int, entry: WriteEntry) -> WriteAck:
        self._served_pool.traffic.num_checksum_failures += 1
        reason = f"checksum of page {entry.page} from {self._session.name} does not match its bytes"
        log.warning("%s", reason)
        self._session.fail(transfer_id, reason)
        return WriteAck(RefusalKind.CORRUPT, brief(reason))

    def _acknowledge(self, answer: WriteAck | None, num_bytes: int) -> None:
        """Queue an acknowledgement, to be sent with the acknowledgements of other writes.

        `answer`: the acknowledgement; None for a write that is complete.
        """
        self._acks.append(_ACK if answer is None else encode_frame(answer))
        self._are_acks_urgent = True
        self._acknowledged_bytes += num_bytes
        if self._acknowledged_bytes >= _ANSWERED_BYTES:
            self._send_acks()

    def _send_acks(self) -> None:
        if self._acks_due is not None:
            self._acks_due.cancel()
            self._acks_due = None
        self._are_acks_urgent = False
        if self._acks:
            self.post(b"".join(self._acks))
            self._acks.clear()
            self._acknowledged_bytes = 0
