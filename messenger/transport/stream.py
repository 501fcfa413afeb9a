"""A non-blocking stream socket that moves bytes between the kernel and lists of buffers.

asyncio's own streams copy, but a page must be received in place. Descriptors that arrive beside the bytes of
a Unix socket are kept until they are taken. Other tasks have their turn even while bytes arrive and leave all
the time.

Owns: one connected socket. Does not know: frames.
"""

import array
import asyncio
import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from messenger.transport import pacing
from messenger.transport.readiness import Readiness
from messenger.transport.tls import TlsSocket

MAX_BUFFERS = 1024
"""The most buffers of one system call, IOV_MAX of Linux."""
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
TURN_BYTES = 2 << 20
"""Bytes that are moved before other tasks run: half a millisecond over loopback."""
_LEAST_BYTES = 16 * 1024
"""The least number of bytes that a system call counts for in a turn.

Small pieces take processor time too.
"""
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _NUM_KEEPALIVES = 2, 1, 3
"""Seconds of silence before TCP probes, seconds between probes, and the number of probes.

A vanished host is given up after the last probe.
"""
_UNACKNOWLEDGED_MS = 1000 * _KEEPALIVE_INTERVAL_S * _NUM_KEEPALIVES
"""Milliseconds without an acknowledgement by the peer's kernel after which the connection is lost."""
_GLANCE_BYTES = 8 * 1024
"""The most bytes that are received beyond a frame's head. Payload among them is copied twice."""
AHEAD_BYTES = 64 * 1024 + _GLANCE_BYTES
"""Bytes of the receive buffer, from which a frame of many small blocks is taken."""
_LARGE_BYTES = 64 * 1024
"""Bytes of a payload whose copy into the kernel takes about as long as reading the frame's head."""

Result = TypeVar("Result")


class Stream:
    """A connected socket. `receive_into` and `send` move all bytes or raise OSError.

    Each direction has one user. Received bytes go either into the stream's own buffer (`ahead`), from which
    callers take them, or straight into the caller's buffers. After a cancelled call it is unknown how many
    bytes were moved, so the stream can only be closed.
    """

    def __init__(self, sock: "socket.socket | TlsSocket") -> None:
        """Take ownership of `sock`. `shake_hands` comes before anything else."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
            pacing.choose_by_peer(sock)
        self._sock = sock
        self._fileno = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._ancillary_bytes = _FD_SPACE if sock.family == socket.AF_UNIX else 0
        self._fd: int | None = None
        self._buffer = _new_buffer(AHEAD_BYTES)
        self._begin = self._end = 0
        """Range of received bytes in the buffer."""
        self.wanted_bytes = 1
        """The number of bytes of `ahead` for which the buffer will have room."""
        self._readable = Readiness(sock, self._loop.add_reader, self._loop.remove_reader, self._had_turns)
        self._writable = Readiness(sock, self._loop.add_writer, self._loop.remove_writer, self._had_turns)
        self._num_moved = 0
        """Bytes moved since other tasks had their turn."""
        self.num_received_bytes = 0
        """Bytes received over the socket since the beginning."""

    async def shake_hands(self) -> None:
        """Complete the TLS handshake, if there is TLS. Raises OSError."""
        if isinstance(self._sock, TlsSocket):
            try:
                self._sock.do_handshake()
            except BlockingIOError:
                await self._readable.first(self._sock.do_handshake)

    def close(self) -> None:
        """Close the socket. Waiting calls get a ConnectionError."""
        for readiness in (self._readable, self._writable):
            readiness.end()
        self._sock.close()
        self._fileno = -1
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def shut_down(self) -> None:
        """End both directions: waiting calls of `receive_into` and `send` get an OSError."""
        with contextlib.suppress(OSError):  # already disconnected
            self._sock.shutdown(socket.SHUT_RDWR)

    @property
    def fileno(self) -> int:
        """The descriptor of the socket; negative once it is closed."""
        return self._fileno

    @property
    def peer_pid(self) -> int:
        """The process id of the Unix socket's other end; 0 if it cannot be seen from this namespace."""
        assert isinstance(self._sock, socket.socket)
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(credentials)[0]
        return pid

    def take_fd(self) -> int | None:
        """Return the received descriptor, which the caller then owns; None if no descriptor was received."""
        fd, self._fd = self._fd, None
        return fd

    def moved(self, num_bytes: int) -> None:
        """Count work towards the end of this connection's turn.

        `num_bytes`: the work, expressed as the number of bytes that a socket would move in the same time.
        """
        self._num_moved += num_bytes if num_bytes > _LEAST_BYTES else _LEAST_BYTES

    @property
    def is_turn_over(self) -> bool:
        """Whether other tasks should run now."""
        return self._num_moved >= TURN_BYTES

    async def take_turns(self) -> None:
        """Let other tasks run if this connection's turn is over."""
        if self._num_moved >= TURN_BYTES:
            await asyncio.sleep(0)
            self._had_turns()

    def _had_turns(self) -> None:
        self._num_moved = 0

    # -- in ---------------------------------------------------------------------------------------

    @property
    def ahead(self) -> memoryview:
        """The bytes that have been received and not taken."""
        return self._buffer[self._begin : self._end]

    @property
    def num_ahead(self) -> int:
        """The number of bytes in `ahead`."""
        return self._end - self._begin

    def take(self, num_bytes: int) -> None:
        """Drop the first `num_bytes` bytes of `ahead`, which the caller has used."""
        self._begin += num_bytes
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > AHEAD_BYTES:
                self._buffer = _new_buffer(AHEAD_BYTES)

    def take_into(self, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` in order from `ahead`. Returns the number of bytes taken."""
        begin = self._begin
        for buffer in buffers:
            piece = self._buffer[self._begin : min(self._begin + len(buffer), self._end)]
            buffer[: len(piece)] = piece
            self._begin += len(piece)
        num_bytes = self._begin - begin
        self.take(0)
        return num_bytes

    async def more(self, is_enough: Callable[[], bool]) -> None:
        """Wait until bytes have arrived in `ahead` and `is_enough` returns True. Raises OSError.

        `is_enough` is called whenever bytes have arrived, and may take some of them. So small frames are
        handled immediately, without waking the waiting task. With TLS the call also returns when this
        connection's turn is over: no event tells of bytes that are decrypted already.
        """

        def attempt() -> None:
            self._receive_ahead()
            while not is_enough():
                if self.is_plain:
                    raise BlockingIOError
                if self.is_turn_over:
                    return
                self._receive_ahead()

        await self._first(self._readable, attempt)

    def has_ahead(self, num_bytes: int) -> bool:
        """Return whether `ahead` has `num_bytes` bytes, after receiving missing bytes without waiting.

        Returns False, and receives nothing, if the buffer has no room for so many bytes. Raises OSError.
        """
        if num_bytes > AHEAD_BYTES:
            return False
        self.wanted_bytes = num_bytes
        with contextlib.suppress(BlockingIOError):
            while self.num_ahead < num_bytes:
                self._receive_ahead()
        return self.num_ahead >= num_bytes

    async def _first(self, readiness: Readiness, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` until it raises no BlockingIOError, and return its result.

        If this connection's turn is over, other tasks run before.
        """
        if self.is_turn_over and not self.is_plain:  # no event tells of bytes that are decrypted already
            await self.take_turns()
        if not self.is_turn_over:
            with contextlib.suppress(BlockingIOError):
                return attempt()
        return await readiness.first(attempt)

    def _receive_ahead(self) -> None:
        missing_bytes = self._begin + self.wanted_bytes - len(self._buffer)
        if missing_bytes > 0 or self._end == len(self._buffer):
            held = self._end - self._begin
            buffer = self._buffer
            if max(self.wanted_bytes, held + 1) > len(buffer):
                buffer = _new_buffer(max(self.wanted_bytes, held + 1))
            buffer[:held] = self._buffer[self._begin : self._end]
            self._buffer, self._begin, self._end = buffer, 0, held
        end = max(self._begin + self.wanted_bytes, self._end + _GLANCE_BYTES)
        self._end += self._receive_now([self._buffer[self._end : end]])

    def receive_now(self, buffers: Sequence[memoryview]) -> int:
        """Receive at least one byte into `buffers`, in order, and return the number of bytes.

        Raises BlockingIOError if no byte is there yet, or another OSError.
        """
        return self.take_into(buffers) if self.num_ahead else self._receive_now(_piece(buffers))

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """Receive at least one byte into `buffers`, in order, and return the number of bytes.

        Waits if no byte is there. Raises OSError.
        """
        if self.num_ahead:
            return self.take_into(buffers)
        return await self._first(self._readable, lambda: self.receive_now(buffers))

    @property
    def is_plain(self) -> bool:
        """Whether the socket receives the bytes as they were sent, without TLS."""
        return not isinstance(self._sock, TlsSocket)

    async def receive_with(self, receive: Callable[[], Result]) -> Result:
        """Call `receive` until it raises no BlockingIOError, and return its result."""
        return await self._first(self._readable, receive)

    def received(self, num_bytes: int) -> None:
        """Count bytes that the caller has received from the descriptor `fileno` directly.

        Callers outside this class receive them only while the buffer `ahead` is empty.
        """
        self.num_received_bytes += num_bytes
        self.moved(num_bytes)

    async def receive_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill all `buffers`. Raises OSError if the connection ends before."""
        rest = list(buffers)
        while rest:
            rest = without(rest, await self.receive_some(rest))

    def _receive_now(self, buffers: Sequence[memoryview]) -> int:
        """Receive from the socket, and return the number of bytes.

        Raises BlockingIOError if nothing is there yet.
        """
        num_bytes, ancillary, _flags, _peer = self._sock.recvmsg_into(buffers, self._ancillary_bytes)
        for _level, _kind, data in ancillary:
            self._keep_fds(data)
        if num_bytes == 0:
            raise ConnectionResetError("connection closed by the peer")
        self.received(num_bytes)
        return num_bytes

    def _keep_fds(self, data: bytes) -> None:
        fds = array.array("i")
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        for fd in fds:
            if self._fd is None:
                self._fd = fd
            else:
                os.close(fd)

    # -- out --------------------------------------------------------------------------------------

    async def send(self, buffers: Sequence[bytes | memoryview], fd: int | None = None) -> None:
        """Send all of `buffers`. The descriptor `fd` travels beside their first byte. Raises OSError."""
        rest = [memoryview(buffer) for buffer in buffers]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        while rest:
            pieces = _piece(rest)
            num_bytes = await self._first(self._writable, lambda: self._sock.sendmsg(pieces, ancillary))  # noqa: B023
            self.moved(num_bytes)
            ancillary = []
            rest = without(rest, num_bytes)

    def send_now(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """Send as much of `buffers` as the kernel takes at once, and return the unsent buffers."""
        rest = buffers
        while rest:
            try:
                num_bytes = self._sock.sendmsg(_piece(rest))
            except BlockingIOError:
                break
            self.moved(num_bytes)
            rest = without(rest, num_bytes)
        return rest


def _new_buffer(num_bytes: int) -> memoryview:
    """Return a buffer outside the heap.

    Inside, buffers would fragment the heap when many connections come and go.
    """
    return memoryview(mmap.mmap(-1, num_bytes))


def _piece(buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return the buffers for one system call. They have so few bytes that other tasks run soon.

    Frames before a large payload leave separately, so that the other end reads them while the payload is
    copied.
    """
    if len(buffers[0]) > TURN_BYTES:
        return [buffers[0][:TURN_BYTES]]
    few = buffers[:MAX_BUFFERS]
    large = next((i for i, buffer in enumerate(few) if len(buffer) >= _LARGE_BYTES), 0)
    return few[:large] if large else few


def without(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the rest of `buffers` after their first `num_bytes` bytes."""
    for position, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[position + 1 :]]
        num_bytes -= len(buffer)
    return []
