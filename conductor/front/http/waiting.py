"""The connections of one listener that wait for a request: new ones, idle ones, and those over which one
still arrives.

Owns: the listening socket, how many there may be. Does not know: HTTP, when a request is whole.
"""

import contextlib
import errno
import resource
import socket
from collections.abc import Hashable
from typing import Any, Protocol

from mooncake.security.crowd import Crowd

MOST_WAITING, MOST_WAITING_TLS = 2048, 512
"""12 KiB of memory each, and up to 130 KiB with TLS"""
CROWD_LEN = 64
"""connections whose memory is worth a search for what can go back to the system"""
_SHARE_OF_DESCRIPTORS = 4
"""one of so many of this process; others are for answers, for workers, for another listener"""


class Waits(Hashable, Protocol):
    """A connection."""

    def put_out(self) -> None:
        """Close the connection: others need the room."""


class Listener(socket.socket):
    """Accepts for an event loop. One connection too many puts out the one that has waited for longest.

    A connection counts from here on, so also while it shakes hands for TLS.
    """

    def __init__(self, *address: Any) -> None:
        super().__init__(*address)
        self._crowd = Crowd[Waits](_bound(MOST_WAITING), _put_out)
        self._accepted: dict[int, _Accepted] = {}
        """by descriptor"""
        self._most_waiting = 0
        """since a crowd has gone"""

    def use_tls(self) -> None:
        """Say that connections will be encrypted. To be called before the first one."""
        self._crowd = Crowd[Waits](_bound(MOST_WAITING_TLS), _put_out)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. When descriptors run out, one that waits makes room; a later call succeeds."""
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._crowd.make_room():
                raise BlockingIOError from None
            raise
        accepted, descriptor = _Accepted(connection), connection.fileno()
        if (gone := self._accepted.get(descriptor)) is not None:
            self._crowd.leave(gone)
        self._accepted[descriptor] = accepted
        self._enter(accepted)
        return connection, address

    def failed(self, descriptor: int, connection: socket.socket) -> None:
        """An accepted connection, which had this descriptor, has ended before it could be used."""
        accepted = self._accepted.get(descriptor)
        if accepted is not None and accepted.connection is connection:
            del self._accepted[descriptor]
            self._crowd.leave(accepted)

    def crowd_has_gone(self) -> bool:
        """Whether many connections that waited have gone since this was last so."""
        has_gone = self._most_waiting - len(self._crowd) >= CROWD_LEN
        if has_gone:
            self._most_waiting = len(self._crowd)
        return has_gone

    def ready(self, descriptor: int, waits: Waits) -> None:
        """An accepted connection can be used, and waits on as `waits`."""
        if (accepted := self._accepted.pop(descriptor, None)) is not None:
            self._crowd.leave(accepted)
        self._enter(waits)

    def waits(self, waits: Waits) -> None:
        """Note that a connection's answer is complete, and that the connection waits for its next request."""
        self._enter(waits)

    def leaves(self, waits: Waits) -> None:
        """A connection is to be answered, or has ended."""
        self._crowd.leave(waits)

    def _enter(self, waits: Waits) -> None:
        self._crowd.enter(waits)
        self._most_waiting = max(self._most_waiting, len(self._crowd))


class _Accepted:
    """A connection that HTTP has not been told of yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def put_out(self) -> None:
        with contextlib.suppress(OSError):  # it has gone already
            self.connection.shutdown(socket.SHUT_RDWR)


def _bound(most: int) -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = descriptors == resource.RLIM_INFINITY
    return most if unlimited else min(most, descriptors // _SHARE_OF_DESCRIPTORS)


def _put_out(waits: Waits) -> None:
    waits.put_out()
