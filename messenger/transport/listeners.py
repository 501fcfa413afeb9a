"""Listening sockets of messengers and workers, and the acceptance of connections.

Owns: listening sockets. Does not know: messages.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator

from messenger.transport.pacing import begin_unpaced
from mooncake.endpoints import preferred
from mooncake.errors import ConfigError

log = logging.getLogger(__name__)

_BACKLOG = 128
"""Connections that may wait to be accepted."""
_ACCEPT_RETRY_S = 0.5
"""Seconds between a failure to accept, mostly for lack of descriptors, and the next attempt."""


async def accept(listener: socket.socket) -> socket.socket:
    """Return the next connection.

    Other tasks have a turn of the event loop first, so that many connections at once do not delay them. If
    the process has no descriptor for a connection, clients wait until one is free again.
    """
    while True:
        await asyncio.sleep(0)  # a waiting connection is accepted without a turn of the loop
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:
            log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_ACCEPT_RETRY_S)
        else:
            return sock


@contextlib.contextmanager
def listen_unix(path: str, kind: socket.SocketKind) -> Iterator[socket.socket]:
    """Make a context with a socket that listens at `path`, replacing a dead process's file.

    Only this user can connect. Raises ConfigError if the path is in use, or if no socket can be made there.
    """
    with socket.socket(socket.AF_UNIX, kind) as listener:
        try:
            _remove_stale(path, kind)
            listener.bind(path)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error}") from error
        try:
            os.chmod(path, 0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_stale(path: str, kind: socket.SocketKind) -> None:
    """Remove the socket file of a process that no longer listens. Raises ConfigError if a process listens."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        error_code = probe.connect_ex(path)
    if error_code == 0:
        raise ConfigError(f"somebody listens at {path} already; give each instance its own paths")
    if error_code == errno.ECONNREFUSED and stat.S_ISSOCK(os.stat(path).st_mode):
        os.unlink(path)


@contextlib.contextmanager
def listen_tcp(host: str, port: int) -> Iterator[socket.socket]:
    """Make a context with a socket that listens at `host`:`port`.

    Raises ConfigError if the address is in use, or is no address of this machine.
    """
    try:
        family, address = preferred(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except socket.gaierror as error:
        raise ConfigError(
            f"cannot listen at {host}: it has no address ({error.strerror}); name one"
        ) from error
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        begin_unpaced(listener)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener
