"""A receiver that knows the cluster key and sends wrong answers."""

import contextlib
import secrets
import socket
from random import Random

import msgspec

from messenger.wire.identity import Identity
from messenger.wire.messages import (
    Challenge,
    Found,
    FoundBlock,
    Hello,
    Introduction,
    Message,
    RefusalKind,
    Refused,
    TransferEnded,
    Welcome,
    WriteAck,
)
from mooncake.messages.pools import MessengerAddress
from mooncake.security.proofs import NONCE_BYTES
from tests.kvstore.mutations import HEADER, Mutator
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT, LAYOUT

_DECODER = msgspec.msgpack.Decoder(Message)
_MOST_ANSWERS = 20
_PATIENCE_S = 0.02


class Liar:
    """A receiver at `address`. `meet` accepts the connections of one session and ruins them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self.address = MessengerAddress("liar", 1, "elsewhere", "", (self._listener.getsockname(),))

    def close(self) -> None:
        self._listener.close()

    def meet(self, random: Random, num_lanes: int) -> int:
        """Accept a session, and send wrong answers. Returns how many mutated frames were sent."""
        num_frames = 0
        with contextlib.ExitStack() as lanes:
            socks = []
            for _ in range(num_lanes):
                sock, _ = self._listener.accept()
                socks.append(lanes.enter_context(sock))
                sock.settimeout(DEADLINE_S)
            mutator = Mutator(random)
            for sock in socks:
                with contextlib.suppress(ConnectionError):
                    num_frames += self._greet(sock, random, mutator)
            for sock in socks:
                with contextlib.suppress(ConnectionError):
                    num_frames += self._answer(sock, random, mutator)
        return num_frames

    def _greet(self, sock: socket.socket, random: Random, mutator: Mutator) -> int:
        """Carry out a handshake, in which one in ten answers is mutated."""
        hello = _receive(sock)
        assert isinstance(hello, Hello)
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = CLUSTER_KEY.proof(b"messenger receiver", hello.nonce, nonce)
        num_frames = _send(sock, Challenge(nonce, proof), mutator if random.random() < 0.1 else None)
        if random.random() < 0.05:
            _send(sock, Refused("no"), None)
        assert isinstance(_receive(sock), Introduction)
        identity = Identity("liar", 1, "elsewhere", FINGERPRINT, LAYOUT)
        return num_frames + _send(sock, Welcome(identity), mutator if random.random() < 0.1 else None)

    def _answer(self, sock: socket.socket, random: Random, mutator: Mutator) -> int:
        """Send random answers, without regard to the requests."""
        num_frames = 0
        if random.random() < 0.5:  # to be asked something, which may happen on another lane only
            sock.settimeout(_PATIENCE_S)
            with contextlib.suppress(TimeoutError):
                _receive(sock)
            sock.settimeout(DEADLINE_S)
        for _ in range(random.randrange(_MOST_ANSWERS)):
            kind = random.random()
            message: Message
            if kind < 0.4:
                message = WriteAck(random.choice((None, None, *RefusalKind)), "so")
            elif kind < 0.8:
                message = TransferEnded(random.randrange(40), "enough")
            else:
                message = Found([FoundBlock(0, bytes(8), 0)], random.choice((None, "no")))
            num_frames += _send(sock, message, mutator)
        return num_frames


def _send(sock: socket.socket, message: Message, mutator: Mutator | None) -> int:
    """Send a message, mutated if there is a mutator. Returns the number of mutated frames."""
    meta = msgspec.msgpack.encode(message) if mutator is None else mutator.fields(message)
    sock.sendall(HEADER.pack(len(meta), 0) + meta)
    return mutator is not None


def _receive(sock: socket.socket) -> Message:
    header = sock.recv(HEADER.size, socket.MSG_WAITALL)
    if len(header) < HEADER.size:
        raise ConnectionResetError("the messenger has hung up")
    message: Message = _DECODER.decode(sock.recv(HEADER.unpack(header)[0], socket.MSG_WAITALL))
    return message
