"""Typed messages over ZeroMQ: one socket class for each end.

`Router` binds and talks to many peers by identity; `Dealer` connects to one `Router`. A peer's identity is
`instance#incarnation`, so a restarted process is a new peer: a message to its earlier incarnation fails, and
does not reach the new one.

Both sides hold the cluster's key; messages are encrypted, and an unauthenticated peer is disconnected
(`mooncake.security.curve`).

The event loop watches the socket's own descriptor: `zmq.asyncio` spends several times as much processor
time on a message.

Owns: sockets, encoding, peer identities. Does not know: what the messages mean.
"""

import asyncio
import logging
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from mooncake.endpoints import connect, listen
from mooncake.errors import ConfigError, TransferError
from mooncake.security.curve import LARGEST_FRAME_BYTES, ConnectionWatch, Gate, use_key
from mooncake.security.keys import ClusterKey

Incoming = TypeVar("Incoming")
_encode = msgspec.msgpack.Encoder().encode
LOGGED_CHARS = 200
LARGEST_MESSAGE_BYTES = 16 << 20
"""Bytes of the largest message that a `Router` takes. A prompt of 2M tokens has 10 MiB."""
QUEUE_LEN = 10_000
"""The most messages that wait for a peer. Decode iterations send fewer messages in a minute."""
MAX_IN_A_ROW = 16
"""Messages received in a row before other tasks of the event loop run."""
log = logging.getLogger(__name__)

# pyzmq's flags are enumerations: to combine two of them takes as long as to send a message.
_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_MORE_NOBLOCK = int(zmq.SNDMORE) | _NOBLOCK


class PeerGoneError(TransferError):
    """A message cannot be sent: its peer is not connected or does not read, or the message is too long."""


def peer_identity(instance: str, incarnation: int) -> bytes:
    """Return the socket identity of one incarnation of an instance."""
    return f"{instance}#{incarnation}".encode()


class _Socket(Generic[Incoming]):
    """A ZeroMQ socket that receives in the running event loop."""

    def __init__(self, socket: zmq.Socket[bytes], incoming: Any) -> None:
        self._socket = socket
        self._socket.set_hwm(QUEUE_LEN)
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._num_in_a_row = 0
        self._arrival: asyncio.Future[None] | None = None
        """The future for which the receiving task waits; None before the first wait.

        The future is done when a message arrives.
        """
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._on_signal)

    def fileno(self) -> int:
        """Return ZeroMQ's descriptor, which is edge-triggered.

        After each signal, read until no message is left.
        """
        return self._descriptor

    async def _frames(self) -> list[bytes]:
        """Return the frames of the next message.

        Suspends only if no message is there, or after `MAX_IN_A_ROW` messages in a row.
        """
        self._num_in_a_row += 1
        if self._num_in_a_row > MAX_IN_A_ROW:
            self._num_in_a_row = 0
            await asyncio.sleep(0)
        while not self._has_message():
            self._num_in_a_row = 0
            self._arrival = self._loop.create_future()
            await self._arrival
        return self._socket.recv_multipart(_NOBLOCK)

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _on_signal(self) -> None:
        if self._is_awaited():
            self._wake()  # the receiver looks for messages itself
        else:
            self._socket.getsockopt(zmq.EVENTS)  # must be read, else the descriptor stays readable

    def _look(self) -> None:
        """Wake the receiver if a message is there.

        The look is needed because libzmq's descriptor gives no signal for a message that an earlier call to
        the socket has noticed.
        """
        if self._is_awaited() and self._has_message():
            self._wake()

    def _is_awaited(self) -> bool:
        return self._arrival is not None and not self._arrival.done()

    def _wake(self) -> None:
        assert self._arrival is not None
        self._arrival.set_result(None)

    def _forget(self) -> None:
        """Stop watching the socket, which is about to be closed."""
        self._loop.remove_reader(self._descriptor)
        if self._arrival is not None:
            self._arrival.cancel()

    def _parse(self, sender: bytes, payload: bytes) -> Incoming | None:
        try:
            message: Incoming = self._decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            reason = str(error)[:LOGGED_CHARS]  # it may quote the message
            log.warning("dropped a malformed message of %d bytes from %r: %s", len(payload), sender, reason)
            return None
        return message


class Router(_Socket[Incoming]):
    """A socket bound to `endpoint` for peers with `key`.

    `incoming` is the union of messages that may arrive. Construction raises ConfigError if the endpoint
    cannot be bound.
    """

    def __init__(self, endpoint: str, incoming: Any, key: ClusterKey) -> None:
        self._gate = Gate(key, zmq.ROUTER)
        super().__init__(zmq.Socket.shadow(self._gate.sockets[0]), incoming)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        try:
            self.endpoint = listen(self._socket, endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}") from None

    @property
    def num_refused(self) -> int:
        """The number of connections that were closed because the peer has another key, or no key."""
        return self._gate.num_refused

    @property
    def num_unfinished(self) -> int:
        """The number of connections that ended in the middle of their handshake."""
        return self._gate.num_unfinished

    def close(self) -> None:
        """Close the socket at once; the endpoint is free afterwards. Idempotent."""
        if not self._socket.closed:
            self._forget()
        self._gate.close()

    async def recv(self) -> tuple[bytes, Incoming]:
        """Return the next well-formed message and its sender's identity."""
        while True:
            sender, *frames = await self._frames()
            if (num_bytes := sum(map(len, frames))) > LARGEST_MESSAGE_BYTES:
                log.warning("dropped a message of %d bytes from %r: too long", num_bytes, sender)
                continue
            message = self._parse(sender, frames[0] if len(frames) == 1 else b"".join(frames))
            if message is not None:
                return sender, message

    async def send(self, peer: bytes, message: msgspec.Struct) -> None:
        """Send a message. Raises `PeerGoneError` when `peer` is not connected or does not read."""
        payload = _encode(message)
        try:
            self._socket.send(peer, _MORE_NOBLOCK)
            self._socket.send(payload, _NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerGoneError(
                f"cannot send {type(message).__name__} to {peer!r}: {error.strerror}"
            ) from None
        finally:
            self._look()


class Dealer(_Socket[Incoming]):
    """A socket with the identity `identity` that connects to the `Router` with the same `key`.

    It connects as soon as the `Router` exists, and connects again after each break of the connection.
    Without an endpoint the socket is connected by `move_to`.
    """

    def __init__(self, endpoint: str | None, identity: bytes, incoming: Any, key: ClusterKey) -> None:
        super().__init__(zmq.Context.instance().socket(zmq.DEALER), incoming)
        self._socket.linger = 0
        self._socket.identity = identity
        use_key(self._socket, key)
        self._watch = ConnectionWatch(self._socket, key)
        self.endpoint: str | None = None
        if endpoint is not None:
            self._connect(endpoint)

    def _connect(self, endpoint: str) -> None:
        self._watch.begin(endpoint)
        try:
            connect(self._socket, endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to {endpoint!r}: {error.strerror}") from None
        self.endpoint = endpoint

    def move_to(self, endpoint: str) -> None:
        """Connect to another `Router`, or anew to the same one.

        Unread messages of the former `Router` are dropped, and so are unsent messages to it. The count of
        connections begins again. An unusable endpoint raises ConfigError, and closes the socket.
        """
        if self.endpoint is not None:
            self._socket.disconnect(self.endpoint)
        self._connect(endpoint)

    @property
    def num_connections(self) -> int:
        """The number of connections to the endpoint so far, including the current one.

        Messages may have been lost between two connections.
        """
        return self._watch.num_connections

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket at once; queued messages may still leave within `linger_s` seconds. Idempotent."""
        if self._socket.closed:
            return
        self._watch.close()
        self._forget()
        self._socket.close(linger=int(1000 * linger_s))

    async def recv(self) -> Incoming:
        """Return the next well-formed message."""
        while True:
            frames = await self._frames()
            message = self._parse(str(self.endpoint).encode(), frames[-1])
            if message is not None:
                return message

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message. While the other side is away, up to `QUEUE_LEN` messages are queued.

        Raises PeerGoneError if the queue is full, or if the message is longer than a `Router` takes: such a
        message would end the connection.
        """
        payload = _encode(message)
        if len(payload) > LARGEST_MESSAGE_BYTES:
            raise PeerGoneError(
                f"cannot send {type(message).__name__} of {len(payload)} bytes to {self.endpoint}:"
                f" it takes {LARGEST_MESSAGE_BYTES}"
            )
        try:
            if len(payload) <= LARGEST_FRAME_BYTES:
                self._socket.send(payload, _NOBLOCK)
            else:
                self._send_in_frames(memoryview(payload))
        except zmq.ZMQError as error:
            raise PeerGoneError(
                f"cannot send {type(message).__name__} to {self.endpoint}: {error.strerror}"
            ) from None
        finally:
            self._look()

    def _send_in_frames(self, payload: memoryview) -> None:
        """Send all frames or none, as libzmq drops the frames of an unfinished message."""
        last = (len(payload) - 1) // LARGEST_FRAME_BYTES * LARGEST_FRAME_BYTES
        for start in range(0, last, LARGEST_FRAME_BYTES):
            self._socket.send(payload[start : start + LARGEST_FRAME_BYTES], _MORE_NOBLOCK)
        self._socket.send(payload[last:], _NOBLOCK)
