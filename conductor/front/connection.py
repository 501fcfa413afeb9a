"""HTTP/1.1 as uvicorn speaks it, to clients that must get their requests across in time.

Owns: that deadline, from the connection or a request's first byte to its last. Does not know: requests.
Without it a client that sends a byte now and then would keep a connection, and what it has sent, forever.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def connections(request_timeout_s: float) -> type[H11Protocol]:
    """What uvicorn calls for each connection."""

    class Connection(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(request_timeout_s, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._unset_deadline()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(request_timeout_s, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._unset_deadline()
            super().connection_lost(exc)

        def _unset_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Connection
