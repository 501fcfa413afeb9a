"""The Unix socket between a worker and its messenger: whole messages, and a descriptor beside the first.

Owns: packets. Does not know: what they mean.
"""

import array
import asyncio
import select
import socket
from typing import Generic, TypeVar

import msgspec

from kvstore.messages import MAX_MESSAGE_BYTES
from mooncake.errors import PoolError

_BUFFER_BYTES = 1 << 22
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """One end of the connection. Messages arrive in the order of `send`."""

    def __init__(self, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[Incoming]") -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._sock = sock
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = asyncio.get_running_loop()
        self._send_lock = asyncio.Lock()
        self._writable = asyncio.Event()
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))

    async def send(self, message: msgspec.Struct, fd: int | None = None) -> None:
        """Raises PoolError if the message is too large, ConnectionError if the other side is gone."""
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise PoolError(
                f"a {type(message).__name__} message takes {len(data)} bytes,"
                f" the limit is {MAX_MESSAGE_BYTES}; name fewer blocks at once"
            )
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
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

    def peer_is_gone(self) -> bool:
        """Whether the other side has closed, even if that has not been received yet."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP | select.POLLHUP)
        return bool(poll.poll(0))

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
        if num_bytes == 0:
            return None
        try:
            return self._decoder.decode(self._buffer[:num_bytes])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            reason = str(error)[:200]  # it may quote the message
            raise PoolError(f"a message between worker and messenger cannot be read: {reason}") from error

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
