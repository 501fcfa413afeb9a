"""The sender's side of a connection, with messages that an `OutgoingSession` would never send."""

import asyncio
import contextlib
import secrets

from messenger.sender.outlet import Opening
from messenger.transport.frames import Frames
from messenger.transport.handshake import introduce, read_message
from messenger.transport.stream import Stream
from messenger.transport.transports import Path, Transport, connect
from messenger.wire.identity import Identity
from messenger.wire.messages import Introduction, Message, Welcome
from messenger.wire.protocol import Side, encode_frame
from tests.messenger.fabric import DEADLINE_S, Fabric


class Wire:
    """One connection. The test must close it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.frames = Frames(stream, Side.SENDER)

    @classmethod
    async def connect(cls, node: Fabric, transport: Transport = Transport.TCP) -> "Wire":
        """Connect to the receiver, not through proxies, and send nothing."""
        place = node.endpoint if transport is Transport.TCP else node.unix_path
        return cls(await connect(Path(transport, place), None))

    @classmethod
    async def introduced(
        cls,
        node: Fabric,
        session: bytes | None = None,
        lane: int = 0,
        identity: Identity | None = None,
    ) -> "Wire":
        """Connect, and carry out the handshake with the right key."""
        wire = await cls.connect(node)
        await wire.introduce(node, session or secrets.token_bytes(16), lane, identity)
        return wire

    async def introduce(
        self, node: Fabric, session: bytes, lane: int, identity: Identity | None = None
    ) -> Welcome:
        identity = identity or node.sender_identity
        return await introduce(self.frames, node.key, Introduction(b"", identity, session, lane))

    async def introduce_probe(self, node: Fabric, opening: Opening | None = None) -> Welcome:
        """Introduce this side as a peer that only measures."""
        opening = opening or Opening()
        introduction = opening.introduction(Introduction(b"", None, bytes(16), 0))
        return await introduce(self.frames, node.key, introduction, opening.fd)

    async def say(self, message: Message, payload: bytes = b"") -> None:
        await self.say_bytes(encode_frame(message, len(payload)) + payload)

    async def say_bytes(self, data: bytes, fd: int | None = None) -> None:
        await self.stream.send([data], fd=fd)

    async def hear(self) -> Message:
        """Return the next message, which has no payload."""
        return await read_message(self.frames)

    async def assert_closed(self) -> None:
        """Check that the receiver closes the connection, after any further messages."""
        buffer = memoryview(bytearray(1 << 16))
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(DEADLINE_S / 2):
                while True:
                    await self.stream.receive_some([buffer])

    def close(self) -> None:
        self.stream.close()
