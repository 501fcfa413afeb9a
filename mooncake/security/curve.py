"""CURVE on ZeroMQ sockets: both sides prove that they have the cluster's key, and all messages are encrypted.

`Gate` makes sockets to bind, which admit only peers with the key; `use_key` is for sockets that connect to
them. All nodes have the same key pair: the pair is the server's on one side and the client's on the other.

Owns: CURVE, the ZAP handler (ZeroMQ RFC 27), the size of frames, the log of who was refused. Does not know:
messages.
"""

import asyncio
import hmac
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from mooncake import freed_memory
from mooncake.doubling import Doubling
from mooncake.security.handshakes import HANDSHAKE_S, MOST_UNAUTHENTICATED, Handshakes, Unauthenticated
from mooncake.security.keys import ClusterKey

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"mooncake"
LARGEST_FRAME_BYTES = 32 << 10
"""Bytes of the largest frame that a bound socket takes, from any peer.

libzmq allocates a frame when its header arrives.
"""
CURVE_OVERHEAD_BYTES = 33
"""Bytes that encryption adds to a message: name, nonce, authenticator and flags (ZeroMQ RFC 26)."""
FAILURES_BEFORE_WARNING = 3
"""Failed handshakes in a row before a warning, as a peer that ends may close one or two connections."""
CROWD_LEN = 64
"""Unauthenticated connections after which freed memory is returned to the operating system."""
QUIET_MS = 1000
"""Milliseconds of silence after which a burst of connections is over."""
EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
log = logging.getLogger(__name__)
_monitor_ids = itertools.count()


class Gate:
    """A ZeroMQ context for binding sockets of `kinds` that admit only peers with `key`.

    A gate has its own context, because a context has room for one ZAP handler. That handler, and the limit on
    unauthenticated peers, run in a separate thread, so that peers are admitted while the event loop is busy.
    """

    def __init__(self, key: ClusterKey, *kinds: int) -> None:
        public, self._secret = key.curve_pair()
        self._admitted = z85.decode(public)
        self._context = zmq.asyncio.Context()
        self._lock = threading.Lock()
        self._refusals, self._unfinished = Doubling(1), Doubling(FAILURES_BEFORE_WARNING)
        self._handshakes: list[Handshakes] = []
        self._unauthenticated: list[Unauthenticated] = []
        self._num_ended = 0
        """Number of unauthenticated connections that had ended when memory was last released."""
        self._zap = zmq.Context(shadow=self._context).socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP_ENDPOINT)
        self._handlers: dict[zmq.Socket[bytes], Callable[[list[bytes]], None]] = {self._zap: self._decide}
        self.sockets = [self._socket(kind) for kind in kinds]
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """The number of connections that showed another key, or no key.

        The latest connections may not be counted yet.
        """
        with self._lock:
            now_s = time.monotonic()
            return sum(handshakes.num_refused(now_s) for handshakes in self._handshakes)

    @property
    def num_unfinished(self) -> int:
        """The number of connections that ended in the middle of their handshake, with any key."""
        return sum(handshakes.num_unfinished for handshakes in self._handshakes)

    def close(self) -> None:
        """Close all sockets at once; their endpoints are free afterwards. Idempotent."""
        for socket in self.sockets:
            if not socket.closed:
                socket.disable_monitor()  # first: libzmq's thread would wait for a receiver that is gone
                socket.close()
        self._context.term()  # which ends the thread
        self._thread.join()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody is admitted
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
        socket.maxmsgsize = LARGEST_FRAME_BYTES + CURVE_OVERHEAD_BYTES
        handshakes, unauthenticated = Handshakes(), Unauthenticated()

        def on_message(frames: list[bytes]) -> None:
            event = parse_monitor_message(frames)
            kind, descriptor = event["event"], int(event["value"])
            with self._lock:
                handshakes.on_event(kind, descriptor, time.monotonic())
            unauthenticated.on_event(kind, descriptor, event["endpoint"].decode())
            if kind == zmq.EVENT_DISCONNECTED:
                self._warn()

        self._handlers[_monitor(socket)] = on_message
        self._handshakes.append(handshakes)
        self._unauthenticated.append(unauthenticated)
        return socket

    def _run(self) -> None:
        """Run the thread until the context ends: listen, decide, and release memory after bursts."""
        poller = zmq.Poller()
        for receiver in self._handlers:
            poller.register(receiver, zmq.POLLIN)
        try:
            while True:
                ready = poller.poll(QUIET_MS if self._has_had_a_crowd() else None)
                if not ready:
                    self._give_memory_back()
                for receiver, _ in ready:
                    self._hear(receiver)
        except zmq.ContextTerminated:
            pass
        finally:
            for receiver in self._handlers:
                receiver.close(linger=0)
            for unauthenticated in self._unauthenticated:
                unauthenticated.close()

    def _hear(self, receiver: zmq.Socket[bytes]) -> None:
        frames = receiver.recv_multipart()
        try:
            self._handlers[receiver](frames)
        except zmq.ContextTerminated:
            raise
        except Exception:  # a bug here must not keep everybody out
            log.exception("the gate met a bug")

    def _decide(self, request: list[bytes]) -> None:
        """Answer a request of libzmq about a client that knows the public key."""
        version, request_id, *_, mechanism, credentials = request
        is_ours = mechanism == b"CURVE" and hmac.compare_digest(credentials, self._admitted)
        status = (b"200", b"OK") if is_ours else (b"400", b"this is not the cluster's key")
        self._zap.send_multipart([version, request_id, *status, b"", b""])

    def _warn(self) -> None:
        if self._refusals.is_due(num_refused := self.num_refused):
            log.warning(
                "refused %d connections so far: they do not have this cluster's key (security.key_file)",
                num_refused,
            )
        if self._unfinished.is_due(num_unfinished := self.num_unfinished):
            log.warning(
                "%d connections so far ended in the middle of their handshake, with whatever key: the other"
                " side hung up, it took more than %g s (is this machine too busy?), or more than %d had shown"
                " no key yet",
                num_unfinished,
                HANDSHAKE_S,
                MOST_UNAUTHENTICATED,
            )

    def _num_unauthenticated_ended(self) -> int:
        return sum(unauthenticated.num_ended for unauthenticated in self._unauthenticated)

    def _has_had_a_crowd(self) -> bool:
        return self._num_unauthenticated_ended() - self._num_ended >= CROWD_LEN

    def _give_memory_back(self) -> None:
        """Return the memory of a burst of connections to the operating system.

        The memory is freed already, but still belongs to this process.
        """
        self._num_ended = self._num_unauthenticated_ended()
        freed_memory.release_freed_memory()


class ConnectionWatch:
    """A counter of a socket's connections, which warns when handshakes fail one after the other.

    If the peer refuses the key of the socket, failed handshakes are all that the socket gets to see.
    """

    def __init__(self, socket: zmq.Socket[bytes], key: ClusterKey) -> None:
        self._endpoint, self._key = "", key
        self._num_connections = 0
        self._is_in_handshake = False
        self._num_failures = 0
        self._warnings = Doubling(FAILURES_BEFORE_WARNING)
        self._monitor = Monitor(socket, self._on_event)

    def begin(self, endpoint: str) -> None:
        """Restart the count from 0, for the connections to another endpoint."""
        self._monitor.drain()
        self._endpoint, self._num_connections, self._is_in_handshake = endpoint, 0, False

    @property
    def num_connections(self) -> int:
        """The number of connections so far, including the one over which the latest message came."""
        self._monitor.drain()
        return self._num_connections

    def close(self) -> None:
        """Stop counting. To be called before the socket is closed."""
        self._monitor.close()

    def _on_event(self, event: int, _: int) -> None:
        if event == zmq.EVENT_DISCONNECTED and self._is_in_handshake:
            self._num_failures += 1
            if self._warnings.is_due(self._num_failures):
                log.warning(
                    "%s has closed %d connections in their handshake, one after the other: it has another"
                    " cluster key than this node's (key id %s; give all nodes the same security.key_file), or"
                    " was too busy to answer; its log says which",
                    self._endpoint,
                    self._num_failures,
                    self._key.key_id,
                )
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_connections += 1
            self._num_failures, self._warnings = 0, Doubling(FAILURES_BEFORE_WARNING)
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # which is followed by the connection's end
            self._is_in_handshake = event == zmq.EVENT_CONNECTED


def use_key(socket: zmq.Socket[Any], key: ClusterKey) -> None:
    """Set the key of `socket`, which can then connect only to sockets of a `Gate` with the same key.

    To be called before `connect`.
    """
    public, secret = key.curve_pair()
    socket.curve_serverkey = public
    socket.curve_publickey = public
    socket.curve_secretkey = secret


class _Reader:
    """A reader that calls `on_message` in the event loop with the frames of each message of `socket`."""

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
        """Handle all messages that have arrived."""
        # The descriptor signals an arrival once, and not as long as messages are unread.
        while not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_message(self._socket.recv_multipart(zmq.NOBLOCK))


class Monitor:
    """A monitor of the connections of `socket`.

    It calls `on_event(event, value)` in the event loop for each of their events.
    """

    def __init__(self, socket: zmq.Socket[Any], on_event: Callable[[int, int], None]) -> None:
        self._socket, self._on_event = socket, on_event
        self._reader = _Reader(_monitor(socket), self._on_message)

    def drain(self) -> None:
        """Handle all events that have happened."""
        self._reader.drain()

    def close(self) -> None:
        """Stop watching. To be called before the socket is closed."""
        if not self._socket.closed:
            self._socket.disable_monitor()  # first: libzmq's thread would wait for a receiver that is gone
        self._reader.close()

    def _on_message(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        self._on_event(event["event"], int(event["value"]))


def _monitor(socket: zmq.Socket[Any]) -> zmq.Socket[bytes]:
    """Return a socket that receives the connection events of `socket`."""
    address = f"inproc://events-{next(_monitor_ids)}"
    socket.monitor(address, EVENTS)
    receiver = zmq.Context(shadow=socket.context).socket(zmq.PAIR)
    receiver.rcvhwm = 0  # else libzmq's own thread waits for room, and all sockets with it
    receiver.linger = 0
    receiver.connect(address)
    return receiver
