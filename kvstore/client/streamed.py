"""A pool on another host: calls and blocks over one TCP connection.

Owns: connections over TCP. Does not know: which connection is used when.
"""

import socket
import time
from collections.abc import Sequence
from itertools import compress

import msgspec
import numpy as np

from kvstore.client.connections import CopyLayers, PoolConnection, PoolURL, RemoteCall
from kvstore.protocol.answers import Connected, Done, FromRemotePool, GotBlocks, Located, Stats
from kvstore.protocol.calls import Connect, GetBlocks, GetStats, Lookup, Notice, PutBlocks
from kvstore.protocol.frames import SMALL_BYTES, FrameBuffer, encode_frame
from messenger.transport.stream import MAX_BUFFERS, without
from messenger.wire.checksums import CHECKSUM_BYTES, PIECE_BYTES, LayerChecksums, layer_checksums
from mooncake.errors import ConfigError, PoolError
from mooncake.messages.blocks import BlockKey
from mooncake.security.greeting import POOL, Challenge, Greeting, GreetingClient, Proof
from mooncake.security.keys import ClusterKey

_DECODER = msgspec.msgpack.Decoder(FromRemotePool)
_CHALLENGE_DECODER = msgspec.msgpack.Decoder(Challenge)
_LOOKUP_BYTES = 1 << 20
"""The bytes of a put from which on the client first asks which blocks the pool has already."""


class StreamedConnection(PoolConnection):
    """A client's session over TCP, with blocks after the messages. Made by `open`."""

    def __init__(self, sock: socket.socket, url: PoolURL, serial: int, timeout_s: float) -> None:
        super().__init__(sock, url, serial, timeout_s)
        self._frames = FrameBuffer()
        self._payload_bytes = 0
        """Number of payload bytes after the last message."""

    @classmethod
    def open(cls, url: PoolURL, connect: Connect, timeout_s: float, key: ClusterKey) -> "StreamedConnection":
        """Return a connection to the pool at `url`, after both sides have proved that they know `key`.

        Raises OSError if nothing answers, ConfigError if the pool has another key, and any other error with
        which the pool refuses.
        """
        assert url.tcp is not None
        try:
            sock = socket.create_connection(url.tcp, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{url.text} accepts no connection within {timeout_s:g} s") from None
        except OSError as error:
            raise ConnectionRefusedError(f"cannot connect to {url.text}: {error}") from None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = cls(sock, url, connect.serial, timeout_s)
        try:
            connection._prove(key, timeout_s)
            connected = connection.call(connect, Connected)
            stats = connection.call(GetStats(connection.next_id(), False), Stats).stats
        except BaseException:
            connection.close()
            raise
        connection.address, connection.fingerprint = connected.address, connected.fingerprint
        connection.layout, connection.num_pages = connected.layout, stats.num_pages
        return connection

    def _prove(self, key: ClusterKey, timeout_s: float) -> None:
        """Prove to the pool that this side knows `key`, and check the pool's proof.

        Raises ConfigError if the pool has another key, TimeoutError if its proof takes more than `timeout_s`.
        """
        due_s = time.monotonic() + timeout_s
        client = GreetingClient(key, POOL)
        self.notify(client.greeting)
        while (room := self._room_for_message()) is not None:
            if time.monotonic() > due_s:
                raise TimeoutError(f"{self.url.text} has not proved within {timeout_s:g} s that it is a pool")
            self._frames.received(self._receive_some(room))
        try:
            challenge = _CHALLENGE_DECODER.decode(self._frames.take_message()[0])
        except msgspec.MsgspecError as error:
            raise self._broken(str(error)) from None
        proof = client.answer(challenge)
        if proof is None:
            raise ConfigError(
                f"the pool at {self.url.text} has another cluster key than this client (key id"
                f" {key.key_id}); give as key_file a copy of the key that the pool's node was started with"
            )
        self._frames.trust()
        self.notify(proof)

    # -- messages ---------------------------------------------------------------------------------

    def notify(self, message: RemoteCall | Notice | Greeting | Proof) -> None:
        self._send([memoryview(encode_frame(message))])

    def _send(self, buffers: list[memoryview]) -> None:
        """Send all of `buffers`."""
        try:
            while buffers:
                buffers = without(buffers, self._sock.sendmsg(buffers[:MAX_BUFFERS]))
        except BlockingIOError:
            raise self._silent(socket.SO_SNDTIMEO) from None
        except OSError as error:
            raise self._gone(error) from error

    def _receive(self) -> FromRemotePool:
        while (room := self._room_for_message()) is not None:
            self._frames.received(self._receive_some(room))
        encoded, self._payload_bytes = self._frames.take_message()
        answer: FromRemotePool = _DECODER.decode(encoded)
        if self._payload_bytes and not isinstance(answer, GotBlocks):
            raise self._broken(f"{type(answer).__name__} with a payload of {self._payload_bytes} bytes")
        return answer

    def _room_for_message(self) -> memoryview | None:
        try:
            return self._frames.room_for_message()
        except PoolError as error:
            raise self._broken(str(error)) from None

    def _receive_some(self, buffer: memoryview) -> int:
        try:
            num_bytes = self._sock.recv_into(buffer)
        except BlockingIOError:
            raise self._silent(socket.SO_RCVTIMEO) from None
        except OSError as error:
            raise self._gone(error) from error
        if num_bytes == 0:
            raise self._gone("it has closed the connection")
        return num_bytes

    # -- blocks -----------------------------------------------------------------------------------

    def _get_part(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], layers: range) -> list[bool]:
        got = self.call(GetBlocks(self.next_id(), list(keys), layers.start, layers.stop), GotBlocks)
        stride = CHECKSUM_BYTES * len(layers)
        if len(got.found) != len(keys) or len(got.checksums) != stride * sum(got.found):
            raise self._broken(f"{len(got.found)} blocks with {len(got.checksums)} bytes of checksums")
        if self._payload_bytes != sum(len(buffer) for buffer in compress(buffers, got.found)):
            raise self._broken(f"a payload of {self._payload_bytes} bytes for {sum(got.found)} blocks")
        is_there = list(got.found)
        damaged = []
        for number, index in enumerate(index for index, found in enumerate(got.found) if found):
            checksums = self._receive_block(buffers[index])
            if checksums != got.checksums[number * stride : (number + 1) * stride]:
                is_there[index] = False
                damaged.append(keys[index])
        self.report_damaged(damaged)
        return is_there

    def _receive_block(self, block: memoryview) -> bytes:
        """Fill `block` from the payload. Returns the checksums of its layers."""
        checksums = LayerChecksums(block, self.layout.layer_bytes)
        if len(block) <= SMALL_BYTES:
            while (room := self._frames.room_for(len(block), SMALL_BYTES)) is not None:
                self._frames.received(self._receive_some(room))
        filled = self._frames.take_into(block)
        checksums.advance(filled)
        while filled < len(block):
            filled += self._receive_some(block[filled : filled + PIECE_BYTES])
            checksums.advance(filled)
        return checksums.packed()

    def put(self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], timeout_s: float) -> None:
        by_key = dict(zip(keys, blocks, strict=True))
        if len(keys) * self.layout.block_bytes >= _LOOKUP_BYTES:
            located = self.call(Lookup(self.next_id(), list(keys)), Located)
            by_key = {
                key: by_key[key] for key, place in zip(keys, located.locations, strict=True) if not place
            }
            if not by_key:
                return
        checksums = b"".join(layer_checksums(block, self.layout.layer_bytes) for block in by_key.values())
        put = PutBlocks(self.next_id(), list(by_key), checksums, timeout_s)
        frame = encode_frame(put, len(by_key) * self.layout.block_bytes)
        answer_timeout_s = timeout_s + self._timeout_s  # the pool reads on when it has room
        self._set_timeout(socket.SO_SNDTIMEO, answer_timeout_s)
        self._send([memoryview(frame), *by_key.values()])
        self._answer(put, Done, answer_timeout_s)
        self._set_timeout(socket.SO_SNDTIMEO, self._timeout_s)

    def put_layers(self, keys: Sequence[BlockKey], copy: CopyLayers, timeout_s: float) -> None:
        for part in self.parts(len(keys)):
            some_keys = keys[part]
            located = self.call(Lookup(self.next_id(), list(some_keys)), Located).locations
            missing = [index for index, place in enumerate(located) if not place]
            if not missing:
                continue
            blocks = np.empty((len(missing), self.layout.block_bytes), np.uint8)
            starts = blocks.ctypes.data + self.layout.block_bytes * np.arange(len(missing), dtype=np.int64)
            positions = [part.start + index for index in missing]
            for layers in self.layer_groups(len(missing)):
                copy(layers, positions, starts + layers.start * self.layout.layer_bytes)
            self.put([some_keys[index] for index in missing], [row.data for row in blocks], timeout_s)
