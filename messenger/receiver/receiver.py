"""Admission of other messengers: handshake, resources, sessions.

Owns: which peers are connected. Does not know: messages after the handshake.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from messenger.receiver.incoming import IncomingLane
from messenger.receiver.incoming_session import IncomingSession
from messenger.receiver.lane_end import receiving_end
from messenger.receiver.served_pool import ServedPool
from messenger.transport import handshake
from messenger.transport.frames import Frames
from messenger.transport.handshake import AuthenticationError, admit, check_introduction
from messenger.transport.stream import Stream
from messenger.transport.transports import Traffic
from messenger.wire.messages import Introduction
from messenger.wire.protocol import Side, encode_frame
from mooncake.errors import MismatchError, TransferError
from mooncake.security.keys import ClusterKey
from mooncake.security.waiting_peers import WaitingPeers

log = logging.getLogger(__name__)

MOST_UNKNOWN = 256
"""The most unauthenticated connections at one port."""
_SILENT = "it said nothing in time"


class UnauthenticatedPeers:
    """Unauthenticated connections at one port. A connection above the limit ends the oldest connection."""

    def __init__(self) -> None:
        self._crowd = WaitingPeers[Stream](MOST_UNKNOWN, Stream.shut_down)

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        """Make a context that counts a connection while its peer authenticates."""
        self._crowd.enter(stream)
        try:
            yield
        finally:
            self._crowd.leave(stream)


class Sessions:
    """The sessions of all connected senders. Every accepted connection is passed to `serve`."""

    def __init__(self, served_pool: ServedPool) -> None:
        self._served_pool = served_pool
        self._sessions: dict[tuple[str, bytes], IncomingSession] = {}

    async def serve(self, stream: Stream, unauthenticated: UnauthenticatedPeers) -> None:
        """Serve one connection until it ends. A connection that fails to authenticate is counted."""
        served_pool = self._served_pool
        try:
            try:
                async with asyncio.timeout(served_pool.settings.connect_timeout_s):
                    with unauthenticated.entered(stream):
                        frames = Frames(stream, Side.RECEIVER)
                        await _shake_hands(stream)
                        introduction = await admit(frames, served_pool.key)
                    lane = await self._welcome(frames, introduction)
            except (AuthenticationError, TimeoutError) as error:
                served_pool.traffic.count_unauthenticated(str(error) or _SILENT)
            except (OSError, TransferError, MismatchError) as error:
                log.info("a connection was refused: %s", error)
            else:
                await self._run(lane, introduction)
        except Exception:  # an error of ours must not end the other connections
            log.exception("a connection ends")
        finally:
            stream.close()

    async def _welcome(self, frames: Frames, introduction: Introduction) -> IncomingLane:
        """Admit a sender, and return its lane with the resources that the lane needs.

        Raises TransferError, MismatchError or OSError.
        """
        stream, served_pool = frames.stream, self._served_pool
        await check_introduction(stream, served_pool.identity, introduction)
        inlet, exposures, welcome, fd = await receiving_end(served_pool, stream, introduction)
        try:
            await stream.send([encode_frame(welcome)], fd=fd)
        except BaseException:
            exposures.close()
            raise
        layout = introduction.identity.layout if introduction.identity is not None else None
        return IncomingLane(served_pool, frames, inlet, exposures, layout)

    async def _run(self, lane: IncomingLane, introduction: Introduction) -> None:
        identity, number = introduction.identity, introduction.lane
        name = identity.instance if identity is not None else "a probe"
        session = self._sessions.setdefault(
            (name, introduction.session), IncomingSession(name, self._served_pool.target)
        )
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
    """Complete the TLS handshake, if there is TLS. Raises AuthenticationError."""
    try:
        await stream.shake_hands()
    except OSError as error:
        raise AuthenticationError(f"no TLS: {error}") from None


async def refuse_connection(
    stream: Stream,
    reason: str,
    key: ClusterKey,
    traffic: Traffic,
    unauthenticated: UnauthenticatedPeers,
    *,
    timeout_s: float,
) -> None:
    """Authenticate a sender, refuse it for `reason`, and close its connection.

    A connection that fails to authenticate is counted.
    """
    try:
        with unauthenticated.entered(stream):
            async with asyncio.timeout(timeout_s):
                await _shake_hands(stream)
                await admit(Frames(stream, Side.RECEIVER), key)
                await handshake.refuse(stream, reason)
    except (AuthenticationError, TimeoutError) as error:
        traffic.count_unauthenticated(str(error) or _SILENT)
    except (OSError, TransferError, MismatchError) as error:
        log.info("a peer left before it was refused: %s", error)
    finally:
        stream.close()
