"""The messenger process: owns one instance's part of the KVCache pool and all its data connections.

    python -m kvstore.server.service       (configuration on stdin, see mooncake.node.process)

Owns: the process, its sockets, who is attached. Does not know: what the cached bytes mean.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvstore.events.batches import EventLog
from kvstore.events.internal import InternalPublisher
from kvstore.events.vllm import VllmPublisher
from kvstore.pool.pages import PageWriter
from kvstore.pool.segment import Segment
from kvstore.protocol.answers import Attached, CallFailed, Connected, FromRemotePool
from kvstore.protocol.calls import SPOKEN, Attach, Connect, ToPool
from kvstore.protocol.packets import ServerConnection
from kvstore.server.client_session import ClientSession, User
from kvstore.server.remote import serve_client
from kvstore.server.store import Store, open_store
from messenger.rdma.cards import Cards, open_cards
from messenger.receiver.receiver import UnauthenticatedPeers, refuse_connection
from messenger.transport import busy_poll
from messenger.transport.listeners import accept, listen_tcp, listen_unix
from messenger.transport.stream import Stream
from messenger.transport.tls import Tls
from messenger.transport.transports import Traffic
from messenger.wire import checksums
from messenger.wire.identity import host_id
from mooncake.config.sections import ANY_ENDPOINT, MessengerConfig
from mooncake.config.settings import host_and_port
from mooncake.endpoints import advertised, bracketed
from mooncake.errors import ConfigError, MismatchError, MooncakeError, PoolError
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import MessengerAddress
from mooncake.node.process import Ready, child_main, report
from mooncake.node.process_config import MessengerProcess
from mooncake.versions import Versions

log = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(ToPool)
_FLUSH_S = 2.0
"""Seconds for which blocks are written to SSD before the process ends.

The process exits `STOP_DEADLINE_S` seconds after the signal to end in any case (`mooncake.node.process`).
"""
_REPLAYED_BATCHES = 1000
"""Batches of KV events that are kept for replays: some 10 s under full load."""


class Service:
    """The service that connects a worker, clients and other messengers to the store."""

    def __init__(
        self,
        config: MessengerProcess,
        tasks: asyncio.TaskGroup,
        tcp_endpoints: Sequence[tuple[str, int]],
        cards: Cards,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._traffic = Traffic()
        self._tls = Tls.of(config.security)
        self._cards = cards
        self._owners = itertools.count(1)
        self.store: Store | None = None
        self._worker: tuple[int, ServerConnection[ToPool]] | None = None
        """Incarnation and connection of the worker."""
        self._events = EventLog(_REPLAYED_BATCHES)
        self.address = MessengerAddress(
            instance=config.instance,
            incarnation=config.incarnation,
            host_id=host_id(),
            unix_path=config.peer_socket,
            tcp_endpoints=tuple(tcp_endpoints),
            event_endpoints=self._publish(config),
        )
        segment = Segment.open(config.segment_fd)
        if segment is not None:
            self._open(segment)

    def _publish(self, config: MessengerProcess) -> tuple[str, str]:
        """Start to publish KV events, in the internal format and, if configured, in vLLM's format.

        Returns the two endpoints of the internal format.
        """
        endpoint, request_endpoint = config.event_endpoints
        internal = InternalPublisher(
            self._events,
            lambda: self.store.snapshot() if self.store is not None else (),
            instance=config.instance,
            incarnation=config.incarnation,
            endpoint=endpoint,
            request_endpoint=request_endpoint,
            key=config.cluster_key,
        )
        self._tasks.create_task(internal.run())
        if config.kvcache.vllm_events is not None:
            vllm = VllmPublisher(
                self._events,
                clock=time.time,
                endpoint=config.kvcache.vllm_events,
                replay_endpoint=config.kvcache.vllm_replay or ANY_ENDPOINT,
                topic=config.kvcache.vllm_topic,
            )
            self._tasks.create_task(vllm.run())
        return self._told(internal.endpoint), self._told(internal.request_endpoint)

    def _told(self, bound: str) -> str:
        """Return the endpoint by which the Conductor connects to the local endpoint `bound` of KV events.

        A TCP endpoint gets the address by which other hosts reach this host.
        """
        if not bound.startswith("tcp://"):
            return bound
        return advertised(f"tcp://{bracketed(self._config.settings.hosts[0])}:*", bound)

    # -- workers and clients of this host ---------------------------------------------------------

    async def accept_users(self, listener: socket.socket) -> None:
        """Serve workers and clients of this host that connect to `listener`, until cancelled."""
        while True:
            sock = await accept(listener)
            self._tasks.create_task(self._serve_user(sock))

    async def _serve_user(self, sock: socket.socket) -> None:
        session: ClientSession | None = None

        def on_message(message: ToPool) -> None:
            nonlocal session
            if session is not None:
                session.handle(message)
            elif isinstance(message, Attach | Connect):
                session = self._admit_local(message, connection)
            else:
                raise PoolError(
                    f"the first message is {type(message).__name__}; it must be Attach or Connect"
                )

        connection = ServerConnection(sock, _DECODER, on_message)

        def end_unless_admitted() -> None:
            if session is None:
                connection.close()

        timeout_s = self._config.settings.connect_timeout_s
        deadline = asyncio.get_running_loop().call_later(timeout_s, end_unless_admitted)
        try:
            await connection.ended
        finally:
            deadline.cancel()
            connection.close()
            if self._worker is not None and self._worker[1] is connection:
                self._worker = None
            if session is not None:
                session.end()

    def _admit_local(
        self, first: Attach | Connect, connection: ServerConnection[ToPool]
    ) -> ClientSession | None:
        """Answer the first message of a worker or client of this host, with the segment's descriptor.

        Returns the session of the worker or client; None if it is refused.
        """
        writer = PageWriter(connection.peer_pid, first.serial)
        try:
            if isinstance(first, Attach):
                answer, session = self._attach(first, writer, connection)
            else:
                answer, session = self.admit(first, writer, connection.send)
        except MooncakeError as error:
            log.warning("%s refused: %s", type(first).__name__, error)
            connection.send(CallFailed.of(first.call_id, error))
            connection.close()
            return None
        connection.send(answer, fd=self._config.segment_fd)
        return session

    def admit(
        self, connect: Connect, writer: PageWriter | None, send: Callable[[FromRemotePool], None]
    ) -> tuple[Connected, ClientSession]:
        """Open a client's session. Returns the answer to the client's first message, and the session.

        The session's answers go to `send`. `writer` is None for a client that writes no page itself. Raises
        MismatchError if the pool is for another model or layout than the client's blocks. Raises PoolError if
        there is no common version, or if the pool has no layout yet and this client may not give it one.
        """
        theirs = Versions(connect.oldest_version, connect.newest_version)
        version = SPOKEN.common(theirs)
        if version is None:
            advice = SPOKEN.advice("the pool", theirs, "the client")
            raise PoolError(f"the pool speaks versions {SPOKEN}, this client {theirs}; {advice}")
        if self.store is None and not connect.may_format:
            raise PoolError(
                f"{self._config.instance} has no pool yet: no worker or engine has brought a layout, and this"
                " client names no fingerprint and layout of its own"
            )
        store = self.store_for(connect.fingerprint, connect.layout)
        name = "a client on another host"
        if writer is not None:
            name = f"client {writer.serial} of process {writer.pid}"
        session = self._open_session(store, name, writer, send)
        header = store.segment.header
        return Connected(connect.call_id, self.address, header.fingerprint, header.layout, version), session

    def _open_session(
        self, store: Store, name: str, writer: PageWriter | None, send: Callable[[FromRemotePool], None]
    ) -> ClientSession:
        if writer is not None:
            store.pool.holds.writer_gone(writer)  # a process that connects again has stopped writing
        return ClientSession(User(next(self._owners), name, writer), store, self._tasks, send)

    def _attach(
        self, attach: Attach, writer: PageWriter, connection: ServerConnection[ToPool]
    ) -> tuple[Attached | Connected, ClientSession]:
        if attach.instance != self._config.instance:
            raise MismatchError("instance", self._config.instance, attach.instance, "check the socket path")
        if self._worker is not None and not self._worker[1].peer_is_gone():
            raise PoolError(
                f"messenger {self._config.instance} serves a live worker already"
                f" (incarnation {self._worker[0]}); end that one first"
            )
        store = self.store_for(attach.fingerprint, attach.layout)
        self._worker = (attach.incarnation, connection)
        name = f"the worker of incarnation {attach.incarnation}"
        wants_token_ids = self._config.kvcache.vllm_events is not None
        answer = Attached(attach.call_id, self.address, wants_token_ids)
        return answer, self._open_session(store, name, writer, connection.send)

    def store_for(self, fingerprint: str | None, layout: KVLayout | None) -> Store:
        """Return the store. If there is no store yet, one is made for `fingerprint` and `layout`.

        Raises MismatchError if the store does not fit `fingerprint` or `layout`; None fits any store. Raises
        PoolError if there is no store yet and one of the two is None.
        """
        if self.store is None:
            if fingerprint is None or layout is None:
                raise PoolError(
                    f"{self._config.instance} has no pool yet: no worker has attached, and this client names"
                    " no fingerprint and layout"
                )
            self._open(Segment.format(self._config.segment_fd, fingerprint, layout))
        assert self.store is not None
        header = self.store.segment.header
        header.check(
            header.fingerprint if fingerprint is None else fingerprint,
            header.layout if layout is None else layout,
        )
        return self.store

    def _open(self, segment: Segment) -> None:
        self.store = open_store(
            self._config,
            segment,
            self.address,
            self._traffic,
            self._events,
            self._tls,
            self._cards,
            self._tasks,
        )

    # -- other hosts ------------------------------------------------------------------------------

    async def accept_clients(self, listener: socket.socket) -> None:
        """Serve clients on other hosts that connect to `listener`, until cancelled."""
        unauthenticated = UnauthenticatedPeers()
        while True:
            sock = await accept(listener)
            serving = serve_client(
                Stream(sock),
                self.admit,
                self._tasks,
                self._config.cluster_key,
                self._traffic,
                unauthenticated,
                timeout_s=self._config.settings.connect_timeout_s,
            )
            self._tasks.create_task(serving)

    async def accept_peers(self, listener: socket.socket) -> None:
        tls, unauthenticated = (
            None if listener.family == socket.AF_UNIX else self._tls,
            UnauthenticatedPeers(),
        )
        while True:
            sock = await accept(listener)
            try:
                stream = Stream(sock if tls is None else tls.accept(sock))
            except OSError as error:  # the peer has gone already
                log.info("a connection ended as it was accepted: %s", error)
                sock.close()
            else:
                self._tasks.create_task(self._serve_peer(stream, unauthenticated))

    async def _serve_peer(self, stream: Stream, unauthenticated: UnauthenticatedPeers) -> None:
        if self.store is None:
            reason = f"{self._config.instance} has no pool yet, its worker has not attached: come again"
            await refuse_connection(
                stream,
                reason,
                self._config.cluster_key,
                self._traffic,
                unauthenticated,
                timeout_s=self._config.settings.connect_timeout_s,
            )
        else:
            await self.store.sessions.serve(stream, unauthenticated)


def event_loop(config: MessengerProcess) -> asyncio.AbstractEventLoop:
    """Return an event loop for `serve`, which polls for the configured time before it sleeps."""
    return busy_poll.event_loop(1e-6 * config.settings.poll_us)


def _reached_at(settings: MessengerConfig, listeners: Sequence[socket.socket]) -> list[tuple[str, int]]:
    """Return a (host, port) pair for each of `settings.hosts`, by which other messengers connect.

    If there is only one listener, all pairs have its port.
    """
    ports = [listener.getsockname()[1] for listener in listeners]
    return list(zip(settings.hosts, ports if len(ports) > 1 else ports * len(settings.hosts), strict=True))


@contextlib.contextmanager
def listen_clients(address: str) -> Iterator[socket.socket]:
    """Make a context with a socket at `address` (host:port), for clients on other hosts.

    Raises ConfigError if the process cannot listen there.
    """
    try:
        with listen_tcp(*host_and_port(address)) as listener:
            yield listener
    except ConfigError as error:
        raise ConfigError(f"kvcache.listen: {error}") from error


async def serve(config: MessengerProcess) -> None:
    """Serve one instance's part of the pool until cancelled."""
    checksums.prepare()
    cards = open_cards(config.settings)
    async with contextlib.AsyncExitStack() as stack:
        user_listener = stack.enter_context(listen_unix(config.worker_socket, socket.SOCK_SEQPACKET))
        peer_listener = stack.enter_context(listen_unix(config.peer_socket, socket.SOCK_STREAM))
        tcp_listeners = [
            stack.enter_context(listen_tcp(host, config.settings.port)) for host in config.settings.listens_at
        ]
        endpoints = _reached_at(config.settings, tcp_listeners)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        service = Service(config, tasks, endpoints, cards)
        for listener in (peer_listener, *tcp_listeners):
            tasks.create_task(service.accept_peers(listener))
        detail = ", ".join(f"{bracketed(host)}:{port}" for host, port in endpoints)
        if config.kvcache.socket is not None:
            detail += f", clients at unix:{config.worker_socket}"
        if config.kvcache.listen is not None:
            client_listener = stack.enter_context(listen_clients(config.kvcache.listen))
            tasks.create_task(service.accept_clients(client_listener))
            detail += f", clients at {config.kvcache.listen}"
        report(Ready(detail))
        try:
            await service.accept_users(user_listener)
        finally:
            if service.store is not None:
                await service.store.mover.flush(_FLUSH_S)
                service.store.close()


if __name__ == "__main__":
    child_main(MessengerProcess, serve, event_loop)
