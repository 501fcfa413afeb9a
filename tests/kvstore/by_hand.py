"""A sender whose messages a test writes by hand, on a blocking socket."""

import contextlib
import secrets
import socket
import struct

import msgspec
import xxhash

from messenger.wire.identity import Identity
from messenger.wire.messages import Challenge, Hello, Introduction, Message, Open, Write, WriteEntry
from messenger.wire.protocol import SPOKEN, encode_frame
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Grant, MessengerAddress
from mooncake.security.keys import ClusterKey
from mooncake.security.proofs import NONCE_BYTES
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT, LAYOUT, block_bytes

_DECODER = msgspec.msgpack.Decoder(Message)
IDENTITY = Identity("hand-made", 1, "elsewhere", FINGERPRINT, LAYOUT)


class HandMadeSender:
    """One lane after its handshake: over shared memory if there is a segment, else over TCP."""

    def __init__(
        self,
        address: MessengerAddress,
        segment_fd: int | None = None,
        segment_bytes: int | None = None,
        *,
        key: ClusterKey = CLUSTER_KEY,
        session: bytes | None = None,
        lane: int = 0,
        identity: Identity = IDENTITY,
    ) -> None:
        if segment_bytes is None:
            self.sock = socket.create_connection(address.tcp_endpoints[0], DEADLINE_S)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(DEADLINE_S)
            self.sock.connect(address.unix_path)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.send(Hello(SPOKEN.newest, nonce))
        challenge = self.receive()
        assert isinstance(challenge, Challenge)
        proof = key.proof(b"messenger sender", challenge.nonce, nonce)
        introduction = Introduction(proof, identity, session or secrets.token_bytes(16), lane, segment_bytes)
        fds = [] if segment_fd is None else [segment_fd]
        socket.send_fds(self.sock, [encode_frame(introduction)], fds)
        self.welcome: Message | None = None
        with contextlib.suppress(ConnectionError):
            self.welcome = self.receive()

    def open(self, grant: Grant) -> None:
        self.send(Open(1, grant.grant_id, "by hand"))

    def send(self, message: Message, payload: bytes = b"", payload_bytes: int | None = None) -> None:
        """Send a frame. It may announce more bytes (`payload_bytes`) than follow."""
        announced = len(payload) if payload_bytes is None else payload_bytes
        self.sock.sendall(encode_frame(message, announced) + payload)

    def write(self, grant: Grant, entry: WriteEntry, payload: bytes) -> None:
        num_bytes = entry.num_layers * LAYOUT.layer_bytes
        self.send(Write(1, grant.grant_id, [entry]), payload, num_bytes)

    def write_part(self, grant: Grant, entry: WriteEntry, payload: bytes, heads: tuple[int, int]) -> None:
        self.send(Write(1, grant.grant_id, [entry], heads), payload)

    def receive(self) -> Message:
        """Return the next message, and leave its payload on the stream. Raises ConnectionError at the end."""
        header = self.sock.recv(8, socket.MSG_WAITALL)
        if len(header) < 8:
            raise ConnectionResetError("the receiver has hung up")
        meta_bytes, _ = struct.unpack("<II", header)
        message: Message = _DECODER.decode(self.sock.recv(meta_bytes, socket.MSG_WAITALL))
        return message

    def close(self) -> None:
        self.sock.close()

    def is_dropped(self) -> bool:
        """Read until the receiver hangs up, and return True."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(4096):
                pass
        return True


def entry_for(
    grant: Grant, key: BlockKey, *, layer: int = 0, generation: int = 0
) -> tuple[WriteEntry, bytes]:
    """Return an entry for one layer of the first page of `grant`, and the layer's bytes."""
    data = block_bytes(key, layer)
    page = grant.pages[0]
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
    return WriteEntry(page.page, page.generation + generation, layer, layer + 1, checksum, 0), data


def part_for(grant: Grant, key: BlockKey, heads: range, *, layer: int = 0) -> tuple[WriteEntry, bytes]:
    """Return an entry for some heads of one layer of the first page of `grant`, and their bytes."""
    entry, data = entry_for(grant, key, layer=layer)
    data = data[heads.start * LAYOUT.head_bytes : heads.stop * LAYOUT.head_bytes]
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
    return msgspec.structs.replace(entry, checksums=checksum), data
