"""Clients on another host whose messages tests write by hand."""

import contextlib
import socket
from collections.abc import Sequence

import msgspec

from kvstore.protocol.answers import (
    Connected,
    FromRemotePool,
)
from kvstore.protocol.calls import (
    Connect,
    PutBlocks,
)
from kvstore.protocol.frames import FrameBuffer, encode_frame
from messenger.wire.checksums import layer_checksums
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.security.greeting import POOL, Challenge, GreetingClient
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT, LAYOUT
from tests.kvstore.pools import (
    Pool,
    block_of,
)

DECODER = msgspec.msgpack.Decoder(FromRemotePool)
SIZE = LAYOUT.block_bytes


class Peer:
    """A raw connection to a messenger's TCP port, of a peer that has the key."""

    def __init__(self, address: tuple[str, int], layout: KVLayout = LAYOUT, *, greet: bool = True) -> None:
        self.sock = socket.create_connection(address, DEADLINE_S)
        self._frames = FrameBuffer()
        client = GreetingClient(CLUSTER_KEY, POOL)
        self.send(client.greeting)
        self._fill()
        proof = client.answer(msgspec.msgpack.decode(self._frames.take_message()[0], type=Challenge))
        assert proof is not None
        self._frames.trust()
        self.send(proof)
        if greet:
            self.send(Connect(0, FINGERPRINT, layout, 1))
            assert isinstance(self.receive(), Connected)

    def send(self, message: msgspec.Struct, payload: bytes = b"", payload_bytes: int | None = None) -> None:
        size = len(payload) if payload_bytes is None else payload_bytes
        self.sock.sendall(encode_frame(message, size) + payload)

    def receive(self) -> FromRemotePool | None:
        """Return the next message; None when the connection has ended."""
        with contextlib.suppress(ConnectionError):
            self._fill()
            message: FromRemotePool = DECODER.decode(self._frames.take_message()[0])
            return message
        return None

    def _fill(self) -> None:
        while (room := self._frames.room_for_message()) is not None:
            num_bytes = self.sock.recv_into(room)
            if num_bytes == 0:
                raise ConnectionResetError("the pool has hung up")
            self._frames.received(num_bytes)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def door_of(pool: Pool) -> tuple[str, int]:
    host, port = pool.tcp.removeprefix("tcp://").split(":")
    return host, int(port)


def put_of(keys: Sequence[BlockKey], *, timeout_s: float = 1.0) -> tuple[PutBlocks, bytes]:
    blocks = [block_of(key) for key in keys]
    checksums = b"".join(layer_checksums(memoryview(block), LAYOUT.layer_bytes) for block in blocks)
    return PutBlocks(7, list(keys), checksums, timeout_s), b"".join(blocks)
