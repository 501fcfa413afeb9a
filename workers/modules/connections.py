"""Connections between owners of modules and helpers on other hosts: TCP, each message behind its length.

Both ends first prove that they know the cluster key. An unauthenticated peer can send some hundred bytes, and
has a short time for them.

Owns: the connections until their first message. Does not know: what is asked of a helper.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from messenger.transport.listeners import accept
from mooncake.endpoints import preferred
from mooncake.errors import TransferError
from mooncake.security.greeting import MODULES, Challenge, Greeting, GreetingClient, GreetingServer, Proof
from mooncake.security.keys import ClusterKey
from mooncake.security.waiting_peers import WaitingPeers
from workers.errors import ModulesStayError
from workers.modules.link_messages import LONGEST_MESSAGE_BYTES

_SCHEME = "tcp://"
_LENGTH = struct.Struct("<I")
_LONGEST_GREETING_BYTES = 256
"""The most bytes of a message of the greeting."""
_MOST_UNAUTHENTICATED = 64
"""The most unauthenticated connections at a listener; a further one ends the oldest."""
_CONNECT_TIMEOUT_S = 5.0
"""Seconds within which an owner must reach a helper, and both must have proved that they know the key."""
_GREETING_TIMEOUT_S = 5.0
"""Seconds in which a peer must have proved that it knows the key, and sent its first message."""
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options with which a host that has vanished is given up after five seconds of silence."""
log = logging.getLogger(__name__)
Message = TypeVar("Message", bound=msgspec.Struct)
Serve = Callable[[socket.socket, bytes], Awaitable[None]]
"""A callback that serves an authenticated connection from its first message on, until it is to be closed."""


def is_remote(address: str) -> bool:
    """Return whether an address is one of TCP, and not the path of a Unix socket."""
    return address.startswith(_SCHEME)


async def connect(address: str, key: ClusterKey) -> socket.socket:
    """Return a connection to a helper, after both sides have proved that they know the key.

    Raises ModulesStayError for a peer with another key, TransferError if that takes longer than
    `_CONNECT_TIMEOUT_S`, and OSError.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            return await _connect(address, key)
    except TimeoutError:
        raise TransferError(
            f"no connection within {_CONNECT_TIMEOUT_S:g} s; check that the host is up, and that firewalls"
            " let this host through"
        ) from None


async def _connect(address: str, key: ClusterKey) -> socket.socket:
    """Do what `connect` does, without its limit of time."""
    host, _, port = address.removeprefix(_SCHEME).rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, number = preferred(found)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await loop.sock_connect(sock, (number, int(port)))
        _set_options(sock)
        client = GreetingClient(key, MODULES)
        await send(sock, client.greeting)
        proof = client.answer(_decoded(await receive(sock, _LONGEST_GREETING_BYTES), Challenge))
        if proof is None:
            raise ModulesStayError("it has another cluster key; give all nodes the same key file")
        await send(sock, proof)
    except BaseException:
        sock.close()
        raise
    return sock


async def send(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises OSError."""
    payload = msgspec.msgpack.encode(message)
    await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(payload)) + payload)


async def receive(sock: socket.socket, most_bytes: int = LONGEST_MESSAGE_BYTES) -> bytes:
    """Return the next message, of at most `most_bytes`; empty if the connection has ended.

    Raises TransferError for a longer message, and OSError.
    """
    head = await _receive(sock, _LENGTH.size)
    if not head:
        return b""
    (num_bytes,) = _LENGTH.unpack(head)
    if num_bytes > most_bytes:
        raise TransferError(f"a message of {num_bytes} bytes; at most {most_bytes} were expected")
    return await _receive(sock, num_bytes)


async def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < num_bytes:
        part = await loop.sock_recv(sock, num_bytes - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


class Owners:
    """The owners on other hosts that connect to `listener`, while `run` runs."""

    def __init__(self, listener: socket.socket, key: ClusterKey) -> None:
        self._listener, self._key = listener, key
        self._unauthenticated = WaitingPeers[socket.socket](_MOST_UNAUTHENTICATED, shut_down)

    async def run(self, serve: Serve) -> None:
        """Admit peers, and serve each authenticated one, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._admit(await accept(self._listener), serve))

    async def _admit(self, sock: socket.socket, serve: Serve) -> None:
        with sock:
            self._unauthenticated.enter(sock)
            try:
                async with asyncio.timeout(_GREETING_TIMEOUT_S):
                    _set_options(sock)
                    await self._authenticate(sock)
                    self._unauthenticated.leave(sock)
                    first = await receive(sock)
            except (OSError, TransferError, TimeoutError) as error:
                log.info("a connection for modules is refused: %s", error or type(error).__name__)
                return
            finally:
                self._unauthenticated.leave(sock)
            with contextlib.suppress(OSError):  # the peer has gone; other connections stay
                await serve(sock, first)

    async def _authenticate(self, sock: socket.socket) -> None:
        greeting = _decoded(await receive(sock, _LONGEST_GREETING_BYTES), Greeting)
        server = GreetingServer(self._key, MODULES, greeting)
        await send(sock, server.challenge)
        if not server.admits(_decoded(await receive(sock, _LONGEST_GREETING_BYTES), Proof)):
            raise TransferError("it has another cluster key")


def _decoded(payload: bytes, kind: type[Message]) -> Message:
    """Return a message of the greeting. Raises TransferError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError(f"a {kind.__name__} was expected: {error}") from None


def _set_options(sock: socket.socket) -> None:
    for option in _OPTIONS:
        sock.setsockopt(*option)


def shut_down(sock: socket.socket) -> None:
    """End a connection in both directions. Whoever reads from it learns of the end. Idempotent."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
