"""The answering side: checks every write, places it, verifies it, acknowledges it; sends what is fetched.

All lanes of a sender belong to one session, which ends with the last of them.

Owns: incoming sessions and their lanes. Does not know: keys, reservations; whose pages these are is the
`WriteTarget`'s business, what can be read the `ReadSource`'s.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from messenger import handshake
from messenger.handshake import StrangerError, admit, welcome
from messenger.identity import Identity
from messenger.protocol import (
    MAX_FRAME_BYTES,
    MAX_FRAME_ENTRIES,
    Abandon,
    Close,
    Ended,
    Expose,
    Exposed,
    Fetch,
    FetchDone,
    Found,
    FoundBlock,
    Frame,
    FrameReader,
    Introduction,
    Message,
    Open,
    Probe,
    RefusalKind,
    Side,
    Write,
    WriteAck,
    WriteEntry,
    encode_frame,
)
from messenger.rdma.cards import Cards
from messenger.rdma.exposures import Exposures
from messenger.rdma.remote import InPlace
from messenger.rdma.windows import Range
from messenger.stream import Outbox, Stream, Watch
from messenger.transports import Inlet, ShmInlet, SourceSegment, TcpInlet, Traffic, Transport
from mooncake.config import MessengerConfig
from mooncake.errors import MismatchError, MooncakeError, TransferError
from mooncake.keys import ClusterKey

log = logging.getLogger(__name__)

_MOST_ANSWERS = 1024
"""of one lane that wait to be sent"""
MOST_FETCHES = 64
"""of one lane that are being answered or read"""


class WriteRefused(Exception):
    """A write may not be placed; the message is the reason the sender gets."""


class Writer(Protocol):
    """A peer that has opened a transfer, as its target sees it."""

    name: str

    def revoke(self, grant_id: int, reason: str) -> None:
        """Tell the peer to stop writing to this grant."""


class WriteTarget(Protocol):
    """Owner of the pages that remote writes go to.

    Every `begin` that returns a view is followed by exactly one `complete` or `abandon`, and the page must
    not be given to anybody else in between.
    """

    def open(self, grant_id: int, writer: Writer) -> None:
        """A writer has announced itself. Idempotent. Raises WriteRefused."""

    def begin(self, grant_id: int, entry: WriteEntry) -> memoryview | None:
        """Where the bytes of `entry` go; None if they are there already: a lost connection may have kept the
        acknowledgement. Raises WriteRefused before a byte is placed."""

    def expose(self, grant_id: int) -> tuple[list[tuple[int, Range]], Callable[[], None]]:
        """The pages of the grant that are not complete, with their places in the segment. They are given to
        nobody else until what is returned with them is called. Raises WriteRefused."""

    def complete(self, grant_id: int, entry: WriteEntry) -> bool:
        """The bytes are there and verified. Whether they were the last. Raises WriteRefused (once) if nobody
        wants them any more."""

    def abandon(self, grant_id: int, entry: WriteEntry) -> None:
        """Nothing more will be placed for `entry`; the bytes there are worth nothing."""

    def close(self, grant_id: int, writer: Writer, reason: str | None) -> None:
        """The writer is through; `reason` says why if not all of its writes were completed."""


@dataclass(frozen=True, slots=True)
class Readable:
    """A block that stays where it is until its lease ends."""

    index: int
    """into the keys that were asked for"""
    view: memoryview
    source_offset: int
    checksums: bytes


class ReadSource(Protocol):
    """Owner of the blocks that others may read."""

    async def lease(self, keys: Sequence[bytes], layers: range) -> tuple[list[Readable], Callable[[], None]]:
        """Those of `keys` that are there, and what ends their lease. Raises MooncakeError."""


@dataclass(frozen=True, slots=True)
class Door:
    """What every lane needs: who we are, whom we let in, and what they may write and read."""

    identity: Identity
    key: ClusterKey
    target: WriteTarget
    reads: ReadSource
    source: SourceSegment
    traffic: Traffic
    settings: MessengerConfig
    cards: Cards


@dataclass(slots=True, eq=False)
class Session:
    """All lanes of one sender. As a `Writer` it may be told to stop."""

    name: str
    target: WriteTarget
    lanes: dict[int, "IncomingLane"] = field(default_factory=dict)
    grants: dict[int, int] = field(default_factory=dict)
    """grant of each open transfer"""

    def open(self, transfer_id: int, grant_id: int, ref_text: str) -> None:
        self._check_grant(transfer_id, grant_id)
        try:
            self.target.open(grant_id, self)
        except WriteRefused as error:
            log.info("transfer %s of %s refused: %s", ref_text, self.name, error)
            self.post(Ended(transfer_id, str(error)))
        else:
            self.grants[transfer_id] = grant_id

    def ensure_open(self, transfer_id: int, grant_id: int) -> None:
        """For a lane that was faster than the one with the `Open`. Raises WriteRefused."""
        self._check_grant(transfer_id, grant_id)
        if transfer_id not in self.grants:
            self.target.open(grant_id, self)
            self.grants[transfer_id] = grant_id

    def _check_grant(self, transfer_id: int, grant_id: int) -> None:
        """A transfer writes to one grant, or that grant would not hear of its end. Raises TransferError."""
        opened = self.grants.get(transfer_id, grant_id)
        if opened != grant_id:
            raise TransferError(f"transfer {transfer_id} is open for grant {opened}, it names {grant_id}")

    def close(self, transfer_id: int, reason: str | None) -> None:
        self.conceal(transfer_id)
        grant_id = self.grants.pop(transfer_id, None)
        if grant_id is not None:
            self.target.close(grant_id, self, reason)

    def conceal(self, transfer_id: int) -> None:
        """Nothing can be written by RDMA any more."""
        for lane in self.lanes.values():
            lane.conceal(transfer_id)

    def revoke(self, grant_id: int, reason: str) -> None:
        for transfer_id in [t for t, g in self.grants.items() if g == grant_id]:
            self.conceal(transfer_id)
            del self.grants[transfer_id]
            self.post(Ended(transfer_id, reason))

    def post(self, message: Message) -> None:
        """To the sender, over any lane."""
        for lane in self.lanes.values():
            lane.post(message)
            return

    def lost(self, reason: str) -> None:
        """The last lane has ended."""
        for grant_id in self.grants.values():
            self.target.close(grant_id, self, f"connection from {self.name} was lost: {reason}")
        self.grants.clear()


class Sessions:
    """All senders that are connected. Every connection is handed to `serve`."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._sessions: dict[tuple[str, bytes], Session] = {}

    async def serve(self, stream: Stream) -> None:
        """One connection, until it ends. A stranger's costs a counter."""
        door = self._door
        try:
            try:
                async with asyncio.timeout(door.settings.connect_timeout_s):
                    reader = FrameReader(Side.RECEIVER)
                    await _shake_hands(stream)
                    introduction = await admit(stream, reader, door.key)
                    lane = await self._welcome(stream, reader, introduction)
            except (StrangerError, TimeoutError) as error:
                door.traffic.num_strangers += 1
                log.info("a stranger is turned away: %s", str(error) or "it said nothing in time")
            except (OSError, TransferError, MismatchError) as error:
                log.info("a connection was refused: %s", error)
            else:
                await self._run(lane, introduction)
        except Exception:  # an error of ours must not end the other connections
            log.exception("a connection ends")
        finally:
            stream.close()

    async def _welcome(
        self, stream: Stream, reader: FrameReader, introduction: Introduction
    ) -> "IncomingLane":
        """Raises TransferError, MismatchError, OSError."""
        door, inlet, exposures = self._door, cast(Inlet, TcpInlet(stream)), None
        segment = endpoint = None
        with contextlib.ExitStack() as on_failure:
            if introduction.segment_bytes is not None:
                inlet = ShmInlet(stream.take_fd(), introduction.segment_bytes)
                segment = handshake.Segment(len(door.source.buffer), door.source.read_only_fd)
            elif introduction.endpoint is not None:
                try:
                    card = door.cards.next()
                except TransferError as error:
                    await handshake.refuse(stream, str(error))
                    raise
                endpoint = card.endpoint("a sender")
                on_failure.callback(endpoint.close)
                endpoint.connect(introduction.endpoint)
                inlet, exposures = InPlace(), Exposures(endpoint, card.memory)
            local_info = endpoint.local_info() if endpoint is not None else None
            await welcome(stream, door.identity, introduction, segment, local_info)
            on_failure.pop_all()
        may_only_probe = introduction.identity is None
        return IncomingLane(door, stream, reader, inlet, exposures, may_only_probe=may_only_probe)

    async def _run(self, lane: "IncomingLane", introduction: Introduction) -> None:
        identity, number = introduction.identity, introduction.lane
        name = identity.instance if identity is not None else "a probe"
        session = self._sessions.setdefault((name, introduction.session), Session(name, self._door.target))
        if number in session.lanes:
            log.info("%s has a lane %d already", name, number)
            lane.discard()
            return
        session.lanes[number] = lane
        reason = "the messenger stops"
        try:
            reason = await lane.run(session)
            log.info("connection from %s ended: %s", name, reason)
        finally:
            del session.lanes[number]
            if not session.lanes:
                del self._sessions[name, introduction.session]
                session.lost(reason)
            lane.ended.set()


class IncomingLane:
    """One connection, after its handshake."""

    def __init__(
        self,
        door: Door,
        stream: Stream,
        reader: FrameReader,
        inlet: Inlet,
        exposures: Exposures | None,
        *,
        may_only_probe: bool,
    ) -> None:
        self.ended = asyncio.Event()
        """set when nothing that came over it will be placed any more"""
        self._door = door
        self._stream = stream
        self._reader = reader
        self._inlet = inlet
        self._exposures = exposures
        self._may_only_probe = may_only_probe
        self._layer_bytes = door.identity.layout.layer_bytes
        self._session: Session
        self._outbox = Outbox(stream)
        self._watch = Watch(stream, door.settings.ack_timeout_s)
        self._fetches: asyncio.Queue[Coroutine[None, None, None]] = asyncio.Queue()
        self._leases: deque[Callable[[], None]] = deque()
        """of blocks that are being read, oldest first"""
        self._num_fetches = 0
        self._awaited: IncomingLane | None = None
        """the lane whose end is awaited"""

    def post(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        try:
            self._outbox.post(encode_frame(message, sum(map(len, payload))), *payload)
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

    async def run(self, session: Session) -> str:
        """Serves the connection until it is lost. Returns the reason."""
        self._session = session
        answering = asyncio.create_task(self._answer_fetches())
        try:
            while True:
                frame = self._reader.received(await self._stream.receive_some([self._reader.buffer()]))
                if frame is not None:
                    await self._handle(frame)
        except (OSError, TransferError) as error:
            return str(error) or "no answer in time"
        finally:
            if self._exposures is not None:
                self._exposures.close()
            self._watch.close()
            answering.cancel()
            (failure,) = await asyncio.gather(answering, return_exceptions=True)
            if isinstance(failure, Exception):
                log.error("a fetch of %s could not be answered", session.name, exc_info=failure)
            await self._outbox.close()
            while not self._fetches.empty():
                self._fetches.get_nowait().close()
            for end_lease in self._leases:
                end_lease()

    async def _handle(self, frame: Frame) -> None:
        session = self._session
        if self._may_only_probe and not isinstance(frame.message, Probe):
            raise TransferError(f"a probe sent {type(frame.message).__name__}")
        match frame.message:
            case Write() as write:
                self.post(await self._write(write, frame.payload_bytes))
            case Open(transfer_id, grant_id, ref_text):
                session.open(transfer_id, grant_id, ref_text)
            case Close(transfer_id, reason):
                session.close(transfer_id, None if reason is None else f"{session.name} gave up: {reason}")
            case Fetch() as fetch:
                self._num_fetches += 1
                if self._num_fetches > MOST_FETCHES:
                    raise TransferError(f"more than {MOST_FETCHES} fetches at once on one connection")
                self._fetches.put_nowait(self._answer(fetch))
            case FetchDone():
                if not self._leases:
                    raise TransferError("a fetch is done that was not answered")
                self._leases.popleft()()
                self._num_fetches -= 1
            case Abandon(number):
                if (lane := session.lanes.get(number)) is not None and lane is not self:
                    await self._abandon(lane)
            case Expose(transfer_id, grant_id):
                self.post(await self._expose(transfer_id, grant_id))
            case Probe():
                with self._watch:
                    await self._inlet.discard(frame.payload_bytes)
                self.post(WriteAck())
            case _:
                raise AssertionError("the protocol's table lets nothing else through")

    async def _abandon(self, lane: "IncomingLane") -> None:
        """Ends `lane`. Returns when nothing that came over it will be placed any more."""
        lane.shut_down()
        waiting: IncomingLane | None = lane
        while waiting is not None:
            if waiting is self:
                raise TransferError("its lanes have abandoned each other")
            waiting = waiting._awaited
        self._awaited = lane
        await lane.ended.wait()
        self._awaited = None

    async def _expose(self, transfer_id: int, grant_id: int) -> Exposed:
        if self._exposures is None:
            raise TransferError("pages are to be opened on a connection without RDMA")
        try:
            async with asyncio.timeout(self._door.settings.ack_timeout_s):
                self._session.ensure_open(transfer_id, grant_id)
                pages, on_closed = self._door.target.expose(grant_id)
                exposed = await self._exposures.expose(transfer_id, pages, on_closed)
            if transfer_id not in self._session.grants:  # it has ended meanwhile
                self.conceal(transfer_id)
                raise TransferError("the transfer has ended")
            return Exposed(transfer_id, exposed)
        except (WriteRefused, TransferError) as error:
            return Exposed(transfer_id, [], str(error))

    # -- writes -----------------------------------------------------------------------------------

    async def _write(self, write: Write, payload_bytes: int) -> WriteAck:
        """Places one write, all of it or none. The connection cannot go on if this raises."""
        if not 0 < len(write.entries) <= MAX_FRAME_ENTRIES:
            raise TransferError(
                f"a write has {len(write.entries)} entries, allowed are 1 to {MAX_FRAME_ENTRIES}"
            )
        num_bytes = sum(max(0, entry.num_layers) for entry in write.entries) * self._layer_bytes
        if num_bytes > max(MAX_FRAME_BYTES, self._layer_bytes):
            raise TransferError(f"a write of {num_bytes} bytes; a frame has at most {MAX_FRAME_BYTES}")
        session, grant_id, target = self._session, write.grant_id, self._door.target
        begun: list[WriteEntry] = []
        try:
            with self._watch:
                try:
                    session.ensure_open(write.transfer_id, grant_id)
                    entries, views = self._begin(grant_id, write.entries, begun)
                except WriteRefused as error:
                    await self._inlet.discard(payload_bytes)
                    return WriteAck(RefusalKind.STALE, str(error))
                self._inlet.check(num_bytes, payload_bytes)
                checksums = await self._inlet.place(entries, views, self._layer_bytes)
            for entry, actual in zip(entries, checksums, strict=True):
                if actual != entry.checksums:
                    return self._refuse_corrupt(write.transfer_id, entry)
            self._door.traffic.received_bytes[self._inlet.transport] += num_bytes
            try:
                while begun:
                    if target.complete(grant_id, begun.pop()):
                        session.conceal(write.transfer_id)
            except WriteRefused as error:
                return WriteAck(RefusalKind.STALE, str(error))
        finally:
            for entry in begun:
                target.abandon(grant_id, entry)
        return WriteAck()

    def _begin(
        self, grant_id: int, entries: Sequence[WriteEntry], begun: list[WriteEntry]
    ) -> tuple[list[WriteEntry], list[memoryview]]:
        """What is to be placed, and where: in its page, or nowhere if it is there already. Then it is only
        taken off the wire, where it is on it."""
        placed, views = [], []
        for entry in entries:
            if entry.num_layers < 1:
                raise WriteRefused(f"layers [{entry.layer_begin}, {entry.layer_end}) are no layers")
            view = self._door.target.begin(grant_id, entry)
            if view is not None:
                begun.append(entry)
            elif self._inlet.transport is Transport.TCP:
                view = memoryview(bytearray(entry.num_layers * self._layer_bytes))
            else:
                continue
            placed.append(entry)
            views.append(view)
        return placed, views

    def _refuse_corrupt(self, transfer_id: int, entry: WriteEntry) -> WriteAck:
        self._door.traffic.num_checksum_failures += 1
        reason = f"checksum of page {entry.page} from {self._session.name} does not match its bytes"
        log.warning("%s", reason)
        self._session.close(transfer_id, reason)
        return WriteAck(RefusalKind.CORRUPT, reason)

    # -- reads ------------------------------------------------------------------------------------

    async def _answer_fetches(self) -> None:
        """In the order in which they came: their answers have no other name."""
        try:
            while True:
                await (await self._fetches.get())
        finally:
            self.shut_down()  # nobody else would answer

    async def _answer(self, fetch: Fetch) -> None:
        layers = range(fetch.layer_begin, fetch.layer_end)
        num_layers = self._door.identity.layout.num_layers
        try:
            if not 0 <= layers.start < layers.stop <= num_layers:
                raise TransferError(f"layers [{layers.start}, {layers.stop}) are no part of {num_layers}")
            num_bytes = len(fetch.keys) * len(layers) * self._layer_bytes
            if len(fetch.keys) > 1 and (num_bytes > MAX_FRAME_BYTES or len(fetch.keys) > MAX_FRAME_ENTRIES):
                raise TransferError(
                    f"{num_bytes} bytes of {len(fetch.keys)} blocks in one fetch; ask for fewer blocks"
                )
            blocks, end_lease = await self._door.reads.lease(fetch.keys, layers)
            found, end_lease = await self._open_to_read(blocks, end_lease)
        except MooncakeError as error:
            self._leases.append(lambda: None)
            self.post(Found([], str(error)))
            return
        self._leases.append(end_lease)
        self.post(Found(found), [b.view for b in blocks] if self._inlet.transport is Transport.TCP else [])

    async def _open_to_read(
        self, blocks: Sequence[Readable], end_lease: Callable[[], None]
    ) -> tuple[list[FoundBlock], Callable[[], None]]:
        """The blocks as they are told, and what ends their lease. Raises TransferError."""
        if self._exposures is None:
            return [FoundBlock(b.index, b.checksums, b.source_offset) for b in blocks], end_lease
        places = [Range(block.source_offset, len(block.view)) for block in blocks]
        try:
            addresses, keys, close = await self._exposures.open_to_read(places)
        except BaseException:
            end_lease()
            raise

        def end() -> None:
            close()
            end_lease()

        return [
            FoundBlock(block.index, block.checksums, block.source_offset, address, key)
            for block, address, key in zip(blocks, addresses, keys, strict=True)
        ], end


async def _shake_hands(stream: Stream) -> None:
    """Raises StrangerError."""
    try:
        await stream.shake_hands()
    except OSError as error:
        raise StrangerError(f"no TLS: {error}") from None


async def turn_away(stream: Stream, reason: str, key: ClusterKey, timeout_s: float) -> None:
    """Hears who a sender is and refuses him."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.shake_hands()
            await admit(stream, FrameReader(Side.RECEIVER), key)
            await handshake.refuse(stream, reason)
    except (OSError, TransferError, MismatchError) as error:
        log.info("a peer left before it was refused: %s", error)
    finally:
        stream.close()
