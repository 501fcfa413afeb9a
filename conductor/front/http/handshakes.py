"""The order of TLS handshakes: a few begin in each turn of the event loop, those of the latest clients first.

A handshake takes about a millisecond of the event loop, even if its client sends no second message. With
hundreds at once, open connections go on between the few of each turn, and a new client goes before the crowd.
The client that has waited longest is refused when too many wait.

Owns: when a handshake may begin. Does not know: TLS, what a connection is for, how long one may wait.
"""

import asyncio
import socket

_MAX_AT_ONCE = 8
"""Handshakes that begin in one turn of the event loop."""
MAX_WAITING = 256
"""Clients that have sent bytes and wait for their turn."""


class HandshakeTurns:
    """The turns of one listener's handshakes. Needs a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Turns of the clients whose first bytes have come, in the order of these."""
        self._is_due = False

    async def turn(self, accepted: socket.socket) -> None:
        """Wait for a connection's first bytes, and then until its handshake may begin.

        Raises OSError if the client has gone instead, or if too many wait that came later.
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
