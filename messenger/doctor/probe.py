"""A client that examines another messenger from outside: its identity, and the bandwidth to it.

Owns: connections that only probe. Does not know: KVCache.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from messenger.rdma.cards import Cards
from messenger.sender.lane import Lane
from messenger.sender.outgoing_session import SESSION_BYTES, OutgoingSession
from messenger.sender.tcp_outlet import TcpOpening
from messenger.transport.frames import Frames
from messenger.transport.handshake import introduce
from messenger.transport.stream import Stream
from messenger.transport.tls import Tls
from messenger.transport.transports import Path, Traffic, Transport, connect
from messenger.wire.messages import Introduction, Welcome
from messenger.wire.protocol import Side
from messenger.wire.rdma_info import EndpointInfo
from mooncake.errors import TransferError
from mooncake.security.keys import ClusterKey

_TIMEOUT_S = 5.0
"""Time limit in seconds of a connection, and of an acknowledgement."""
_PIECE_BYTES = 2 << 20
"""Bytes of one probe: half of a frame, so that two probes are in flight."""


class ProbeClient:
    """A client of one messenger's port.

    Every call makes a new connection, and raises OSError or TransferError if it fails.
    """

    def __init__(self, host: str, port: int, key: ClusterKey, tls: Tls | None, cards: Cards) -> None:
        self._path = Path(Transport.TCP, (host, port))
        self._key = key
        self._tls = tls
        self._cards = cards

    async def handshake(self) -> str:
        """Return the answering instance's name.

        Both sides have proved before that they have the cluster key.
        """
        async with self._connected() as (_, welcome):
            return welcome.identity.instance

    async def bandwidth(self, num_bytes: int) -> float:
        """Return the measured bytes a second of a stream of `num_bytes`."""
        peer = OutgoingSession(str(self._path), Traffic())
        payload = memoryview(bytearray(_PIECE_BYTES))
        async with self._connected() as (frames, welcome):
            ends = await TcpOpening(frames.stream, source=memoryview(b"")).join(welcome)
            lane = Lane(0, self._path, frames, ends, welcome.identity.layout, peer, _TIMEOUT_S)
            running = asyncio.create_task(peer.run_lane(lane))
            await asyncio.sleep(0)  # it begins
            started_s = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for begin in range(0, num_bytes, len(payload)):
                        tasks.create_task(peer.probe(payload[: num_bytes - begin]))
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            return num_bytes / (time.perf_counter() - started_s)

    @property
    def nics(self) -> Sequence[str]:
        """The names of this side's RDMA devices."""
        return self._cards.names

    async def rdma_bandwidth(self, nic: str, num_bytes: int) -> float:
        """Return the measured bytes a second of an RDMA write of `num_bytes`.

        The bytes go into memory that is never read.
        """
        card = await self._cards.card(nic)
        with contextlib.closing(card.endpoint(str(self._path))) as endpoint:
            async with self._connected(endpoint.local_info()) as (_, welcome):
                if welcome.endpoint is None or welcome.scratch is None:
                    raise TransferError("the other side does not answer by RDMA")
                endpoint.connect(welcome.endpoint)
                started_s = time.perf_counter()
                await card.write_scratch(endpoint, welcome.scratch, num_bytes)
                return num_bytes / (time.perf_counter() - started_s)

    @contextlib.asynccontextmanager
    async def _connected(self, endpoint: EndpointInfo | None = None) -> AsyncIterator[tuple[Frames, Welcome]]:
        stream: Stream | None = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stream = await connect(self._path, self._tls)
                frames, session = Frames(stream, Side.SENDER), secrets.token_bytes(SESSION_BYTES)
                introduction = Introduction(b"", None, session, 0, endpoint=endpoint)
                welcome = await introduce(frames, self._key, introduction)
            yield frames, welcome
        finally:
            if stream is not None:
                stream.close()
