"""A worker's calls to its messenger and their answers. Several tasks may have calls in flight at a time.

Owns: the connection, calls in flight, whether the messenger is there. Does not know: the meaning of calls.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvstore.pool.segment import Segment
from kvstore.protocol.answers import Answer, Attached, CallFailed, Detached, FromPool, LayersFetched
from kvstore.protocol.calls import MAX_MESSAGE_BYTES, Attach, Call, Notice, PinBlocks, Waiting
from kvstore.protocol.frames import encode
from kvstore.protocol.packets import PacketConnection
from mooncake.errors import PoolError

_DECODER = msgspec.msgpack.Decoder(FromPool)
_ADVICE = "this worker and its messenger's pool must agree"
_ANSWER_TIMEOUT_S = 10.0
"""Seconds within which a messenger must answer a call.

Calls that wait for something else, such as free pages, have no limit.
"""
_RETRY_S = 0.02
"""Seconds between two attempts to connect to a messenger that does not listen yet."""
Expected = TypeVar("Expected", bound=Answer)


class WorkerCalls:
    """A worker's connection to its messenger.

    `send` and `ask` raise PoolError if the messenger is gone, or does not take the message within
    `_ANSWER_TIMEOUT_S` seconds. `ask` also raises PoolError if the messenger does not answer in that time.
    Answers to calls that wait for something else, such as free pages, have no time limit.
    """

    def __init__(self, sock: socket.socket, instance: str) -> None:
        self.closed = asyncio.Event()
        """Event that is set when the messenger is gone or has ended the session."""
        self._instance = instance
        self._gone_reason = f"messenger of {instance} gone"
        self._ids = itertools.count(1)
        self._in_flight: dict[int, asyncio.Future[Answer]] = {}
        """Futures of the answers to calls in flight, by call id."""
        self._on_layers: dict[int, Callable[[int, int], None]] = {}
        """Callbacks of fetches in flight, by call id."""
        self._connection = PacketConnection(sock, _DECODER, self._take)
        self._connection.ended.add_done_callback(lambda _: self._end())

    @classmethod
    async def attach(cls, socket_path: str, attach: Attach) -> tuple["WorkerCalls", Attached, Segment]:
        """Wait until the messenger at `socket_path` listens, and attach to it.

        Returns the connection, the messenger's first answer, and the mapped segment. Raises ConnectionError
        if the messenger ends before it answers, or the error with which the messenger refuses the worker.
        """
        sock = await _connected(socket_path)
        try:
            await asyncio.get_running_loop().sock_sendall(sock, encode(attach))
            packet, fds = await _first_packet(sock)
            try:
                answer = _DECODER.decode(packet)
                if isinstance(answer, CallFailed):
                    raise answer.error(_ADVICE)
                if not isinstance(answer, Attached) or not fds:
                    raise ConnectionResetError(f"it answered what it should not: {type(answer).__name__}")
                segment = Segment.open(fds[0])
                assert segment is not None, "a messenger formats before it answers"
            finally:
                for fd in fds:
                    os.close(fd)  # the mapping stays
        except BaseException:
            sock.close()
            raise
        return cls(sock, attach.instance), answer, segment

    def new_id(self) -> int:
        """Return a number for the next call."""
        return next(self._ids)

    async def send(self, message: Call | Notice) -> None:
        """Send a message, and return when the message has left the process."""
        if self.closed.is_set():
            raise PoolError(self._gone_reason)
        self._connection.send(message)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                has_left = await self._connection.has_sent()
        except TimeoutError:
            raise self._stalled() from None
        if not has_left:
            raise PoolError(self._gone_reason)

    async def ask(
        self, call: Call, expected: type[Expected], on_layers: Callable[[int, int], None] | None = None
    ) -> Expected:
        """Return the answer to `call`, which must be of type `expected`.

        Raises the error with which the messenger answers. `on_layers` is called with the progress of a fetch
        (see `WorkerClient.fetch`).
        """
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._in_flight[call.call_id] = answered
        if on_layers is not None:
            self._on_layers[call.call_id] = on_layers
        try:
            await self.send(call)
            waits = isinstance(call, Waiting | PinBlocks)  # what is pinned comes from disk first
            async with asyncio.timeout(None if waits else _ANSWER_TIMEOUT_S):
                answer = await answered
        except TimeoutError:
            raise self._stalled() from None
        finally:
            del self._in_flight[call.call_id]
            self._on_layers.pop(call.call_id, None)
        if isinstance(answer, CallFailed):
            raise answer.error(_ADVICE)
        if not isinstance(answer, expected):
            raise self._lost(f"messenger of {self._instance} answered {type(call).__name__} with {answer}")
        return answer

    def close(self) -> None:
        """Close the connection. Tasks that wait for an answer get a PoolError."""
        self._lost(f"client of {self._instance} closed")

    def _take(self, message: FromPool) -> None:
        match message:
            case Detached(reason):
                self._lost(f"messenger of {self._instance} ended the session: {reason}")
            case LayersFetched(call_id, num_blocks, num_layers):
                if call_id in self._on_layers:
                    self._on_layers[call_id](num_blocks, num_layers)
            case _:
                answered = self._in_flight.get(message.call_id)
                if answered is not None and not answered.done():  # else its caller was cancelled
                    answered.set_result(message)

    def _stalled(self) -> PoolError:
        """End the connection to a messenger that does not answer, and return the error.

        The messenger then releases everything of this worker.
        """
        return self._lost(f"messenger of {self._instance} did not answer within {_ANSWER_TIMEOUT_S:g} s")

    def _lost(self, reason: str) -> PoolError:
        """End the connection unless it has ended, and return the error that says why it ended."""
        if not self.closed.is_set():
            self._gone_reason = reason
            self._end()
        return PoolError(self._gone_reason)

    def _end(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._connection.close()
        for answered in self._in_flight.values():
            if not answered.done():
                answered.set_exception(PoolError(self._gone_reason))
                answered.exception()  # counts as retrieved, if the caller is gone


async def _connected(socket_path: str) -> socket.socket:
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
            return sock


async def _first_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the first packet and its descriptors. Raises ConnectionError if none arrives."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    packet, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
    if not packet:
        raise ConnectionResetError("it has closed the connection")
    return packet, fds
