"""A non-blocking stream socket that moves bytes between the kernel and lists of buffers.

asyncio's own streams copy; a page must be received in place. Descriptors that arrive beside the bytes
of a Unix socket are kept until taken.

Owns: one connected socket. Does not know: frames.
"""

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

_MAX_BUFFERS = 1024  # IOV_MAX of Linux
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


class Stream:
    """`receive_into` and `send` move everything or raise ConnectionError. One user per direction."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanished sends no reset: ask an idle one after 10 s, give up after 15 s more.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._ancillary_bytes = _FD_SPACE if sock.family == socket.AF_UNIX else 0
        self._fd: int | None = None

    def close(self) -> None:
        self._sock.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def shut_down(self) -> None:
        """Ends both directions: whoever waits in `receive_into` or `send` gets a ConnectionError."""
        with contextlib.suppress(OSError):  # already disconnected
            self._sock.shutdown(socket.SHUT_RDWR)

    def take_fd(self) -> int | None:
        """The descriptor that came along, if any; now the caller's."""
        fd, self._fd = self._fd, None
        return fd

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """At least one byte into `buffers`, in order."""
        while True:
            try:
                num_bytes, ancillary, _flags, _peer = self._sock.recvmsg_into(
                    buffers[:_MAX_BUFFERS], self._ancillary_bytes
                )
            except BlockingIOError:
                await self._until(self._loop.add_reader, self._loop.remove_reader)
                continue
            for _level, _kind, data in ancillary:
                self._keep_fds(data)
            if num_bytes == 0:
                raise ConnectionResetError("connection closed by the peer")
            return num_bytes

    async def receive_into(self, buffers: Sequence[memoryview]) -> None:
        """Fills all `buffers`."""
        rest = list(buffers)
        while rest:
            rest = _without(rest, await self.receive_some(rest))

    async def send(self, buffers: Sequence[bytes | memoryview], fd: int | None = None) -> None:
        """All of `buffers`; `fd` travels beside their first byte."""
        rest = [memoryview(buffer) for buffer in buffers]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        while rest:
            try:
                num_bytes = self._sock.sendmsg(rest[:_MAX_BUFFERS], ancillary)
            except BlockingIOError:
                await self._until(self._loop.add_writer, self._loop.remove_writer)
                continue
            ancillary = []
            rest = _without(rest, num_bytes)

    async def _until(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        fd = self._sock.fileno()
        if fd < 0:
            raise ConnectionResetError("connection closed")
        add(fd, _resolve, ready)
        try:
            await ready
        finally:
            remove(fd)

    def _keep_fds(self, data: bytes) -> None:
        fds = array.array("i")
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        for fd in fds:
            if self._fd is None:
                self._fd = fd
            else:
                os.close(fd)


def _resolve(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _without(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What remains of `buffers` after their first `num_bytes`."""
    for position, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[position + 1 :]]
        num_bytes -= len(buffer)
    return []
