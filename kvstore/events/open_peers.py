"""Limits for the peers of a ZeroMQ socket that needs no key.

Owns: the number of peers, and the bytes that each may send. Does not know: messages.
"""

import asyncio
import contextlib
import socket

import zmq
import zmq.asyncio

from mooncake.security.curve import Monitor
from mooncake.security.handshakes import connection_of, num_bytes_received
from mooncake.security.waiting_peers import WaitingPeers

MOST_OPEN = 32
"""The most connections to one socket.

A further connection closes the oldest connection, whose peer may connect again.
"""
MOST_SENT_BYTES = 8 << 10
"""The most bytes that the peer of one connection may send.

libzmq keeps every frame of an unfinished message, and may need 32 times the frame's bytes for it. A KV-aware
router sends 20 bytes at first and 20 for each replay. If its connection is closed, it connects again.
"""
LOOK_INTERVAL_S = 0.01
"""Seconds between two checks while a peer is connected.

libzmq's one thread can receive some megabytes between two checks.
"""


class OpenPeers:
    """The limits on the TCP connections to a socket, and on the bytes that their peers send.

    Needs a running event loop. The object must be made before `bound` is bound, and closed before `bound` is
    closed.
    """

    def __init__(self, bound: zmq.asyncio.Socket) -> None:
        self._socket = bound
        self._crowd = WaitingPeers[int](MOST_OPEN, self._put_out)
        self._connections: dict[int, socket.socket] = {}
        """Connections by libzmq's descriptor."""
        self._monitor = Monitor(bound, self._on_event)
        self._next_look: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._monitor.close()
        if self._next_look is not None:
            self._next_look.cancel()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _on_event(self, event: int, descriptor: int) -> None:
        if event not in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
            return
        if self._crowd.leave(descriptor):
            self._connections.pop(descriptor).close()
        if event == zmq.EVENT_ACCEPTED:
            endpoint = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
            if (connection := connection_of(descriptor, endpoint)) is not None:
                self._connections[descriptor] = connection
                self._crowd.enter(descriptor)
                if self._next_look is None:
                    self._look()

    def _look(self) -> None:
        """End the connections of peers that have sent too much, and schedule the next check.

        There is no next check if no connection is left.
        """
        for descriptor, connection in list(self._connections.items()):
            if num_bytes_received(connection) > MOST_SENT_BYTES:
                self._crowd.leave(descriptor)
                self._put_out(descriptor)
        self._next_look = None
        if self._connections:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look)

    def _put_out(self, descriptor: int) -> None:
        with self._connections.pop(descriptor) as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
