"""A client of a messenger that makes one call at a time, on a blocking socket."""

import itertools
import os
import socket
import time

import msgspec

from kvstore.protocol import answers, calls
from mooncake.messages.pools import MessengerAddress
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT, LAYOUT

_DECODER = msgspec.msgpack.Decoder(answers.FromPool)


class Caller:
    """A client. If it `connects`, it formats a new pool. Every wait has a deadline."""

    address: MessengerAddress

    def __init__(self, socket_path: str, serial: int, *, connects: bool = True) -> None:
        self._call_ids = itertools.count(1)
        self._sock = _connect(socket_path)
        if connects:
            answer = self.call(calls.Connect(self.next_id(), FINGERPRINT, LAYOUT, serial, may_format=True))
            assert isinstance(answer, answers.Connected), answer
            self.address = answer.address

    def next_id(self) -> int:
        return next(self._call_ids)

    def call(self, call: calls.Call) -> answers.FromPool | None:
        self.send(msgspec.msgpack.encode(call))
        return self.receive()

    def send(self, packet: bytes) -> None:
        self._sock.sendall(packet)

    def receive(self) -> answers.FromPool | None:
        """Return the next answer; None when the connection has ended."""
        packet, fds, _, _ = socket.recv_fds(self._sock, calls.MAX_MESSAGE_BYTES, 1)
        for fd in fds:
            os.close(fd)
        answer: answers.FromPool | None = _DECODER.decode(packet) if packet else None
        return answer

    def close(self) -> None:
        self._sock.close()


def _connect(socket_path: str) -> socket.socket:
    """Return a connection, once the messenger listens."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(DEADLINE_S)
        try:
            sock.connect(socket_path)
        except OSError:
            sock.close()
            assert time.monotonic() < deadline_s, "the messenger does not listen"
            time.sleep(0.01)
        else:
            return sock
