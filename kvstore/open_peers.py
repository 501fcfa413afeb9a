"""The peers of a ZeroMQ socket that everybody may use.

Owns: how many they are. Does not know: what is said.
"""

import contextlib
import socket

import zmq
import zmq.asyncio

from mooncake.crowd import Crowd
from mooncake.curve import Monitor
from mooncake.handshakes import connection_of

MOST_OPEN = 64
"""connections to one socket; one more puts out the oldest, which may come again"""


class OpenPeers:
    """Bounds the number of TCP connections to `bound`. Needs a running event loop.

    To be made before `bound` is bound, and closed before it is closed.
    """

    def __init__(self, bound: zmq.asyncio.Socket) -> None:
        self._socket = bound
        self._crowd = Crowd[int](MOST_OPEN, self._put_out)
        self._connections: dict[int, socket.socket] = {}
        """by libzmq's descriptor"""
        self._monitor = Monitor(bound, self._on_event)

    def close(self) -> None:
        """Idempotent."""
        self._monitor.close()
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

    def _put_out(self, descriptor: int) -> None:
        with self._connections.pop(descriptor) as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
