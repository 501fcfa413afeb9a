"""The Unix socket between a messenger and a worker or client.

The socket carries whole messages, and a descriptor beside the first message. `PacketConnection` is an asyncio
end of the socket, `ServerConnection` the messenger's end.

Owns: packets. Does not know: what their messages mean.
"""

import array
import asyncio
import logging
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from kvstore.protocol.answers import Detached
from kvstore.protocol.calls import MAX_MESSAGE_BYTES
from kvstore.protocol.frames import encode
from mooncake.errors import PoolError

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 22
"""Bytes requested for a socket's buffers: some ten of the largest messages."""
FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)
"""Bytes for the ancillary data of one descriptor."""
_PEERCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MOST_MESSAGES_AT_ONCE = 16
"""The most messages of one connection that are handled before other connections."""
_TRIES = 16
"""Attempts to receive the next call before sleeping, about a microsecond each."""
_Ancillary = tuple[int, int, Any]

Incoming = TypeVar("Incoming")


class PacketConnection(Generic[Incoming]):
    """One end of the socket, for use under asyncio.

    Each message is handled as soon as it arrives, without a task in between. `on_message` may raise
    PoolError, which ends the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: "msgspec.msgpack.Decoder[Incoming]",
        on_message: Callable[[Incoming], None],
    ) -> None:
        set_up(sock)
        sock.setblocking(False)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sock = sock
        self._decoder = decoder
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, list[_Ancillary]]] = deque()
        self._has_left = asyncio.Event()
        """Event that is set while nothing waits in `_outbox`, and when the connection has ended."""
        self._has_left.set()
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))
        self._loop.add_reader(sock, self._read)

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Send a message without waiting.

        Raises PoolError if the message is too large. After the connection's end the message is dropped.
        """
        packet = encode(message)
        if not self.ended.done():
            self._outbox.append((packet, _passing(fd)))
            if len(self._outbox) == 1:
                self._flush()

    async def has_sent(self) -> bool:
        """Wait until all messages have left. Returns False if the connection ended before."""
        await self._has_left.wait()
        return not self.ended.done()

    def close(self) -> None:
        """End the connection. Idempotent."""
        if not self.ended.done():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._outbox.clear()
            self._has_left.set()
            self._buffer = memoryview(b"")  # large, and a cycle through the session may keep this object
            self.ended.set_result(None)

    def _read(self) -> None:
        self._read_with(1)

    def _read_with(self, num_tries: int) -> None:
        for _ in range(_MOST_MESSAGES_AT_ONCE):
            try:
                num_bytes = receive_soon(self._sock, self._buffer, num_tries)
            except BlockingIOError:
                return
            except ConnectionError:
                num_bytes = 0
            if num_bytes == 0:
                self.close()
                return
            try:
                self._on_message(_decode(self._decoder, self._buffer[:num_bytes]))
            except PoolError as error:
                log.error("a connection is ended: %s", error)
                self._refuse(error)
                self.close()
            if self._outbox or self.ended.done():
                return

    def _refuse(self, error: PoolError) -> None:
        """Answer a message that no correct peer sends. The connection is closed next."""

    def _flush(self) -> None:
        while self._outbox:
            packet, ancillary = self._outbox[0]
            try:
                self._sock.sendmsg([packet], ancillary)
            except BlockingIOError:
                self._has_left.clear()
                self._wait_for_peer()
                return
            except OSError:
                self.close()
                return
            self._outbox.popleft()
        self._has_left.set()

    def _wait_for_peer(self) -> None:
        self._loop.add_writer(self._sock, self._resume)

    def _resume(self) -> None:
        self._loop.remove_writer(self._sock)
        self._flush()


class ServerConnection(PacketConnection[Incoming]):
    """The messenger's end of the socket. The other side is told why its connection is ended.

    After two messages in a row from one peer, the messenger polls that peer's socket for some microseconds:
    the peer probably sends its next call by then, and waking up would take longer. While a peer does not read
    its answers, its messages are not read either.
    """

    _spoke_last: "ClassVar[ServerConnection[Any] | None]" = None

    @property
    def peer_pid(self) -> int:
        """The process id of the other end; 0 when it cannot be seen from this namespace."""
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        return int(_PEERCRED.unpack(credentials)[0])

    def peer_is_gone(self) -> bool:
        """Return whether the other side has closed the connection, even if that has not been handled yet."""
        if self.ended.done():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP | select.POLLHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        if ServerConnection._spoke_last is self:
            ServerConnection._spoke_last = None
        super().close()

    def _read(self) -> None:
        num_tries = _TRIES if ServerConnection._spoke_last is self else 1
        ServerConnection._spoke_last = self
        self._read_with(num_tries)

    def _refuse(self, error: PoolError) -> None:
        self.send(Detached(str(error)))

    def _wait_for_peer(self) -> None:
        self._loop.remove_reader(self._sock)
        super()._wait_for_peer()

    def _resume(self) -> None:
        self._loop.add_reader(self._sock, self._read)
        super()._resume()


def receive_soon(sock: socket.socket, buffer: memoryview, num_tries: int) -> int:
    """Receive a packet within `num_tries` tries of about a microsecond, and return its length.

    Raises BlockingIOError if none arrives.
    """
    receive = sock.recv_into
    for _ in range(num_tries - 1):
        try:
            return receive(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()  # the sender may have been woken on this very core
    return receive(buffer, 0, socket.MSG_DONTWAIT)


def set_up(sock: socket.socket) -> None:
    """Set the sizes of a socket's buffers, so that they hold several messages."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def _passing(fd: int | None) -> list[_Ancillary]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []


def _decode(decoder: "msgspec.msgpack.Decoder[Incoming]", packet: memoryview) -> Incoming:
    try:
        return decoder.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)[:200]  # it may quote the message
        raise PoolError(f"a message between messenger and client cannot be read: {reason}") from error
