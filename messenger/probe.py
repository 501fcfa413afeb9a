"""A look at another messenger from outside: who answers, and how fast bytes get there.

Owns: that connection. Does not know: KVCache.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

from messenger.frames import Frames
from messenger.handshake import introduce
from messenger.lane import Lane
from messenger.peer import SESSION_BYTES, Peer
from messenger.protocol import Side
from messenger.stream import Stream
from messenger.tls import Tls
from messenger.transports import Path, TcpInlet, Traffic, Transport, connect
from mooncake.keys import ClusterKey

_TIMEOUT_S = 5.0
_PIECE_BYTES = 2 << 20


class Probe:
    """One messenger's port. Every call connects anew; raises OSError or TransferError."""

    def __init__(self, host: str, port: int, key: ClusterKey, tls: Tls | None) -> None:
        self._path = Path(Transport.TCP, (host, port))
        self._key = key
        self._tls = tls

    async def handshake(self) -> str:
        """Who answers there, after both sides have shown that they have the cluster's key."""
        async with self._lane(Peer(str(self._path), Traffic())) as (_, name):
            return name

    async def bandwidth(self, num_bytes: int) -> float:
        """Bytes per second of a stream of `num_bytes`."""
        peer = Peer(str(self._path), Traffic())
        payload = memoryview(bytearray(_PIECE_BYTES))
        async with self._lane(peer) as (lane, _):
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

    @contextlib.asynccontextmanager
    async def _lane(self, peer: Peer) -> AsyncIterator[tuple[Lane, str]]:
        stream: Stream | None = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                stream = await connect(self._path, self._tls)
                frames = Frames(stream, Side.SENDER)
                welcome = await introduce(
                    frames, self._key, None, session=secrets.token_bytes(SESSION_BYTES), lane=0
                )
            inlet, nothing = TcpInlet(stream), memoryview(b"")
            yield (
                Lane(0, self._path, frames, inlet, nothing, peer, _TIMEOUT_S),
                welcome.identity.instance,
            )
        finally:
            if stream is not None:
                stream.close()
