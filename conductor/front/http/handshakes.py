"""The order of TLS handshakes: a few begin in each turn of the event loop, the latest client first.

A handshake takes about a millisecond of the event loop, and a client that sends only its first message costs
as much as any other. So hundreds at once delay neither the open connections nor a new client: those of the
crowd wait longest, and the oldest is refused when too many wait.

Owns: when a handshake may begin. Does not know: TLS, what a connection is for.
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
        self._waiting: list[asyncio.Future[None]] = []
        """Clients whose first bytes have come, in this order."""
        self._is_due = False

    async def turn(self, accepted: socket.socket) -> None:
        """Wait until a connection's handshake may begin: until its first bytes have come, and for its turn.

        Raises ConnectionAbortedError if too many wait that came later.
        """
        turn = self._loop.create_future()
        self._loop.add_reader(accepted, self._has_come, accepted, turn)
        try:
            await turn
        finally:
            self._loop.remove_reader(accepted)

    def _has_come(self, accepted: socket.socket, turn: asyncio.Future[None]) -> None:
        self._loop.remove_reader(accepted)
        self._waiting.append(turn)
        if len(self._waiting) > MAX_WAITING and not (oldest := self._waiting.pop(0)).done():
            oldest.set_exception(ConnectionAbortedError("too many TLS handshakes"))
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._is_due = False
        for _ in range(min(_MAX_AT_ONCE, len(self._waiting))):
            if not (turn := self._waiting.pop()).done():
                turn.set_result(None)
        self._schedule()
