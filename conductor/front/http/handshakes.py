"""The order of TLS handshakes: a few begin in each turn of the event loop, the latest clients first.

A handshake takes about a millisecond of the event loop, even if its client sends no second message. When
hundreds of clients want a handshake at once, open connections go on between the turns, and a new client does
not wait for the hundreds. If too many clients wait, the client that has waited longest is refused.

Owns: when a handshake may begin. Does not know: TLS, what a connection is for, how long a client may wait.
"""

import asyncio
import socket

_MAX_AT_ONCE = 8
"""The most handshakes that begin in one turn of the event loop."""
MAX_WAITING = 256
"""The most clients that may wait for their turn after their first bytes have come."""


class HandshakeTurns:
    """The turns of one listener's handshakes. Needs a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Turns of the waiting clients, in the order in which the clients' first bytes came."""
        self._is_due = False

    async def turn(self, accepted: socket.socket) -> None:
        """Wait for a connection's first bytes, and then until its handshake may begin.

        Raises OSError if the client has gone, or if the client is refused because too many wait.
        """
        await self._first_bytes(accepted)
        if not accepted.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("the client has gone")
        turn = self._loop.create_future()
        self._waiting[turn] = None
        if len(self._waiting) > MAX_WAITING:
            self._refuse_oldest()
        self._schedule()
        try:
            await turn
        finally:
            self._waiting.pop(turn, None)

    async def _first_bytes(self, accepted: socket.socket) -> None:
        is_readable = asyncio.Event()
        self._loop.add_reader(accepted, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            self._loop.remove_reader(accepted)

    def _refuse_oldest(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        if not oldest.done():
            oldest.set_exception(ConnectionAbortedError("too many TLS handshakes"))

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._is_due = False
        for _ in range(min(_MAX_AT_ONCE, len(self._waiting))):
            latest, _ = self._waiting.popitem()
            if not latest.done():
                latest.set_result(None)
        self._schedule()
