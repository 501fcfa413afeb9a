"""Accepts the connections of a listener, in whichever event loop runs.

Loops have servers of their own, which accept in different ways: uvloop's does not ask the listening socket,
and does not say which connections shake hands for TLS.

Owns: the tasks that shake hands. Does not know: HTTP, how many connections there may be (`waiting`).
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from conductor.front.http.waiting import Listener

MOST_AT_ONCE = 64
"""connections that are accepted before others have their turn"""
HANDSHAKE_S = 60.0
"""for TLS; a listener with too many that shake hands ends the oldest"""
_RETRY_S = 0.1
"""when none can be accepted, for want of descriptors mostly"""
log = logging.getLogger(__name__)


class Accepting:
    """A server as uvicorn knows one, which accepts connections until it is closed. Needs a running loop."""

    def __init__(
        self, listener: Listener, protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        """connections of which HTTP has not been told yet"""
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more, and end connections that have not begun. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
        for task in self._beginning:
            task.cancel()

    async def wait_closed(self) -> None:
        """Until those have ended."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(
                    _RETRY_S, self._loop.add_reader, self._listener, self._accept
                )
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: socket.socket) -> None:
        descriptor, timeout_s = connection.fileno(), None if self._tls is None else HANDSHAKE_S
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # it has gone, does not speak TLS, or takes too long
            self._listener.failed(descriptor, connection)
