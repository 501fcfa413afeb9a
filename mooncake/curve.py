"""CURVE on ZeroMQ sockets: both sides show that they hold the cluster's key, and everything is encrypted.

`Gate` makes sockets to bind, which admit holders of the key alone; `use_key` is for sockets that connect to
them. All nodes have the same key pair: it is the server's on one side and the client's on the other.

Owns: CURVE, the ZAP handler (ZeroMQ RFC 27), the count of who was refused. Does not know: messages.
"""

import asyncio
import hmac
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from mooncake.keys import ClusterKey

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"mooncake"
HANDSHAKE_S = 5.0
"""after which libzmq closes a connection that has not shown the key"""
HANDSHAKE_MARGIN_S = 1.0
LARGEST_MESSAGE_BYTES = 16 << 20
"""that a bound socket takes, and that a stranger can make it buffer. A prompt of 2M tokens has 10 MiB"""
CURVE_OVERHEAD_BYTES = 33
"""of an encrypted message: name, nonce, authenticator and flags (ZeroMQ RFC 26)"""
FAILURES_BEFORE_WARNING = 3
"""a server that is just being stopped may close a connection or two"""
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
log = logging.getLogger(__name__)
_monitor_ids = itertools.count()


class Gate:
    """A ZeroMQ context whose sockets admit only holders of `key`. Needs a running event loop.

    A context of its own, because a context has room for one ZAP handler.
    """

    def __init__(self, key: ClusterKey) -> None:
        public, self._secret = key.curve_pair()
        self._admitted = z85.decode(public)
        self._context = zmq.asyncio.Context()
        self._zap = zmq.Context(shadow=self._context).socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP_ENDPOINT)
        self._zap_reader = _Reader(self._zap, self._decide)
        self._sockets: list[tuple[zmq.asyncio.Socket, _Monitor]] = []
        self._handshakes: list[Handshakes] = []
        self._log_at = 1

    @property
    def num_refused(self) -> int:
        """Connections that were closed because they did not show the key; the last ones may be missing."""
        now_s = time.monotonic()
        return sum(handshakes.num_refused(now_s) for handshakes in self._handshakes)

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        """A socket to bind."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody is admitted
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
        socket.maxmsgsize = LARGEST_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES
        handshakes = Handshakes()

        def on_event(event: int, value: int) -> None:
            handshakes.on_event(event, value, time.monotonic())
            if event == zmq.EVENT_DISCONNECTED and (num_refused := self.num_refused) >= self._log_at:
                self._log_at = 2 * num_refused
                log.warning(
                    "refused %d connections so far: they do not have this cluster's key (security.key_file)",
                    num_refused,
                )

        self._sockets.append((socket, _Monitor(socket, on_event)))
        self._handshakes.append(handshakes)
        return socket

    def close(self) -> None:
        """Closes all its sockets at once; their endpoints are free afterwards."""
        for socket, monitor in self._sockets:
            monitor.close()
            socket.close()
        self._sockets.clear()
        self._zap_reader.close()
        self._context.term()

    def _decide(self, request: list[bytes]) -> None:
        """Answers libzmq, which asks for each client that knows our public key."""
        version, request_id, *_, mechanism, credentials = request
        is_ours = mechanism == b"CURVE" and hmac.compare_digest(credentials, self._admitted)
        status = (b"200", b"OK") if is_ours else (b"400", b"this is not the cluster's key")
        self._zap.send_multipart([version, request_id, *status, b"", b""])


class Handshakes:
    """Counts the connections to one bound socket that have ended without showing the key.

    libzmq tells which connection has come or gone, but not which one has been admitted. So one is undecided
    until it has gone, or all that are undecided have been admitted, or it is older than any handshake can be.
    Undecided ones are not counted: a burst of friends may hide a stranger for that time.
    """

    def __init__(self) -> None:
        self._num_accepted = 0
        self._num_admitted = 0
        self._num_refused = 0
        self._undecided: dict[int, float] = {}
        """when each came, by its descriptor, oldest first"""
        self._num_admitted_undecided = 0
        """at least as many of them have been admitted"""

    def on_event(self, event: int, descriptor: int, now_s: float) -> None:
        """`event` of `zmq.EVENT_*`; a successful handshake has no `descriptor`."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._num_accepted += 1
                self._forget(descriptor)
                self._undecided[descriptor] = now_s
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_admitted += 1
                self._num_admitted_undecided += 1
                if self._num_admitted_undecided >= len(self._undecided):
                    self._undecided.clear()
                    self._num_admitted_undecided = 0
            case zmq.EVENT_DISCONNECTED:
                self._forget(descriptor)

    def num_refused(self, now_s: float) -> int:
        """Never too many, and it never falls."""
        while self._undecided:
            descriptor, since_s = next(iter(self._undecided.items()))
            if now_s - since_s < HANDSHAKE_S + HANDSHAKE_MARGIN_S:
                break
            self._forget(descriptor)
        decided = self._num_accepted - len(self._undecided)
        self._num_refused = max(self._num_refused, decided - self._num_admitted)
        return self._num_refused

    def _forget(self, descriptor: int) -> None:
        if self._undecided.pop(descriptor, None) is not None and self._num_admitted_undecided:
            self._num_admitted_undecided -= 1  # it may have been one of those


class ConnectionWatch:
    """Counts a socket's connections. Warns when whoever it connects to closes one after the other during the
    handshake: that is all that a socket with another key, or without one, gets to see.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, key: ClusterKey) -> None:
        self._endpoint, self._key = endpoint, key
        self._num_connections = 0
        self._is_in_handshake = False
        self._num_failures = 0
        self._warn_at = FAILURES_BEFORE_WARNING
        self._monitor = _Monitor(socket, self._on_event)

    @property
    def num_connections(self) -> int:
        """That came about, one after the other; that of the latest message is among them."""
        self._monitor.drain()
        return self._num_connections

    def close(self) -> None:
        """To be called before the socket is closed."""
        self._monitor.close()

    def _on_event(self, event: int, _: int) -> None:
        if event == zmq.EVENT_DISCONNECTED and self._is_in_handshake:
            self._num_failures += 1
            if self._num_failures >= self._warn_at:
                self._warn_at = 2 * self._num_failures
                log.warning(
                    "%s has closed %d connections in their handshake: it has another cluster key than"
                    " this node's (key id %s); give all nodes the same security.key_file",
                    self._endpoint,
                    self._num_failures,
                    self._key.key_id,
                )
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_connections += 1
            self._num_failures, self._warn_at = 0, FAILURES_BEFORE_WARNING
        self._is_in_handshake = event == zmq.EVENT_CONNECTED


def use_key(socket: zmq.Socket[Any], key: ClusterKey) -> None:
    """Before `connect`: `socket` can then talk to sockets of a `Gate` with the same key, and to no others."""
    public, secret = key.curve_pair()
    socket.curve_serverkey = public
    socket.curve_publickey = public
    socket.curve_secretkey = secret


class _Reader:
    """Calls `on_message` in the event loop with the frames of each message that `socket` receives."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket, self._on_message = socket, on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.drain)
        self.drain()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=0)

    def drain(self) -> None:
        """All that have come by now."""
        # The descriptor tells once that there is something, not as long as there is.
        while not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_message(self._socket.recv_multipart(zmq.NOBLOCK))


class _Monitor:
    """Calls `on_event(event, value)` in the event loop for what happens to the connections of `socket`."""

    def __init__(self, socket: zmq.Socket[Any], on_event: Callable[[int, int], None]) -> None:
        self._socket, self._on_event = socket, on_event
        address = f"inproc://events-{next(_monitor_ids)}"
        socket.monitor(address, EVENTS)
        receiver = zmq.Context(shadow=socket.context).socket(zmq.PAIR)
        receiver.rcvhwm = 0  # else libzmq's own thread waits for room, and all sockets with it
        receiver.linger = 0
        receiver.connect(address)
        self._reader = _Reader(receiver, self._on_message)

    def drain(self) -> None:
        """Calls it for all that has happened by now."""
        self._reader.drain()

    def close(self) -> None:
        """To be called before the socket is closed."""
        self._socket.disable_monitor()  # first: that thread would also wait for a receiver that is gone
        self._reader.close()

    def _on_message(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        self._on_event(event["event"], int(event["value"]))
