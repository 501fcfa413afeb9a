"""The handshakes of those who connect to one bound ZeroMQ socket, as libzmq's monitor tells of them.

Owns: the counts of connections that were refused or have not come through, the bound on connections whose
peers have not shown the key, what the kernel knows of a connection. Does not know: the key, messages.
"""

import contextlib
import os
import socket
import sys

import zmq

from mooncake.security.crowd import Crowd

HANDSHAKE_S = 5.0
"""after which libzmq closes a connection that has not shown the key"""
HANDSHAKE_MARGIN_S = 1.0
MOST_UNAUTHENTICATED = 256
"""connections to one socket whose peers have not shown the key. Each costs up to 55 KiB"""
GREETING_BYTES = 64
"""that a socket sends to everybody; it says more only to a peer that knows its key (ZeroMQ RFC 26)"""
_TCP_INFO_BYTES = 136
_BYTES_ACKED, _BYTES_RECEIVED = slice(120, 128), slice(128, 136)  # of Linux's struct tcp_info


class Handshakes:
    """Counts the connections to one bound socket that have ended without showing the key.

    libzmq tells which connection has come or gone, but not which one has been admitted. So one is undecided
    until it has gone, or all that are undecided have been admitted, or it is older than any handshake can be.
    Undecided ones are not counted: a burst of friends may hide an unauthenticated peer for that time.

    Of a connection that has ended in the middle of its handshake nobody knows which key its peer has. libzmq
    says so for each. All others have shown that they do not have ours, or do not speak the protocol.
    """

    def __init__(self) -> None:
        self._num_accepted = 0
        self._num_admitted = 0
        self._num_refused = 0
        self.num_unfinished = 0
        """ended in the middle: in the time that there is, by their peers, or to make room for others"""
        self._undecided: dict[int, float] = {}
        """when each came, by its descriptor, oldest first"""
        self._num_admitted_undecided = 0
        """at least as many of them have been admitted"""

    def on_event(self, event: int, descriptor: int, now_s: float) -> None:
        """`event` of `zmq.EVENT_*`; those of a handshake have no `descriptor`."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._num_accepted += 1
                self._forget(descriptor)
                self._undecided[descriptor] = now_s
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_admitted += 1
                self._num_admitted_undecided += 1
                if self._num_admitted_undecided >= len(self._undecided):
                    self._undecided.clear()
                    self._num_admitted_undecided = 0
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.num_unfinished += 1
            case zmq.EVENT_DISCONNECTED:
                self._forget(descriptor)

    def num_refused(self, now_s: float) -> int:
        """Connections that showed another key than ours, or none. Never too many, and it never falls."""
        while self._undecided:
            descriptor, since_s = next(iter(self._undecided.items()))
            if now_s - since_s < HANDSHAKE_S + HANDSHAKE_MARGIN_S:
                break
            self._forget(descriptor)
        decided = self._num_accepted - len(self._undecided)
        self._num_refused = max(self._num_refused, decided - self._num_admitted - self.num_unfinished)
        return self._num_refused

    def _forget(self, descriptor: int) -> None:
        if self._undecided.pop(descriptor, None) is not None and self._num_admitted_undecided:
            self._num_admitted_undecided -= 1  # it may have been one of those


class Unauthenticated:
    """Bounds the TCP connections to one bound socket whose peers have not shown the key.

    libzmq takes as many as there are descriptors. Each that it accepts gets a second descriptor here, which
    stays the connection's own when libzmq has closed it, so that nothing else is shut down in its place.
    """

    def __init__(self) -> None:
        self._crowd = Crowd[int](MOST_UNAUTHENTICATED, self._put_out)
        self._connections: dict[int, socket.socket] = {}
        """the latest, with those that have shown the key meanwhile, by libzmq's descriptor"""
        self.num_ended = 0
        """connections that have ended, or are being ended, without the key"""

    def on_event(self, event: int, descriptor: int, endpoint: str) -> None:
        """`event` of `zmq.EVENT_*` at the bound `endpoint`."""
        if event == zmq.EVENT_ACCEPTED:
            self._leave(descriptor)
            if (connection := connection_of(descriptor, endpoint)) is not None:
                self._connections[descriptor] = connection
                self._crowd.enter(descriptor)
        elif event == zmq.EVENT_DISCONNECTED:
            self._leave(descriptor)

    def close(self) -> None:
        """Idempotent."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _leave(self, descriptor: int) -> None:
        if self._crowd.leave(descriptor):
            with self._connections.pop(descriptor) as connection:
                self.num_ended += not _has_shown_key(connection)

    def _put_out(self, descriptor: int) -> None:
        with self._connections.pop(descriptor) as connection:
            if not _has_shown_key(connection):
                self.num_ended += 1
                with contextlib.suppress(OSError):  # it has gone already
                    connection.shutdown(socket.SHUT_RDWR)


def connection_of(descriptor: int, endpoint: str) -> socket.socket | None:
    """The connection to the TCP `endpoint` that libzmq has as `descriptor`. None if that has gone by now, and
    for local sockets, whose peers are the user's own."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        return None
    try:
        second = os.dup(descriptor)
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=second)
    except OSError:
        os.close(second)
        return None
    with contextlib.suppress(OSError):
        if connection.getsockname()[1] == int(address.rpartition(":")[2]):
            return connection
    connection.close()
    return None


def num_bytes_received(connection: socket.socket) -> int:
    """What the peer of a TCP connection has sent by now."""
    return _tcp_info(connection, _BYTES_RECEIVED)


def _has_shown_key(connection: socket.socket) -> bool:
    """Whether its peer has taken more than everybody is told."""
    return _tcp_info(connection, _BYTES_ACKED) > GREETING_BYTES


def _tcp_info(connection: socket.socket, field: slice) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[field], sys.byteorder)
