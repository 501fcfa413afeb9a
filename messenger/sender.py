"""The sending end: connections to other messengers, and the transfers on them.

A connection has a bounded number of unacknowledged frames. When it is lost all of its transfers fail,
and the next one connects anew: one failed transfer does not poison later ones.

Owns: outgoing connections and their frames. Does not know: keys, leases; what must stay in place until
a frame is through is said by that frame's `done` callback.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from weakref import WeakValueDictionary

from messenger.identity import Identity
from messenger.protocol import (
    PROTOCOL_VERSION,
    Close,
    Ended,
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
    encode_frame,
)
from messenger.stream import Stream
from messenger.transports import (
    SourceSegment,
    Traffic,
    Transport,
    candidates,
    open_socket,
    read_frame,
)
from mooncake.config import TransportChoice
from mooncake.errors import TransferError
from mooncake.messages import MessengerAddress

log = logging.getLogger(__name__)

MAX_OUTSTANDING_FRAMES = 8


class Outcome(Enum):
    """What became of a frame."""

    PLACED = auto()
    """verified and acknowledged by the receiver"""
    CORRUPT = auto()
    """refused: its bytes did not match their checksums"""
    FAILED = auto()
    """refused for another reason, lost with its connection, or never sent"""


@dataclass(slots=True, eq=False)
class _Frame:
    """A write between submission and acknowledgement. `done` runs exactly once, whatever happens."""

    transfer: "Transfer"
    entries: list[WriteEntry]
    num_bytes: int
    done: Callable[[Outcome], None]


class Transfer:
    """Writes to one grant over one connection. Fails as a whole and for good."""

    def __init__(self, link: "Link", transfer_id: int, on_change: Callable[[], None]) -> None:
        self._link = link
        self.transfer_id = transfer_id
        self.failure: str | None = None
        self.changed = on_change

    def check(self) -> None:
        """Raises TransferError once this transfer has failed."""
        if self.failure is not None:
            raise TransferError(self.failure)

    async def write(self, entries: list[WriteEntry], num_bytes: int, done: Callable[[Outcome], None]) -> None:
        """Submits one frame, waiting while the connection has too many outstanding.

        `done` is called once, when no byte of the source will be read for this frame any more. Raises
        TransferError if the transfer has failed; `done` was called then too.
        """
        await self._link.submit(_Frame(self, entries, num_bytes, done))
        self.check()

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self.changed()


class Link:
    """One open connection on which this messenger writes."""

    def __init__(
        self,
        peer: str,
        transport: Transport,
        stream: Stream,
        source: SourceSegment,
        traffic: Traffic,
        timeout_s: float,
    ) -> None:
        self.peer = peer
        self.transport = transport
        self.closed_reason: str | None = None
        self._stream = stream
        self._source = source
        self._traffic = traffic
        self._ack_timeout_s = timeout_s
        self._reader = FrameReader(Side.SENDER)
        self._transfers: dict[int, Transfer] = {}
        self._transfer_ids = itertools.count(1)
        self._window = asyncio.Semaphore(MAX_OUTSTANDING_FRAMES)
        self._queue: asyncio.Queue[_Frame | Message] = asyncio.Queue()
        self._outstanding: deque[_Frame] = deque()
        self._overdue: asyncio.TimerHandle | None = None

    async def greet(self, identity: Identity, address: MessengerAddress) -> None:
        """The handshake. Raises TransferError if the peer refuses or is somebody else."""
        shm = self.transport is Transport.SHM
        hello = Hello(PROTOCOL_VERSION, identity, len(self._source.buffer) if shm else None)
        await self._stream.send([encode_frame(hello)], fd=self._source.read_only_fd if shm else None)
        answer = (await read_frame(self._stream, self._reader)).message
        if isinstance(answer, Refused):
            raise TransferError(f"{address.instance} refuses {identity.instance}: {answer.message}")
        assert isinstance(answer, Hello)
        met = answer.identity
        if (met.instance, met.incarnation) != (address.instance, address.incarnation):
            raise TransferError(
                f"expected messenger {address.instance} (incarnation {address.incarnation}), but"
                f" {met.instance} (incarnation {met.incarnation}) answers there; the grant is out of date"
            )

    async def run(self) -> None:
        """Writes and reads until the connection is lost; then everything on it fails."""
        reason = "the messenger stops"
        writer = asyncio.create_task(self._write_frames())
        reader = asyncio.create_task(self._read_answers())
        try:
            done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for error in (task.exception() for task in done) if error is not None]
            reason = self.closed_reason or str(errors[0])
            for error in errors:
                if not isinstance(error, (OSError, TransferError)):
                    raise error
        finally:
            for task in (writer, reader):
                task.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)
            self._lose(f"connection to {self.peer} was lost: {reason}")

    @contextmanager
    def transfer(self, grant_id: int, ref_text: str, on_change: Callable[[], None]) -> Iterator[Transfer]:
        """A transfer to `grant_id`; left by an exception it is given up, and the peer is told why.

        `on_change` is called when a frame is through or the transfer has failed.
        """
        transfer = Transfer(self, next(self._transfer_ids), on_change)
        if self.closed_reason is not None:
            raise TransferError(self.closed_reason)
        self._transfers[transfer.transfer_id] = transfer
        self._queue.put_nowait(Open(transfer.transfer_id, grant_id, ref_text))
        reason: str | None = "the sender has stopped"
        try:
            yield transfer
            reason = None
        except TransferError as error:
            reason = str(error)
            raise
        except asyncio.CancelledError:
            reason = "cancelled by its worker"
            raise
        finally:
            transfer.failure = transfer.failure or reason
            self._transfers.pop(transfer.transfer_id, None)
            self._queue.put_nowait(Close(transfer.transfer_id, reason))

    async def submit(self, frame: _Frame) -> None:
        try:
            await self._window.acquire()
        except asyncio.CancelledError:
            self._finish(frame, Outcome.FAILED)
            raise
        if self.closed_reason is not None:
            self._window.release()
            self._finish(frame, Outcome.FAILED)
            return
        self._queue.put_nowait(frame)

    def _finish(self, frame: _Frame, outcome: Outcome) -> None:
        frame.done(outcome)
        frame.transfer.changed()

    async def _write_frames(self) -> None:
        while True:
            item = await self._queue.get()
            if not isinstance(item, _Frame):
                await self._stream.send([encode_frame(item)])
            elif item.transfer.failure is not None:
                self._window.release()
                self._finish(item, Outcome.FAILED)
            else:
                self._outstanding.append(item)
                if len(self._outstanding) == 1:
                    self._await_ack()
                await self._stream.send(self._encode(item))

    def _encode(self, frame: _Frame) -> list[bytes | memoryview]:
        write = Write(frame.transfer.transfer_id, frame.entries)
        if self.transport is Transport.SHM:
            return [encode_frame(write)]
        layer_bytes = frame.num_bytes // sum(entry.num_layers for entry in frame.entries)
        buffer = self._source.buffer
        return [
            encode_frame(write, frame.num_bytes),
            *(buffer[e.source_offset : e.source_offset + e.num_layers * layer_bytes] for e in frame.entries),
        ]

    async def _read_answers(self) -> None:
        while True:
            message = (await read_frame(self._stream, self._reader)).message
            if isinstance(message, WriteAck):
                self._acknowledged(message)
            elif isinstance(message, Ended):
                transfer = self._transfers.get(message.transfer_id)
                if transfer is not None:
                    transfer.fail(f"{self.peer} ended the transfer: {message.reason}")

    def _acknowledged(self, ack: WriteAck) -> None:
        if not self._outstanding:
            raise TransferError("an acknowledgement came for no write")
        frame = self._outstanding.popleft()
        self._await_ack()
        self._window.release()
        if ack.refusal is None:
            self._traffic.sent_bytes[self.transport] += frame.num_bytes
            self._finish(frame, Outcome.PLACED)
        else:
            frame.transfer.fail(f"{self.peer} refused a write: {ack.message}")
            is_corrupt = ack.refusal is RefusalKind.CORRUPT
            self._finish(frame, Outcome.CORRUPT if is_corrupt else Outcome.FAILED)

    def _await_ack(self) -> None:
        """(Re)starts the deadline of the oldest outstanding frame."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        if self._outstanding:
            loop = asyncio.get_running_loop()
            self._overdue = loop.call_later(self._ack_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self.closed_reason = f"no acknowledgement within {self._ack_timeout_s} s"
        self._stream.shut_down()

    def _lose(self, reason: str) -> None:
        """The end: the peer cannot place anything any more that it reads from us."""
        self.closed_reason = reason
        self._stream.close()
        if self._overdue is not None:
            self._overdue.cancel()
        for transfer in list(self._transfers.values()):
            transfer.fail(reason)
        unsent = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, _Frame):
                unsent.append(item)
        for frame in (*self._outstanding, *unsent):
            self._window.release()
            self._finish(frame, Outcome.FAILED)
        self._outstanding.clear()


class Links:
    """Open connections by address, made on demand and shared by all transfers to that address."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        source: SourceSegment,
        traffic: Traffic,
        *,
        identity: Identity,
        choice: TransportChoice,
        ack_timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self._tasks = tasks
        self._source = source
        self._traffic = traffic
        self._identity = identity
        self._choice = choice
        self._ack_timeout_s = ack_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[MessengerAddress, Link] = {}
        self._connecting: WeakValueDictionary[MessengerAddress, asyncio.Lock] = WeakValueDictionary()

    async def link(self, address: MessengerAddress) -> Link:
        """The connection to `address`. Raises TransferError if there can be none."""
        lock = self._connecting.setdefault(address, asyncio.Lock())
        async with lock:
            link = self._links.get(address)
            if link is None or link.closed_reason is not None:
                link = await self._connect(address)
                self._links[address] = link
                self._tasks.create_task(self._run(address, link))
            return link

    async def _run(self, address: MessengerAddress, link: Link) -> None:
        try:
            await link.run()
        finally:
            log.info("%s", link.closed_reason)
            if self._links.get(address) is link:
                del self._links[address]

    async def _connect(self, address: MessengerAddress) -> Link:
        reasons = []
        for transport in candidates(self._choice, self._identity.host_id, address):
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    return await self._connect_by(transport, address)
            except TimeoutError:
                reasons.append(f"{transport}: no answer within {self._connect_timeout_s} s")
            except (OSError, ValueError, OverflowError) as error:  # an address may be none at all
                reasons.append(f"{transport}: {error}")
        raise TransferError(f"cannot reach messenger {address.instance} ({'; '.join(reasons)})")

    async def _connect_by(self, transport: Transport, address: MessengerAddress) -> Link:
        sock, place = open_socket(transport, address)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, place)
            stream = Stream(sock)
            link = Link(address.instance, transport, stream, self._source, self._traffic, self._ack_timeout_s)
            await link.greet(self._identity, address)
        except BaseException:
            sock.close()
            raise
        return link
