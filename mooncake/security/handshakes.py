"""Handshakes of connections to one bound ZeroMQ socket, as libzmq's monitor reports them.

Owns: the counts of connections that were refused or have not come through, the bound on connections whose
peers have not shown the key, what the kernel knows of a connection. Does not know: the key, messages.
"""

import contextlib
import os
import socket
import sys

import zmq

from mooncake.security.waiting_peers import WaitingPeers

HANDSHAKE_S = 5.0
"""Seconds after which libzmq closes a connection that has not shown the key."""
HANDSHAKE_MARGIN_S = 1.0
MOST_UNAUTHENTICATED = 256
"""Unauthenticated connections to one socket at most. Each costs up to 55 KiB."""
GREETING_BYTES = 64
"""Bytes that a socket sends to any peer.

More goes only to a peer that knows the socket's key (ZeroMQ RFC 26).
"""
_TCP_INFO_BYTES = 136
_BYTES_ACKED, _BYTES_RECEIVED = slice(120, 128), slice(128, 136)  # of Linux's struct tcp_info


class Handshakes:
    """A counter of connections to one bound socket that have ended without showing the key.

    libzmq reports which connection has come or gone, but not which connection has been admitted. So each new
    connection is undecided. It stays undecided until it has gone, until as many connections have been
    admitted as are undecided, or until it is older than any handshake can be. Undecided connections are not
    counted: a burst of admitted peers may hide an unauthenticated peer for that time.

    libzmq reports connections that end in the middle of their handshake; the keys of their peers are unknown.
    The peers of all other connections that are counted have shown another key, or do not speak the protocol.
    """

    def __init__(self) -> None:
        self._num_accepted = 0
        self._num_admitted = 0
        self._num_refused = 0
        self.num_unfinished = 0
        """Number of handshakes that ended in the middle.

        The handshake took too long, the peer closed the connection, or the connection was dropped to make
        room for another one.
        """
        self._undecided: dict[int, float] = {}
        """Times of undecided connections by descriptor, oldest first."""
        self._num_admitted_undecided = 0
        """The least number of undecided connections that must have been admitted."""

    def on_event(self, event: int, descriptor: int, now_s: float) -> None:
        """Process an event of `zmq.EVENT_*`; events of a handshake have no `descriptor`."""
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
        """Return the number of connections that showed another key, or no key.

        The number is never too high, and never falls.
        """
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
            self._num_admitted_undecided -= 1  # it may have been an admitted one


class Unauthenticated:
    """A limit on TCP connections to one bound socket whose peers have not shown the key.

    libzmq takes as many connections as there are descriptors. Each accepted connection gets a second
    descriptor here. When libzmq has closed its own descriptor, the number of that descriptor may stand for
    something else. The second descriptor still stands for the connection, so nothing else is shut down.
    """

    def __init__(self) -> None:
        self._waiting = WaitingPeers[int](MOST_UNAUTHENTICATED, self._drop)
        self._connections: dict[int, socket.socket] = {}
        """The latest connections, including the authenticated ones, by libzmq's descriptor."""
        self.num_ended = 0
        """Number of connections that have ended, or are being ended, without the key."""

    def on_event(self, event: int, descriptor: int, endpoint: str) -> None:
        """Process an event of `zmq.EVENT_*` at the bound `endpoint`."""
        if event == zmq.EVENT_ACCEPTED:
            self._leave(descriptor)
            if (connection := connection_of(descriptor, endpoint)) is not None:
                self._connections[descriptor] = connection
                self._waiting.enter(descriptor)
        elif event == zmq.EVENT_DISCONNECTED:
            self._leave(descriptor)

    def close(self) -> None:
        """Close all connections' second descriptors. Idempotent."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _leave(self, descriptor: int) -> None:
        if self._waiting.leave(descriptor):
            with self._connections.pop(descriptor) as connection:
                self.num_ended += not _has_shown_key(connection)

    def _drop(self, descriptor: int) -> None:
        with self._connections.pop(descriptor) as connection:
            if not _has_shown_key(connection):
                self.num_ended += 1
                with contextlib.suppress(OSError):  # it has gone already
                    connection.shutdown(socket.SHUT_RDWR)


def connection_of(descriptor: int, endpoint: str) -> socket.socket | None:
    """Return the connection to the TCP `endpoint` that libzmq has as `descriptor`.

    Returns None if the connection has ended, and for local sockets, whose peers are processes of the same
    user.
    """
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
    """Return how many bytes the peer of a TCP connection has sent."""
    return _tcp_info(connection, _BYTES_RECEIVED)


def _has_shown_key(connection: socket.socket) -> bool:
    """Return whether the peer has received more than the greeting, as only a peer with the key does."""
    return _tcp_info(connection, _BYTES_ACKED) > GREETING_BYTES


def _tcp_info(connection: socket.socket, field: slice) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[field], sys.byteorder)
