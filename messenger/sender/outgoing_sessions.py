"""Sessions with other messengers, opened on demand, and kept until their last lane is lost.

Every path to a messenger has `messenger.streams` connections, each kept up by a task. The task makes a lost
connection again while the other connections carry on: at once, or after pauses that grow if the connection
failed or was lost soon. If there are many sessions, idle sessions are given up.

Owns: sessions by address, making and keeping their lanes. Does not know: the content of requests.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from messenger.paths.health import PathHealth
from messenger.paths.sieve import Sieve
from messenger.rdma.cards import Cards
from messenger.sender.lane import Lane
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.outlet import Opening
from messenger.sender.rdma_outlet import RdmaOpening
from messenger.sender.shm_outlet import ShmOpening
from messenger.sender.tcp_outlet import TcpOpening
from messenger.transport.frames import Frames
from messenger.transport.handshake import introduce
from messenger.transport.source import SourceSegment
from messenger.transport.stream import Stream
from messenger.transport.tls import Tls
from messenger.transport.transports import Path, Traffic, Transport, connect, paths
from messenger.wire.identity import Identity
from messenger.wire.messages import Introduction
from messenger.wire.protocol import Side
from mooncake.config.sections import MessengerConfig
from mooncake.errors import MismatchError, TransferError
from mooncake.messages.pools import MessengerAddress
from mooncake.security.keys import ClusterKey

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
"""Seconds of the first pause after a connection that failed, was lost soon, or answered nothing."""
_LONGEST_PAUSE_S = 5.0
"""Seconds of the longest pause between two attempts on a path without a NIC of its own.

A peer that returns is noticed after one pause and one attempt (`connect_timeout_s`). Paths with a NIC pause
as `PathHealth` says.
"""


@dataclass(slots=True, eq=False)
class _Keeping:
    """A session and the tasks that keep its lanes."""

    peer: OutgoingSession
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """The reasons why first connections failed, or why the session ended."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def may_come_up(self) -> bool:
        """Whether no lane has come up yet, but a lane may still come up.

        After the session has ended, no lane comes up. The session has ended if its first lane was lost at
        once.
        """
        peer = self.peer
        return not peer.lanes and peer.closed_reason is None and len(self.failures) < len(self.tasks)

    def stop(self) -> None:
        for task in self.tasks:
            task.cancel()


class OutgoingSessions:
    """The sessions by address. All transfers to an address share its session."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        source: SourceSegment,
        traffic: Traffic,
        *,
        identity: Identity,
        key: ClusterKey,
        tls: Tls | None,
        settings: MessengerConfig,
        cards: Cards,
    ) -> None:
        self._tasks = tasks
        self._source = source
        self._traffic = traffic
        self._identity = identity
        self._key = key
        self._tls = tls
        self._settings = settings
        self._cards = cards
        self._sessions: Sieve[MessengerAddress, _Keeping] = Sieve()
        self._connecting: WeakValueDictionary[MessengerAddress, asyncio.Lock] = WeakValueDictionary()

    @property
    def all(self) -> Sequence[OutgoingSession]:
        """The open sessions."""
        return [keeping.peer for keeping in self._sessions.values() if keeping.peer.closed_reason is None]

    async def peer(self, address: MessengerAddress) -> OutgoingSession:
        """Return the session with the messenger at `address`; open one if there is none.

        Raises TransferError if no session can be made.
        """
        lock = self._connecting.setdefault(address, asyncio.Lock())
        async with lock:
            keeping = self._sessions.get(address)
            if keeping is None or keeping.peer.closed_reason is not None:
                keeping = await self._begin(address)
            return keeping.peer

    async def _begin(self, address: MessengerAddress) -> _Keeping:
        while len(self._sessions) >= self._settings.max_sessions:
            evicted = self._sessions.evict(lambda keeping: keeping.peer.is_idle)
            if evicted is None:
                break  # all sessions are in use: one too many is better than none
            evicted.stop()
        reasons: list[str] = []
        for group in paths(self._settings.transport, self._identity.host_id, address, self._cards.names):
            keeping = await self._begin_over(group, address)
            if keeping.peer.closed_reason is not None:  # one lane was up, and lost before there was a second
                keeping = await self._begin_over(group, address)
            if keeping.peer.lanes:
                self._sessions.put(address, keeping)
                return keeping
            reasons += keeping.failures
        raise TransferError(
            f"cannot reach messenger {address.instance} ({'; '.join(dict.fromkeys(reasons)) or 'no path'})"
        )

    async def _begin_over(self, group: Sequence[Path], address: MessengerAddress) -> _Keeping:
        """Begin a session over a group of paths.

        Returns when its first lane is up, or when no lane can come up.
        """
        keeping = _Keeping(OutgoingSession(address.instance, self._traffic))
        numbers = itertools.count()
        for path in group:
            health = PathHealth() if path.nic is not None else None
            for _ in range(self._settings.streams):
                keep = self._keep(keeping, path, health, address, numbers)
                keeping.tasks.append(self._tasks.create_task(keep))
        try:
            while keeping.may_come_up:
                keeping.changed.clear()
                await keeping.changed.wait()
        except asyncio.CancelledError:
            keeping.stop()
            raise
        if not keeping.peer.lanes:
            keeping.stop()
        return keeping

    async def _keep(
        self,
        keeping: _Keeping,
        path: Path,
        health: PathHealth | None,
        address: MessengerAddress,
        numbers: "itertools.count[int]",
    ) -> None:
        """Keep one lane up until the session ends, with pauses after failures.

        While `health` backs off, the path is not tried. `health` is None for a path without a device of
        its own: no other path stands by for such a path.
        """
        peer, pause_s, was_tried = keeping.peer, _FIRST_PAUSE_S, False
        loop = asyncio.get_running_loop()
        while True:
            try:
                lane = await self._connect(peer, path, address, next(numbers))
            except (OSError, TransferError, MismatchError) as error:
                if not was_tried:
                    keeping.failures.append(f"{path}: {error}")
                    keeping.changed.set()
                    was_tried = True
                if health is not None:
                    health.failed(loop.time())
                    await asyncio.sleep(health.pause_s(loop.time()))
                    continue
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            was_tried, began_s = True, loop.time()
            loop.call_soon(keeping.changed.set)
            try:
                reason = await peer.run_lane(lane)
                log.info("connection to %s (%s) was lost: %s", peer.name, path, reason)
            except Exception:  # an error of ours must not end the other connections
                log.exception("a connection to %s ends", peer.name)
                reason = "an error of this messenger"
            finally:
                if peer.closed_reason is not None:
                    self._sessions.discard(address, keeping)
                    keeping.failures.append(peer.closed_reason)
                    keeping.changed.set()
                    keeping.stop()
            if peer.closed_reason is not None:
                return
            held_s = loop.time() - began_s
            if health is not None:
                _judge(health, lane, held_s, peer, reason)
                await asyncio.sleep(health.pause_s(loop.time()))
            if lane.has_answered and held_s > pause_s:
                pause_s = _FIRST_PAUSE_S
            else:  # useless, or lost soon
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connect(
        self, peer: OutgoingSession, path: Path, address: MessengerAddress, number: int
    ) -> Lane:
        """Return a connected lane. Raises OSError, TransferError or MismatchError."""
        timeout_s = self._settings.connect_timeout_s
        with contextlib.ExitStack() as on_failure:
            try:
                async with asyncio.timeout(timeout_s):
                    stream = await connect(path, self._tls)
                    on_failure.callback(stream.close)
                    opening = await self._opening(path, stream, peer.name)
                    on_failure.callback(opening.close)
                    lane = await self._greet(stream, opening, peer, path, address, number)
            except TimeoutError:
                raise TransferError(f"no answer within {timeout_s:g} s") from None
            on_failure.pop_all()
            return lane

    async def _opening(self, path: Path, stream: Stream, peer: str) -> Opening:
        """Return the transport's part in the handshake over a path. Raises TransferError."""
        match path.transport:
            case Transport.SHM:
                return ShmOpening(stream, self._source, self._identity.layout.heads)
            case Transport.RDMA:
                assert path.nic is not None
                return RdmaOpening(await self._cards.card(path.nic), peer)
            case Transport.TCP:
                return TcpOpening(stream, self._source.buffer)

    async def _greet(
        self,
        stream: Stream,
        opening: Opening,
        peer: OutgoingSession,
        path: Path,
        address: MessengerAddress,
        number: int,
    ) -> Lane:
        frames = Frames(stream, Side.SENDER)
        introduction = opening.introduction(Introduction(b"", self._identity, peer.session, number))
        welcome = await introduce(frames, self._key, introduction, opening.fd)
        _check_who(welcome.identity, address)
        ends = await opening.join(welcome)
        return Lane(number, path, frames, ends, welcome.identity.layout, peer, self._settings.ack_timeout_s)


def _judge(health: PathHealth, lane: Lane, held_s: float, peer: OutgoingSession, reason: str) -> None:
    """Record the loss of `lane`, `held_s` seconds after its beginning, for its path.

    If the path backs off now, the other lanes of the path end too.
    """
    now_s = asyncio.get_running_loop().time()
    facts = {"was_asked": lane.was_asked, "has_answered": lane.has_answered}
    if health.lost(now_s, held_s, lane.remedy, **facts):
        log.warning("%s to %s is left alone for a while: %s", lane.path, peer.name, reason)
        peer.give_up_path(lane.path, f"another connection over it failed: {reason}")


def _check_who(met: Identity, address: MessengerAddress) -> None:
    """Check that the messenger `met` is the messenger that the address names. Raises TransferError."""
    if (met.instance, met.incarnation) != (address.instance, address.incarnation):
        raise TransferError(
            f"expected messenger {address.instance} (incarnation {address.incarnation}), but"
            f" {met.instance} (incarnation {met.incarnation}) answers there; the grant is out of date"
        )
