"""An HTTP server in a shared event loop, which accepts connections until it is closed.

Owns: accepting connections, TLS handshakes, the end of connections when the server ends. Does not know: HTTP
(`connection`), signals.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from functools import partial

from starlette.types import ASGIApp

from conductor.front.http.connection import Connection, Serving
from conductor.front.http.handshakes import HandshakeTurns
from conductor.front.http.sharing import ConnectionTable, UploadBudget
from conductor.front.http.timers import Timeouts
from mooncake.errors import ConfigError

HANDSHAKE_S = 60.0
"""Seconds from the acceptance of a connection to the end of its TLS handshake.

If too many connections wait at once, the oldest of them is closed earlier.
"""
_BACKLOG = 2048
_MAX_ACCEPTED_AT_ONCE = 8
"""The most connections that are accepted before other tasks of the event loop run."""
_RETRY_S = 0.1
"""Seconds until the next try if no connection can be accepted, mostly for lack of file descriptors."""
_LAST_ANSWERS_S = 1.0
"""Seconds in which cancelled requests are answered with an error when the server ends."""
log = logging.getLogger(__name__)


def listen(host: str, port: int, option: str | None = None) -> socket.socket:
    """Return a bound, listening socket; port 0 takes a free port. Raises ConfigError.

    `option` is the option that error messages name instead of --host and --port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host {host!r} cannot be resolved ({error}); choose another with {option or '--host'}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # two sockets can be bound to one port as long as neither listens
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {option or '--port'}"
            ) from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


class HttpServer:
    """An HTTP server that serves `app` on `listener`, a socket from `listen`. Needs a running event loop."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        timeouts: Timeouts,
        max_pending_bytes: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare the server. `max_pending_bytes` is the most bytes of all incomplete requests together."""
        self._listener, self._tls = listener, tls
        self._loop = asyncio.get_running_loop()
        self.connections = ConnectionTable(is_tls=tls is not None)
        uploads = UploadBudget[Connection](max_pending_bytes, Connection.make_room)
        self._serving = Serving(app, timeouts, self.connections, uploads, self._loop)
        self._handshakes: set[asyncio.Task[None]] = set()
        """The tasks of accepted connections whose TLS handshake has not ended."""
        self._turns = HandshakeTurns()
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to accept connections."""
        self._loop.add_reader(self._listener, self._accept)

    def keep_no_connections(self) -> None:
        """Close each connection after the answer to its next request, so that clients connect elsewhere."""
        self._serving.keeps_connections = False

    def close(self) -> None:
        """Stop accepting connections.

        Each open connection closes after the response to the request that is being answered; a connection
        without such a request closes at once.
        """
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self.keep_no_connections()
        for connection in list(self.connections.open):
            connection.shutdown()

    async def wait_closed(self) -> None:
        """Wait until all connections have ended, and all requests with them."""
        await self.connections.has_emptied.wait()
        await asyncio.gather(*self._serving.tasks, *self._handshakes, return_exceptions=True)

    async def abort(self) -> None:
        """Cancel all requests, and end all connections.

        Requests whose response has not started are answered with an error.
        """
        tasks = [*self._serving.tasks, *self._handshakes]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_ANSWERS_S)
        for connection in list(self.connections.open):
            connection.abort()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self.connections.make_room():
                    return  # the loop calls again
                log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_RETRY_S, self.start)
                return
            accepted.setblocking(False)
            connection = Connection(accepted, self._serving, "http" if self._tls is None else "https")
            task = self._loop.create_task(self._begin(accepted, connection))
            self._handshakes.add(task)
            task.add_done_callback(partial(self._has_begun, connection))

    async def _begin(self, accepted: socket.socket, connection: Connection) -> None:
        with contextlib.suppress(OSError):  # the client has gone, does not speak TLS, or takes too long
            async with asyncio.timeout(HANDSHAKE_S):
                if self._tls is not None:
                    await self._turns.turn(accepted)
                await self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._tls)

    def _has_begun(self, connection: Connection, task: asyncio.Task[None]) -> None:
        """Close the accepted socket if `task` has ended before it made a transport for the socket.

        In that case the task has failed, or was cancelled, perhaps before its first step.
        """
        self._handshakes.discard(task)
        connection.close_unless_made()
