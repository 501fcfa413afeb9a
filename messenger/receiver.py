"""The receiving end of a connection: checks every write, places it, verifies it, acknowledges it.

Owns: the life of one incoming connection. Does not know: keys, reservations; whose pages these are
is the `WriteTarget`'s business.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Protocol

from messenger.checksums import layer_checksums
from messenger.identity import Identity
from messenger.protocol import (
    MAX_FRAME_ENTRIES,
    PROTOCOL_VERSION,
    Close,
    Ended,
    Frame,
    FrameReader,
    Hello,
    Message,
    Open,
    RefusalKind,
    Refused,
    Side,
    Write,
    WriteAck,
    WriteEntry,
    check_hello,
    encode_frame,
)
from messenger.stream import Stream
from messenger.transports import Inlet, ShmInlet, TcpInlet, Traffic, read_frame
from mooncake.errors import MismatchError, TransferError

log = logging.getLogger(__name__)


class WriteRefused(Exception):
    """A write may not be placed; the message is the reason the sender gets."""


class Writer(Protocol):
    """A peer that has opened a transfer, as its target sees it."""

    name: str

    def revoke(self, grant_id: int, reason: str) -> None:
        """Tell the peer to stop writing to this grant."""


class WriteTarget(Protocol):
    """Owner of the pages that remote writes go to.

    Every `begin` that returns is followed by exactly one `complete` or `abandon`, and the page must not
    be given to anybody else in between.
    """

    def open(self, grant_id: int, writer: Writer) -> None:
        """A writer has announced itself. Raises WriteRefused."""

    def begin(self, grant_id: int, entry: WriteEntry) -> memoryview:
        """Where the bytes of `entry` go. Raises WriteRefused before a byte is placed."""

    def complete(self, grant_id: int, entry: WriteEntry) -> None:
        """The bytes are there and verified. Raises WriteRefused (once) if nobody wants them any more."""

    def abandon(self, grant_id: int, entry: WriteEntry) -> None:
        """Nothing more will be placed for `entry`; the bytes there are worth nothing."""

    def close(self, grant_id: int, writer: Writer, reason: str | None) -> None:
        """The writer is through; `reason` says why if not all of its writes were completed."""


class Receiver:
    """One incoming connection, from handshake to end."""

    def __init__(
        self,
        stream: Stream,
        target: WriteTarget,
        traffic: Traffic,
        *,
        ack_timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.name = "an unknown peer"
        self._stream = stream
        self._target = target
        self._traffic = traffic
        self._ack_timeout_s = ack_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._reader = FrameReader(Side.RECEIVER)
        self._grants: dict[int, int] = {}
        """grant id of each open transfer, by transfer id"""
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    async def run(self, identity: Identity) -> None:
        """Serves the connection until the peer leaves. Every open transfer is closed with a reason."""
        reason = "the messenger stops"
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                inlet = await self._greet(identity)
            await self._serve(inlet)
        except (OSError, TransferError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            log.info("connection from %s ended: %s", self.name, reason)
        finally:
            self._stream.close()
            for grant_id in self._grants.values():
                self._target.close(grant_id, self, f"connection from {self.name} was lost: {reason}")

    async def _serve(self, inlet: Inlet) -> None:
        flush = asyncio.create_task(self._flush())
        try:
            while True:
                await self._handle(inlet, await read_frame(self._stream, self._reader))
        finally:
            flush.cancel()
            await asyncio.gather(flush, return_exceptions=True)

    async def _flush(self) -> None:
        while True:
            await self._stream.send([await self._outbox.get()])

    async def _greet(self, identity: Identity) -> Inlet:
        hello = (await read_frame(self._stream, self._reader)).message
        assert isinstance(hello, Hello)
        self.name = hello.identity.instance
        try:
            check_hello(identity, hello)
        except MismatchError as error:
            await self._stream.send([encode_frame(Refused(str(error)))])
            raise TransferError(f"refused: {error}") from error
        fd = self._stream.take_fd()
        if hello.segment_bytes is None:
            inlet: Inlet = TcpInlet(self._stream)
        elif fd is None:
            raise TransferError("the hello announces a shared segment, but no descriptor came along")
        else:
            try:
                inlet = ShmInlet(fd, hello.segment_bytes)
            finally:
                os.close(fd)  # the mapping stays
        await self._stream.send([encode_frame(Hello(PROTOCOL_VERSION, identity))])
        return inlet

    async def _handle(self, inlet: Inlet, frame: Frame) -> None:
        match frame.message:
            case Open(transfer_id, grant_id, ref_text):
                self._open(transfer_id, grant_id, ref_text)
            case Write() as write:
                self._post(await self._write(inlet, write, frame.payload_bytes))
            case Close(transfer_id, reason):
                grant = self._grants.pop(transfer_id, None)
                if grant is not None:
                    self._target.close(
                        grant, self, None if reason is None else f"{self.name} gave up: {reason}"
                    )
            case _:
                raise AssertionError("the protocol's table lets nothing else through")

    def _open(self, transfer_id: int, grant_id: int, ref_text: str) -> None:
        try:
            self._target.open(grant_id, self)
        except WriteRefused as error:
            log.info("transfer %s of %s refused: %s", ref_text, self.name, error)
            self._post(Ended(transfer_id, str(error)))
        else:
            self._grants[transfer_id] = grant_id

    async def _write(self, inlet: Inlet, write: Write, payload_bytes: int) -> WriteAck:
        """Places one write, all of it or none. The connection cannot go on if this raises."""
        if not 0 < len(write.entries) <= MAX_FRAME_ENTRIES:
            raise TransferError(
                f"a write has {len(write.entries)} entries, allowed are 1 to {MAX_FRAME_ENTRIES}"
            )
        begun: list[WriteEntry] = []
        grant_id = self._grants.get(write.transfer_id)
        try:
            async with asyncio.timeout(self._ack_timeout_s):
                if grant_id is None:
                    await inlet.discard(payload_bytes)
                    return WriteAck(RefusalKind.STALE, "this transfer has ended")
                try:
                    pages = self._begin(grant_id, write.entries, begun)
                except WriteRefused as error:
                    await inlet.discard(payload_bytes)
                    return WriteAck(RefusalKind.STALE, str(error))
                inlet.check(sum(map(len, pages)), payload_bytes)
                await inlet.place(write.entries, pages)
            bad_entry = _first_bad_entry(write.entries, pages)
            if bad_entry is not None:
                return self._refuse_corrupt(write.transfer_id, bad_entry)
            self._traffic.received_bytes[inlet.transport] += sum(map(len, pages))
            try:
                while begun:
                    self._target.complete(grant_id, begun.pop())
            except WriteRefused as error:
                return WriteAck(RefusalKind.STALE, str(error))
        finally:
            for entry in begun:
                assert grant_id is not None
                self._target.abandon(grant_id, entry)
        return WriteAck()

    def _begin(
        self, grant_id: int, entries: Sequence[WriteEntry], begun: list[WriteEntry]
    ) -> list[memoryview]:
        pages = []
        for entry in entries:
            pages.append(self._target.begin(grant_id, entry))
            begun.append(entry)
        return pages

    def _refuse_corrupt(self, transfer_id: int, entry: WriteEntry) -> WriteAck:
        self._traffic.num_checksum_failures += 1
        reason = f"checksum of page {entry.page} from {self.name} does not match its bytes"
        log.warning("%s", reason)
        grant_id = self._grants.pop(transfer_id, None)
        if grant_id is not None:
            self._target.close(grant_id, self, reason)
        return WriteAck(RefusalKind.CORRUPT, reason)

    def revoke(self, grant_id: int, reason: str) -> None:
        for transfer_id in [t for t, g in self._grants.items() if g == grant_id]:
            del self._grants[transfer_id]
            self._post(Ended(transfer_id, reason))

    def _post(self, message: Message) -> None:
        self._outbox.put_nowait(encode_frame(message))


async def refuse(stream: Stream, reason: str, timeout_s: float) -> None:
    """Hears the peer's hello and turns it away."""
    try:
        async with asyncio.timeout(timeout_s):
            await read_frame(stream, FrameReader(Side.RECEIVER))
            await stream.send([encode_frame(Refused(reason))])
    except (OSError, TransferError) as error:
        log.info("a peer left before it was refused: %s", error)
    finally:
        stream.close()


def _first_bad_entry(entries: Sequence[WriteEntry], pages: Sequence[memoryview]) -> WriteEntry | None:
    for entry, page in zip(entries, pages, strict=True):
        if layer_checksums(page, len(page) // entry.num_layers) != entry.checksums:
            return entry
    return None
