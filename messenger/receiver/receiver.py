"""Lets other messengers in: their handshake, what they may use, the session they belong to.

Owns: who is connected, and who wants to be. Does not know: what is said on a connection after that.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import cast

from messenger.rdma.exposures import Exposures
from messenger.rdma.remote import InPlace
from messenger.receiver.door import Door
from messenger.receiver.incoming import IncomingLane
from messenger.receiver.session import Session
from messenger.transport import handshake
from messenger.transport.frames import Frames
from messenger.transport.handshake import StrangerError, admit, check_introduction, welcome
from messenger.transport.stream import Stream
from messenger.transport.transports import Inlet, ShmInlet, TcpInlet, Traffic
from messenger.wire.messages import Introduction
from messenger.wire.protocol import Side
from mooncake.errors import MismatchError, TransferError
from mooncake.security.crowd import Crowd
from mooncake.security.keys import ClusterKey

log = logging.getLogger(__name__)

MOST_UNKNOWN = 256
"""connections whose other end has not shown yet that it knows the cluster's key"""
_SILENT = "it said nothing in time"


class Threshold:
    """The unauthenticated connections of one port. One too many ends the oldest."""

    def __init__(self) -> None:
        self._crowd = Crowd[Stream](MOST_UNKNOWN, Stream.shut_down)

    @contextlib.contextmanager
    def room(self, stream: Stream) -> Iterator[None]:
        """For one more, while it shows that it knows the key."""
        self._crowd.enter(stream)
        try:
            yield
        finally:
            self._crowd.leave(stream)


class Sessions:
    """All senders that are connected. Every connection is handed to `serve`."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._sessions: dict[tuple[str, bytes], Session] = {}

    async def serve(self, stream: Stream, threshold: Threshold) -> None:
        """One connection, until it ends. A stranger's costs a counter."""
        door = self._door
        try:
            try:
                async with asyncio.timeout(door.settings.connect_timeout_s):
                    with threshold.room(stream):
                        frames = Frames(stream, Side.RECEIVER)
                        await _shake_hands(stream)
                        introduction = await admit(frames, door.key)
                    lane = await self._welcome(frames, introduction)
            except (StrangerError, TimeoutError) as error:
                door.traffic.count_stranger(str(error) or _SILENT)
            except (OSError, TransferError, MismatchError) as error:
                log.info("a connection was refused: %s", error)
            else:
                await self._run(lane, introduction)
        except Exception:  # an error of ours must not end the other connections
            log.exception("a connection ends")
        finally:
            stream.close()

    async def _welcome(self, frames: Frames, introduction: Introduction) -> IncomingLane:
        """Raises TransferError, MismatchError, OSError."""
        stream, door = frames.stream, self._door
        await check_introduction(stream, door.identity, introduction)
        inlet, exposures = cast(Inlet, TcpInlet(stream)), None
        segment = seat = shelves = endpoint = scratch = None
        with contextlib.ExitStack() as on_failure:
            if introduction.segment_bytes is not None:
                inlet = ShmInlet(stream, stream.take_fd(), introduction.segment_bytes)
                segment = handshake.Segment(len(door.source.buffer), door.source.read_only_fd)
                landing = door.landing
                if landing is not None:
                    shelves = landing.shelves
                # Who has no blocks copies none.
                if landing is not None and introduction.takes_seat and introduction.identity is not None:
                    seat = landing.take_seat(stream.peer_pid)
                    if seat is not None:
                        on_failure.callback(landing.board.leave, seat.number)
                        segment = handshake.Segment(len(door.source.buffer), landing.fd)
            elif introduction.endpoint is not None:
                try:
                    card = await door.cards.answering(introduction.endpoint)
                except TransferError as error:
                    await handshake.refuse(stream, str(error))
                    raise
                endpoint = card.endpoint("a sender")
                on_failure.callback(endpoint.close)
                endpoint.connect(introduction.endpoint)
                scratch = await card.open_scratch(endpoint)
                inlet, exposures = InPlace(), Exposures(endpoint, card.memory)
            local_info = endpoint.local_info() if endpoint is not None else None
            await welcome(stream, door.identity, segment, seat, shelves, local_info, scratch)
            on_failure.pop_all()
        layout = introduction.identity.layout if introduction.identity is not None else None
        return IncomingLane(door, frames, inlet, exposures, layout, seat)

    async def _run(self, lane: IncomingLane, introduction: Introduction) -> None:
        identity, number = introduction.identity, introduction.lane
        name = identity.instance if identity is not None else "a probe"
        session = self._sessions.setdefault((name, introduction.session), Session(name, self._door.target))
        if number in session.lanes:
            log.info("%s has a lane %d already", name, number)
            lane.discard()
            return
        session.lanes[number] = lane
        reason = "ended by this side"
        try:
            reason = await lane.run(session)
            log.info("connection from %s ended: %s", name, reason)
        finally:
            del session.lanes[number]
            if not session.lanes:
                del self._sessions[name, introduction.session]
                session.lost(reason)
            lane.ended.set()


async def _shake_hands(stream: Stream) -> None:
    """Raises StrangerError."""
    try:
        await stream.shake_hands()
    except OSError as error:
        raise StrangerError(f"no TLS: {error}") from None


async def turn_away(
    stream: Stream, reason: str, key: ClusterKey, traffic: Traffic, threshold: Threshold, *, timeout_s: float
) -> None:
    """Hears who a sender is and refuses him."""
    try:
        with threshold.room(stream):
            async with asyncio.timeout(timeout_s):
                await _shake_hands(stream)
                await admit(Frames(stream, Side.RECEIVER), key)
                await handshake.refuse(stream, reason)
    except (StrangerError, TimeoutError) as error:
        traffic.count_stranger(str(error) or _SILENT)
    except (OSError, TransferError, MismatchError) as error:
        log.info("a peer left before it was refused: %s", error)
    finally:
        stream.close()
