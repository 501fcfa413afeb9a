"""Resources that the connections of one server share.

They are slots for connections, memory for arriving requests, and turns of the event loop.

Owns: the limit of each resource, and which connection makes room for another. Does not know: HTTP, sockets.
"""

import asyncio
import resource
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from mooncake.security.waiting_peers import WaitingPeers

MAX_WAITING, MAX_WAITING_TLS = 2048, 512
"""The most connections that wait for a request, without and with TLS.

Each takes 12 KiB of memory without TLS, and up to 130 KiB with TLS.
"""
MAX_STALLED = 256
"""The most connections whose clients have stopped reading a response. The response's rest stays in memory."""
CROWD_LEN = 64
"""The drop in the number of open connections after which memory is returned to the system."""
MAX_READ_AT_ONCE = 16
"""The most connections in `ReadingTurns` whose received bytes are parsed in one turn of the event loop."""
_SHARE_OF_DESCRIPTORS = 4
"""The divisor of the process's limit of file descriptors; the quotient bounds each kind of connections.

The kinds are those of `ConnectionTable`. The other descriptors are for connections whose requests are being
answered, for workers, and for another listener.
"""


class Evictable(Hashable, Protocol):
    """The interface of a connection that can be closed to free its slot."""

    def make_room(self) -> None:
        """Close the connection to free its slot."""

    def shutdown(self) -> None:
        """Close the connection after the response that is being made, and drop the requests behind it.

        A connection without such a response closes at once, or soon if it is just being set up.
        """

    def abort(self) -> None:
        """Close the connection at once; unread data is lost."""


class ConnectionTable:
    """The open connections of a server.

    *Waiting* connections have no complete request: they are new or idle, or their request is arriving.
    *Closing* connections end when the client has read the rest of a response. The clients of *stalled*
    connections have stopped reading a response. If a kind has too many connections, its oldest connection is
    closed.
    """

    def __init__(self, *, is_tls: bool) -> None:
        self.open: set[Evictable] = set()
        self.has_emptied = asyncio.Event()
        """An event that is set while no connection is open."""
        self.has_emptied.set()
        most = _max_waiting(MAX_WAITING_TLS if is_tls else MAX_WAITING)
        self._waiting = WaitingPeers[Evictable](most, lambda connection: connection.make_room())
        self._closing = WaitingPeers[Evictable](most, lambda connection: connection.abort())
        self._stalled = WaitingPeers[Evictable](
            _max_waiting(MAX_STALLED), lambda connection: connection.abort()
        )
        self._peak_open = 0
        """The most connections that were open at a time since `crowd_has_gone` last returned True."""

    def accepted(self, connection: Evictable) -> None:
        """Add a new connection, which waits for its first request."""
        self.open.add(connection)
        self._peak_open = max(self._peak_open, len(self.open))
        self.has_emptied.clear()
        self.waits(connection)

    def waits(self, connection: Evictable) -> None:
        """Record that a connection waits for its next request."""
        self._waiting.enter(connection)

    def is_served(self, connection: Evictable) -> None:
        """Record that the request of a connection has arrived completely."""
        self._waiting.leave(connection)

    def closes(self, connection: Evictable) -> None:
        """Record that a connection closes once the client has read the rest of a response."""
        self._waiting.leave(connection)
        self._closing.enter(connection)

    def stalls(self, connection: Evictable) -> None:
        """Record that the client of a connection has stopped reading a response."""
        self._stalled.enter(connection)

    def reads_on(self, connection: Evictable) -> None:
        """Record that the client of a stalled connection reads again."""
        self._stalled.leave(connection)

    def lost(self, connection: Evictable) -> None:
        """Remove a connection that has ended. Idempotent."""
        for peers in (self._waiting, self._closing, self._stalled):
            peers.leave(connection)
        self.open.discard(connection)
        if not self.open:
            self.has_emptied.set()

    def make_room(self) -> bool:
        """Close the oldest closing connection, else the oldest waiting one, else the oldest stalled one.

        Returns False if there was no connection to close.
        """
        return any(peers.make_room() for peers in (self._closing, self._waiting, self._stalled))

    def crowd_has_gone(self) -> bool:
        """Return whether at least `CROWD_LEN` connections fewer are open than at the peak.

        The peak is the most connections that were open at a time since the last call that returned True.
        """
        has_gone = self._peak_open - len(self.open) >= CROWD_LEN
        if has_gone:
            self._peak_open = len(self.open)
        return has_gone


def _max_waiting(most: int) -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = descriptors == resource.RLIM_INFINITY
    return most if unlimited else min(most, descriptors // _SHARE_OF_DESCRIPTORS)


Sender = TypeVar("Sender", bound=Hashable)


class UploadBudget(Generic[Sender]):
    """The memory budget of incomplete requests.

    When the budget is exceeded, the sender whose bytes have been counted for the longest time is evicted.
    """

    def __init__(self, max_bytes: int, evict: Callable[[Sender], None]) -> None:
        """Set the budget.

        `evict` is called with a sender that is to be evicted, after the sender's bytes have been released.
        """
        self._max_bytes, self._evict = max_bytes, evict
        self._num_bytes: dict[Sender, int] = {}
        """Bytes by sender, in the order in which the senders' first bytes were counted."""
        self._total_bytes = 0

    def add(self, sender: Sender, num_bytes: int) -> None:
        """Count more bytes of a sender's request."""
        self._num_bytes[sender] = self._num_bytes.get(sender, 0) + num_bytes
        self._total_bytes += num_bytes
        while self._total_bytes > self._max_bytes:
            oldest = next(iter(self._num_bytes))
            self.release(oldest)
            self._evict(oldest)

    def release(self, sender: Sender) -> None:
        """Release the bytes of a sender whose request is complete or has ended. Idempotent."""
        self._total_bytes -= self._num_bytes.pop(sender, 0)


class ReadingTurns:
    """A queue of connections with unparsed bytes. A few connections parse in each turn of the event loop.

    So a new request is answered soon, even if other connections bring many pipelined requests, or bodies in
    small chunks.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def add(self, go_on: Callable[[], None]) -> None:
        """Queue the callback `go_on` for one of the next turns. Needs a running event loop."""
        self._waiting.append(go_on)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_due = False
        for _ in range(min(MAX_READ_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        self._schedule()
