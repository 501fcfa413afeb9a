"""A fake pool from which messengers fetch blocks over TCP. A test tells it to fail half-way."""

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from enum import Enum, auto

import msgspec
import xxhash

from messenger.wire.identity import Identity
from messenger.wire.messages import Challenge, Fetch, Found, FoundBlock, Hello, Message, Welcome
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import MessengerAddress
from mooncake.security.proofs import NONCE_BYTES
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S

_DECODER = msgspec.msgpack.Decoder(Message)
_HEADER = struct.Struct("<II")
NUM_PIECES = 6


class Answer(Enum):
    """The ways to answer a request for layers of blocks."""

    SERVE = auto()
    EVICTED = auto()
    """Answer without the last of the blocks."""
    DAMAGED = auto()
    """Answer with a wrong byte in the last block."""
    HANG = auto()
    """Never answer."""
    IN_PIECES = auto()
    """Answer with all blocks, in `NUM_PIECES` pieces, each after a `pause`."""
    DIE = auto()
    """End every connection, accept no new ones, and answer no further request.

    Requests on a connection that has not ended yet are not answered either.
    """


class HandMadeHolder:
    """A fake pool that holds `blocks`.

    `decide(layer_begin)` and `pause()` are called in a thread of each connection, and may block.
    """

    def __init__(
        self,
        fingerprint: str,
        layout: KVLayout,
        blocks: Mapping[BlockKey, bytes],
        decide: Callable[[int], Answer] = lambda layer: Answer.SERVE,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        self._identity = Identity("holder", 1, "elsewhere", fingerprint, layout)
        self._blocks = blocks
        self._decide, self._pause = decide, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self._closing = threading.Event()
        self.address = MessengerAddress("holder", 1, "elsewhere", "", (self._listener.getsockname(),))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._die()
        for thread in list(self._threads):
            thread.join(DEADLINE_S)

    def _die(self) -> None:
        self._closing.set()
        for sock in [self._listener, *self._socks]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(sock)
            if self._closing.is_set():  # it may have come too late to be closed with the others
                sock.close()
                return
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            hello = _receive(sock)
            assert isinstance(hello, Hello)
            nonce = secrets.token_bytes(NONCE_BYTES)
            _send(sock, Challenge(nonce, CLUSTER_KEY.proof(b"messenger receiver", hello.nonce, nonce)))
            _receive(sock)
            _send(sock, Welcome(self._identity))
            while True:
                message = _receive(sock)
                if isinstance(message, Fetch):
                    self._answer(sock, message)

    def _answer(self, sock: socket.socket, fetch: Fetch) -> None:
        answer = self._decide(fetch.layer_begin)
        if answer is Answer.DIE:
            self._die()
        if self._closing.is_set():
            return
        if answer is Answer.HANG:
            self._closing.wait(DEADLINE_S)
        layout = self._identity.layout
        begin, end = (
            head - layout.heads.start for head in fetch.heads or (layout.heads.start, layout.heads.stop)
        )
        found, payload = [], bytearray()
        for index, key in enumerate(fetch.keys):
            if key not in self._blocks or (answer is Answer.EVICTED and index == len(fetch.keys) - 1):
                continue
            layers = range(fetch.layer_begin, fetch.layer_end)
            pieces = [
                self._blocks[key][layer * layout.layer_bytes :][
                    begin * layout.head_bytes : end * layout.head_bytes
                ]
                for layer in layers
            ]
            checksums = b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(piece)) for piece in pieces)
            found.append(FoundBlock(index, checksums, 0))
            payload += b"".join(pieces)
        if answer is Answer.DAMAGED:
            payload[-1] ^= 1
        frame = _frame(Found(found), bytes(payload))
        num_pieces = NUM_PIECES if answer is Answer.IN_PIECES else 1
        piece_bytes = -(-len(frame) // num_pieces)
        for begin in range(0, len(frame), piece_bytes):
            if num_pieces > 1:
                self._pause()
            sock.sendall(frame[begin : begin + piece_bytes])


def _send(sock: socket.socket, message: Message) -> None:
    sock.sendall(_frame(message, b""))


def _frame(message: Message, payload: bytes) -> bytes:
    meta = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(meta), len(payload)) + meta + payload


def _receive(sock: socket.socket) -> Message:
    """Return the next message. Raises OSError at the end."""
    header = sock.recv(_HEADER.size, socket.MSG_WAITALL)
    if len(header) < _HEADER.size:
        raise ConnectionResetError("the messenger has hung up")
    message: Message = _DECODER.decode(sock.recv(_HEADER.unpack(header)[0], socket.MSG_WAITALL))
    return message
