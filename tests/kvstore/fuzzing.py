"""Fuzzers of a messenger that know the cluster key and send frames that no correct peer sends.

A conversation is a generator. It yields while the messenger works on the frames, so that several
conversations run at a time. Frames that can be decoded are sent in flights. Each flight ends with a frame
that must be answered. Frames that end the connection are sent last.
"""

import contextlib
import functools
import itertools
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import msgspec
import xxhash

from messenger.wire.messages import (
    Abandon,
    Challenge,
    Close,
    Fetch,
    FetchDone,
    Found,
    Hello,
    Introduction,
    Message,
    Open,
    Probe,
    Write,
    WriteAck,
    WriteEntry,
)
from messenger.wire.protocol import MAX_FRAME_BYTES, SPOKEN, encode_frame
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Grant, GrantedPage, MessengerAddress
from mooncake.security.keys import ClusterKey
from mooncake.security.proofs import NONCE_BYTES
from tests.kvstore.by_hand import IDENTITY
from tests.kvstore.mutations import HEADER, Mutator
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, LAYOUT

NUM_BLOBS = 16
MOST_FETCHES = 50
FLIGHT_FRAMES = 60
_MESSAGE = msgspec.msgpack.Decoder(Message)
_LAYER_BYTES, _HEAD_BYTES = LAYOUT.layer_bytes, LAYOUT.head_bytes


@dataclass
class Target:
    """The facts that the fuzzers know of the messenger. All payloads that they send are parts of `source`."""

    address: MessengerAddress
    socket_path: str
    keys: Sequence[BlockKey]
    """Keys of sealed blocks."""
    source: bytes
    source_fd: int
    grants: list[Grant] = field(default_factory=list)
    """Grants that are open, or that were open until a short time ago."""

    @staticmethod
    def make(address: MessengerAddress, socket_path: str, keys: Sequence[BlockKey]) -> "Target":
        source = Random("payload").randbytes(NUM_BLOBS * _LAYER_BYTES)
        source_fd = os.memfd_create("source")
        os.write(source_fd, source)
        return Target(address, socket_path, keys, source, source_fd)

    @functools.cached_property
    def layers(self) -> dict[bytes, bytes]:
        """All contents that a layer can have, by checksum.

        Any head of `source` may be written as any other.
        """
        pieces = [self.source[at : at + _HEAD_BYTES] for at in range(0, len(self.source), _HEAD_BYTES)]
        layers = map(b"".join, itertools.product(pieces, repeat=LAYOUT.num_kv_heads))
        return {checksums_of(layer): layer for layer in layers}


def checksums_of(data: bytes, layer_bytes: int = _LAYER_BYTES) -> bytes:
    layers = range(0, len(data), layer_bytes)
    digests = [xxhash.xxh3_64_intdigest(data[at : at + layer_bytes]) for at in layers]
    return struct.pack(f"<{len(digests)}Q", *digests)


@contextlib.contextmanager
def may_be_hung_up_on() -> Iterator[None]:
    """Make a context in which the messenger may end the connection, but must not be silent."""
    try:
        yield
    except TimeoutError:
        raise AssertionError("the messenger neither answers nor hangs up") from None
    except OSError:
        return


class Sent(NamedTuple):
    """A frame in flight."""

    is_acknowledged: bool
    """Whether the frame is acknowledged if it is read."""
    is_mutated: bool


class Wire:
    """A connection to a messenger's TCP port, or to its socket for messengers of this host."""

    def __init__(self, target: Target, *, is_local: bool) -> None:
        self.sock = _connect(target, is_local=is_local)
        self.is_local = is_local
        self._received = bytearray()

    def next(self) -> Message:
        """Return the next answer. Raises ConnectionError at the end."""
        while True:
            if len(self._received) >= HEADER.size:
                meta_bytes, payload_bytes = HEADER.unpack_from(self._received)
                end = HEADER.size + meta_bytes + payload_bytes
                if len(self._received) >= end:
                    message: Message = _MESSAGE.decode(self._received[HEADER.size : HEADER.size + meta_bytes])
                    del self._received[:end]
                    return message
            piece = self.sock.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("the messenger has hung up")
            self._received += piece

    def greet(self, session: bytes, lane: int, segment_bytes: int | None) -> Introduction:
        """Send a hello, and return the introduction to send next."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.sock.sendall(encode_frame(Hello(SPOKEN.newest, nonce)))
        challenge = self.next()
        assert isinstance(challenge, Challenge)
        proof = CLUSTER_KEY.proof(b"messenger sender", challenge.nonce, nonce)
        return Introduction(proof, IDENTITY, session, lane, segment_bytes)


class Lane(Wire):
    """A connection after its handshake, which counts the answers."""

    def __init__(self, target: Target, session: bytes, number: int, *, is_local: bool) -> None:
        super().__init__(target, is_local=is_local)
        self.is_open = True
        self.num_found = 0
        self.num_fetches = 0
        self._num_acks = 0
        self._flight: list[Sent] = []
        """The frames that were sent since the last `landed`."""
        introduction = self.greet(session, number, len(target.source) if is_local else None)
        with self._closing():
            fds = [target.source_fd] if is_local else []
            socket.send_fds(self.sock, [encode_frame(introduction)], fds)

    def send(self, data: bytes, frames: Sequence[Sent]) -> None:
        self._flight += frames
        if self.is_open:
            with self._closing():
                self.sock.sendall(data)

    def landed(self) -> int:
        """Read until everything is acknowledged, or until the connection ends.

        Returns the number of mutated frames that the messenger has certainly read.
        """
        wanted = sum(frame.is_acknowledged for frame in self._flight)
        while self.is_open and self._num_acks < wanted:
            with self._closing():
                self.next()
        num_read, num_acks = 0, self._num_acks
        for position, frame in enumerate(self._flight):
            if frame.is_acknowledged and num_acks:
                num_acks -= 1
                num_read = position + 1
        if not self.is_open:
            num_read += 1  # the one that has ended it
        num_mutated = sum(frame.is_mutated for frame in self._flight[:num_read])
        self._flight, self._num_acks = [], 0
        return num_mutated

    def ended(self) -> int:
        """Send no more, and read until the connection ends.

        Returns the number of mutated frames as `landed` does.
        """
        if self.is_open:
            with self._closing():
                self.sock.shutdown(socket.SHUT_WR)
                while True:
                    self.next()
        num_read = self.landed()
        self.sock.close()
        return num_read

    def next(self) -> Message:
        message = super().next()
        self._num_acks += isinstance(message, WriteAck)
        self.num_found += isinstance(message, Found)
        return message

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        self.is_open, was_open = False, self.is_open
        with may_be_hung_up_on():
            yield
            self.is_open = was_open


class PeerFuzzer:
    """A sender with a grant of its own, which also knows other grants. It has one to three lanes."""

    def __init__(self, random: Random, target: Target, grant: Grant | None) -> None:
        self.num_frames = 0
        """The number of mutated frames that the messenger has certainly read."""
        self._random = random
        self._mutator = Mutator(random)
        self._target = target
        self._grants = [grant] * 3 if grant is not None else []

    def converse(self) -> Iterator[None]:
        random, target = self._random, self._target
        session, is_local = random.randbytes(16), random.random() < 0.5
        numbers = random.sample(range(4), random.choice((1, 1, 2, 3)))
        if random.random() < 0.05:
            numbers.append(numbers[0])  # which is refused
        lanes = [Lane(target, session, number, is_local=is_local) for number in numbers]
        leftovers: list[bytes] = []
        for _ in range(random.randrange(1, 5)):
            for lane in lanes:
                self._fly(lane, leftovers)
            yield
            self.num_frames += sum(lane.landed() for lane in lanes)
        for lane in lanes:
            self._crash(lane, leftovers)
        yield
        for lane in lanes:
            if random.random() < 0.1:  # a reset instead of an end
                lane.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                lane.sock.close()
            else:
                self.num_frames += lane.ended()

    def _fly(self, lane: Lane, leftovers: list[bytes]) -> None:
        """Send frames with wrong values that can be decoded, and then a frame that is answered."""
        out, frames = [], []
        for _ in range(self._random.randrange(1, FLIGHT_FRAMES)):
            message, payload = self._frame(lane)
            is_mutated = self._random.random() < 0.8
            meta = self._mutator.fields(message) if is_mutated else msgspec.msgpack.encode(message)
            try:
                kind = type(_MESSAGE.decode(meta))
            except (msgspec.MsgspecError, ValueError):
                leftovers.append(HEADER.pack(len(meta), len(payload)) + meta + payload)
                continue
            out += [HEADER.pack(len(meta), len(payload)), meta, payload]
            frames.append(Sent(kind in (Write, Probe), is_mutated))
        lane.send(b"".join(out) + encode_frame(Probe()), [*frames, Sent(True, False)])

    def _crash(self, lane: Lane, leftovers: list[bytes]) -> None:
        """Send frames that may each end the connection, in random order."""
        frames = []
        for _ in range(self._random.randrange(1, 5)):
            message, payload = self._frame(lane)
            frames.append(self._mutator.frame(msgspec.msgpack.encode(message), payload))
        frames += [leftovers.pop()] if leftovers else []
        self._random.shuffle(frames)
        lane.send(b"".join(frames), [Sent(False, True)] * len(frames))

    def _frame(self, lane: Lane) -> tuple[Message, bytes]:
        """Return a message that can be decoded, and its payload.

        Only its order or its meaning may be wrong.
        """
        random = self._random
        kind, grant = random.random(), self._grant()
        transfer_id = grant.grant_id & 0xFF if random.random() < 0.99 else random.randrange(4)
        if kind < 0.50:
            return self._write(transfer_id, grant, is_local=lane.is_local)
        if kind < 0.60:
            return Open(transfer_id, grant.grant_id, "fuzz"), b""
        if kind < 0.66:
            return Close(transfer_id, random.choice((None, "enough"))), b""
        if kind < 0.80 and lane.num_fetches < MOST_FETCHES:
            lane.num_fetches += 1
            return self._fetch(), b""
        if kind < 0.90 and lane.num_found:
            lane.num_found -= 1
            lane.num_fetches -= 1
            return FetchDone(), b""
        if kind < 0.92:
            return Abandon(random.randrange(4)), b""
        return Probe(), b"" if lane.is_local else bytes(random.randrange(3000))

    def _write(self, transfer_id: int, grant: Grant, *, is_local: bool) -> tuple[Write, bytes]:
        random = self._random
        entries, payload = [], b""
        heads = self._heads()
        layer_bytes = _LAYER_BYTES if heads is None else (heads[1] - heads[0]) * _HEAD_BYTES
        for granted in random.sample(grant.pages, min(len(grant.pages), random.choice((1, 1, 2)))):
            page, generation = granted.page, granted.generation
            begin = random.randrange(LAYOUT.num_layers)
            end = random.randrange(begin, LAYOUT.num_layers) + 1
            if heads is not None and random.random() < 0.9:
                end = begin + 1
            if random.random() < 0.1:  # bytes and checksums are those of the layers, wherever they are
                shift, grow = random.randrange(-5, 6), random.randrange(4)
                begin, end = begin + shift, end + shift + grow
            if random.random() < 0.05:
                page += random.choice((-1, 1, random.randrange(-64, 64)))
            if random.random() < 0.05:
                generation = random.randrange(generation + 2)
            offset = random.randrange(NUM_BLOBS - end + begin) * _LAYER_BYTES
            if heads is not None:  # any head may come for any other
                offset = random.randrange(NUM_BLOBS // 2) * _HEAD_BYTES
            data = self._target.source[offset : offset + (end - begin) * layer_bytes]
            checksums = checksums_of(data, layer_bytes)
            entries.append(WriteEntry(page, generation, begin, end, checksums, offset))
            payload += data
        if random.random() < 0.03:  # the same twice in one frame
            entries, payload = entries * 2, payload * 2
        return Write(transfer_id, grant.grant_id, entries, heads), b"" if is_local else payload

    def _heads(self) -> tuple[int, int] | None:
        """Return the heads of each layer that a frame has; None for all, two times out of three.

        A few ranges are outside of the layer.
        """
        random = self._random
        if random.random() < 0.65:
            return None
        begin = random.randrange(LAYOUT.num_kv_heads)
        end = random.randrange(begin, LAYOUT.num_kv_heads) + 1
        shift = random.randrange(-2, 3) if random.random() < 0.1 else 0
        return begin + shift, end + shift

    def _fetch(self) -> Fetch:
        random = self._random
        begin = random.randrange(LAYOUT.num_layers)
        keys = random.sample(self._target.keys, random.randrange(1, 9))
        heads = self._heads()
        end = begin + 1 if heads is not None and random.random() < 0.9 else LAYOUT.num_layers
        return Fetch(keys, begin, random.randrange(begin, end) + 1, heads)

    def _grant(self) -> Grant:
        known = [*self._grants, *self._target.grants[-4:]]
        if known:
            return self._random.choice(known)
        return Grant(self._random.getrandbits(63), self._target.address, [GrantedPage(0, 0, 0)])


class Stranger:
    """An unauthenticated peer that is refused, or that sends wrong frames in the handshake."""

    def __init__(self, random: Random, target: Target) -> None:
        self.num_frames = 0
        self._random = random
        self._mutator = Mutator(random)
        self._target = target

    def converse(self) -> Iterator[None]:
        wire = Wire(self._target, is_local=self._random.random() < 0.5)
        with may_be_hung_up_on(), wire.sock:
            self._say(wire)
            self.num_frames += 1
            yield
            wire.sock.shutdown(socket.SHUT_WR)
            while wire.sock.recv(4096):
                pass

    def _say(self, wire: Wire) -> None:
        random, mutator, sock = self._random, self._mutator, wire.sock
        hello = Hello(SPOKEN.newest, random.randbytes(NONCE_BYTES))
        introduced = wire.greet(bytes(16), 0, 1 << 20) if random.random() < 0.5 else None
        greeting: Message = hello if introduced is None else introduced
        match random.randrange(8):
            case 0:
                sock.sendall(random.randbytes(random.randrange(1, 5000)))
            case 1:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            case 2 | 3:
                meta = mutator.fields(greeting)
                sock.sendall(HEADER.pack(len(meta), 0) + meta)
            case 4:
                sock.sendall(mutator.frame(msgspec.msgpack.encode(greeting), b""))
            case 5:
                sock.sendall(encode_frame(Write(1, 1, []), 5) + b"12345")
            case 6:
                sock.sendall(encode_frame(greeting, MAX_FRAME_BYTES))
            case _ if wire.is_local:
                reader, writer = os.pipe()
                fds = [reader, writer, self._target.source_fd][: random.randrange(4)]
                socket.send_fds(sock, [encode_frame(greeting)], fds)
                os.close(reader)
                os.close(writer)
            case _:
                other_key = Introduction(ClusterKey.generate().proof(b"x"), IDENTITY, bytes(16), 0)
                sock.sendall(encode_frame(other_key))


def _connect(target: Target, *, is_local: bool) -> socket.socket:
    if is_local:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_S)
        sock.connect(target.address.unix_path)
        return sock
    return socket.create_connection(target.address.tcp_endpoints[0], DEADLINE_S)
