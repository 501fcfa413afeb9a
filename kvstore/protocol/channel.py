"""The Unix socket between a messenger and a worker or client: whole messages, and a descriptor beside the
first. `Connection` is the messenger's end, `Channel` the worker's.

Owns: packets. Does not know: what they mean.
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

_BUFFER_BYTES = 1 << 22
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)
_PEERCRED = struct.Struct("3i")
_MOST_MESSAGES_AT_ONCE = 16
_RETRY_S = 0.02
_TRIES = 16
"""to receive the next call before sleeping"""
_Ancillary = tuple[int, int, Any]

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """One end of the connection. Messages arrive in the order of `send`."""

    def __init__(self, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[Incoming]") -> None:
        _set_up(sock)
        self._sock = sock
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._send_lock = asyncio.Lock()
        self._writable = asyncio.Event()
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))

    @classmethod
    async def connect(
        cls, socket_path: str, decoder: "msgspec.msgpack.Decoder[Incoming]"
    ) -> "Channel[Incoming]":
        """To who listens at `socket_path`, as soon as somebody does."""
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, socket_path)
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                await asyncio.sleep(_RETRY_S)
            except BaseException:
                sock.close()
                raise
            else:
                return cls(sock, decoder)

    async def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Raises PoolError if the message is too large, ConnectionError if the other side is gone."""
        data, ancillary = encode(message), _passing(fd)
        async with self._send_lock:
            while self._is_open:
                try:
                    self._sock.sendmsg([data], ancillary)
                except BlockingIOError:
                    await self._until_writable()
                else:
                    return
        raise ConnectionResetError("closed before a message was sent")

    async def receive(self) -> Incoming | None:
        """The next message, or None when the other side is gone. Raises PoolError for what is none."""
        try:
            num_bytes = await self._loop.sock_recv_into(self._sock, self._buffer)
        except ConnectionError:
            return None
        return self._decode(num_bytes)

    async def receive_with_fd(self) -> tuple[Incoming | None, int | None]:
        """Like `receive`, and the descriptor that came along, now the caller's."""
        while True:
            try:
                num_bytes, ancillary, _flags, _ = self._sock.recvmsg_into([self._buffer], _FD_SPACE)
            except BlockingIOError:
                await self._until_readable()
                continue
            except ConnectionError:
                return None, None
            fd = next((array.array("i", data)[0] for _level, _kind, data in ancillary), None)
            return self._decode(num_bytes), fd

    def close(self) -> None:
        """Idempotent. The receiver must have been cancelled; waiting senders get ConnectionError."""
        if self._is_open:
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._writable.set()

    @property
    def _is_open(self) -> bool:
        return self._sock.fileno() >= 0

    def _decode(self, num_bytes: int) -> Incoming | None:
        return _decode(self._decoder, self._buffer[:num_bytes]) if num_bytes else None

    async def _until_writable(self) -> None:
        self._writable.clear()
        self._loop.add_writer(self._sock, self._writable.set)
        try:
            await self._writable.wait()
        finally:
            if self._is_open:
                self._loop.remove_writer(self._sock)
        if not self._is_open:
            raise ConnectionResetError("closed while a message waited to be sent")

    async def _until_readable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(self._sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(self._sock)


class Connection(Generic[Incoming]):
    """The messenger's end: every message is handled as soon as it is there, without a task in between.

    Who speaks twice in a row is listened to for some microseconds more: he has probably the next call ready
    by then, and waking up would take longer.

    `on_message` may raise PoolError, which ends the connection; the other side is told why. A peer that
    does not read its answers is not read from either.
    """

    _spoke_last: "ClassVar[Connection[Any] | None]" = None

    def __init__(
        self,
        sock: socket.socket,
        decoder: "msgspec.msgpack.Decoder[Incoming]",
        on_message: Callable[[Incoming], None],
    ) -> None:
        _set_up(sock)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sock = sock
        self._decoder = decoder
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, list[_Ancillary]]] = deque()
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))
        self._loop.add_reader(sock, self._read)

    @property
    def peer_pid(self) -> int:
        """The process at the other end; 0 when it cannot be seen from here."""
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        return int(_PEERCRED.unpack(credentials)[0])

    def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Never waits. Raises PoolError if the message is too large; what can be sent no more is dropped."""
        packet = encode(message)
        if not self.ended.done():
            self._outbox.append((packet, _passing(fd)))
            if len(self._outbox) == 1:
                self._flush()

    def close(self) -> None:
        """Idempotent."""
        if not self.ended.done():
            if Connection._spoke_last is self:
                Connection._spoke_last = None
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._outbox.clear()
            self._buffer = memoryview(b"")  # large, and a cycle through the session may keep this object
            self.ended.set_result(None)

    def peer_is_gone(self) -> bool:
        """Whether the other side has closed, even if that has not been received yet."""
        return self.ended.done() or _has_hung_up(self._sock)

    def _read(self) -> None:
        num_tries = _TRIES if Connection._spoke_last is self else 1
        Connection._spoke_last = self
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
                self.send(Detached(str(error)))
                self.close()
            if self._outbox or self.ended.done():
                return

    def _flush(self) -> None:
        while self._outbox:
            packet, ancillary = self._outbox[0]
            try:
                self._sock.sendmsg([packet], ancillary)
            except BlockingIOError:
                self._loop.remove_reader(self._sock)
                self._loop.add_writer(self._sock, self._resume)
                return
            except OSError:
                self.close()
                return
            self._outbox.popleft()

    def _resume(self) -> None:
        self._loop.remove_writer(self._sock)
        self._loop.add_reader(self._sock, self._read)
        self._flush()


def receive_soon(sock: socket.socket, buffer: memoryview, num_tries: int) -> int:
    """A packet that is there, or comes within about a microsecond a try; else BlockingIOError."""
    receive = sock.recv_into
    for _ in range(num_tries - 1):
        try:
            return receive(buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()  # whoever is to send it may have been woken on this very core
    return receive(buffer, 0, socket.MSG_DONTWAIT)


def _set_up(sock: socket.socket) -> None:
    sock.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _passing(fd: int | None) -> list[_Ancillary]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []


def _decode(decoder: "msgspec.msgpack.Decoder[Incoming]", packet: memoryview) -> Incoming:
    try:
        return decoder.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error)[:200]  # it may quote the message
        raise PoolError(f"a message between messenger and client cannot be read: {reason}") from error


def _has_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP | select.POLLHUP)
    return bool(poll.poll(0))
