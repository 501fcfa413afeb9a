"""The messenger process: owns one instance's part of the KVCache pool and all its data connections.

    python -m kvstore.server.service       (configuration on stdin, see mooncake.node.process)

Owns: the process, its sockets, who is attached. Does not know: what the cached bytes mean.
"""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence

import msgspec

from kvstore.events.batches import EventLog
from kvstore.events.publisher import InternalPublisher, VllmPublisher
from kvstore.pool.pages import Writer
from kvstore.pool.segment import Segment
from kvstore.protocol.answers import Attached, Connected
from kvstore.protocol.calls import Attach, Connect, ToPool
from kvstore.protocol.channel import Connection
from kvstore.protocol.failures import failed_call
from kvstore.server.remote import serve_client
from kvstore.server.session import Session, User
from kvstore.server.store import Store, open_store
from messenger.rdma.cards import Cards, open_cards
from messenger.receiver.receiver import Threshold, turn_away
from messenger.transport import direct, listening
from messenger.transport.listening import ListeningLoop
from messenger.transport.pacing import begin_unpaced
from messenger.transport.stream import Stream
from messenger.transport.tls import Tls
from messenger.transport.transports import Traffic
from messenger.wire import checksums
from messenger.wire.identity import host_id
from mooncake.config.sections import ANY_ENDPOINT
from mooncake.config.settings import host_and_port
from mooncake.errors import ConfigError, MismatchError, MooncakeError, PoolError
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import MessengerAddress
from mooncake.node.process import Ready, child_main, report
from mooncake.node.process_config import MessengerProcess

log = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(ToPool)
_BACKLOG = 128
_FLUSH_S = 2.0
"""how long the end may take to write blocks to SSD; a supervisor gives up on us after 5 s"""
_ACCEPT_RETRY_S = 0.5
_REPLAYED_BATCHES = 1000


class Service:
    """Listens for its worker, for clients and for other messengers, and connects them to the store."""

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
        self._worker: tuple[int, Connection[ToPool]] | None = None
        """incarnation and connection of the worker"""
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
        """Starts to publish KV events, in both formats. Returns where the internal ones are."""
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
        return internal.endpoint, internal.request_endpoint

    # -- workers and clients of this host ---------------------------------------------------------

    async def accept_users(self, listener: socket.socket) -> None:
        while True:
            sock = await _accept(listener)
            self._tasks.create_task(self._serve_user(sock))

    async def _serve_user(self, sock: socket.socket) -> None:
        session: Session | None = None

        def on_message(message: ToPool) -> None:
            nonlocal session
            if session is not None:
                session.handle(message)
            elif isinstance(message, Attach | Connect):
                session = self._admit(message, connection)
            else:
                raise PoolError(
                    f"the first message is {type(message).__name__}; it must be Attach or Connect"
                )

        connection = Connection(sock, _DECODER, on_message)

        def lose_patience() -> None:
            if session is None:
                connection.close()

        patience = asyncio.get_running_loop().call_later(
            self._config.settings.connect_timeout_s, lose_patience
        )
        try:
            await connection.ended
        finally:
            patience.cancel()
            connection.close()
            if self._worker is not None and self._worker[1] is connection:
                self._worker = None
            if session is not None:
                session.end()

    def _admit(self, first: Attach | Connect, connection: Connection[ToPool]) -> Session | None:
        """Answers the first message. None if the user was refused."""
        try:
            store = self._check_attach(first) if isinstance(first, Attach) else self.check_connect(first)
        except MooncakeError as error:
            log.warning("%s refused: %s", type(first).__name__, error)
            connection.send(failed_call(first.call_id, error))
            connection.close()
            return None
        writer = Writer(connection.peer_pid, first.serial)
        store.pool.writer_gone(writer)  # it says that it has stopped what it had begun
        if isinstance(first, Attach):
            self._worker = (first.incarnation, connection)
            name = f"the worker of incarnation {first.incarnation}"
            wants_token_ids = self._config.kvcache.vllm_events is not None
            answer: Attached | Connected = Attached(first.call_id, self.address, wants_token_ids)
        else:
            name = f"client {writer.serial} of process {writer.pid}"
            header = store.segment.header
            answer = Connected(first.call_id, self.address, header.fingerprint, header.layout)
        session = Session(User(next(self._owners), name, writer), store, self._tasks, connection.send)
        connection.send(answer, fd=self._config.segment_fd)
        return session

    def _check_attach(self, attach: Attach) -> Store:
        if attach.instance != self._config.instance:
            raise MismatchError("instance", self._config.instance, attach.instance, "check the socket path")
        if self._worker is not None and not self._worker[1].peer_is_gone():
            raise PoolError(
                f"messenger {self._config.instance} serves a live worker already"
                f" (incarnation {self._worker[0]}); end that one first"
            )
        return self.store_for(attach.fingerprint, attach.layout)

    def check_connect(self, connect: Connect) -> Store:
        """The store for a client. Raises MismatchError, or PoolError if it is to be formatted by another."""
        if self.store is None and not connect.may_format:
            raise PoolError(
                f"{self._config.instance} has no pool yet: no worker has attached, and this client names"
                " no fingerprint and layout of its own"
            )
        return self.store_for(connect.fingerprint, connect.layout)

    def store_for(self, fingerprint: str | None, layout: KVLayout | None) -> Store:
        """The store, if its blocks are what the user takes them for; formatted for him if it is new.

        Raises MismatchError, or PoolError if there is no pool yet and the user names no layout.
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
        threshold = Threshold()
        while True:
            sock = await _accept(listener)
            self._tasks.create_task(
                serve_client(
                    Stream(sock),
                    self,
                    self._tasks,
                    self._config.cluster_key,
                    self._traffic,
                    threshold,
                    timeout_s=self._config.settings.connect_timeout_s,
                )
            )

    async def accept_peers(self, listener: socket.socket) -> None:
        tls, threshold = self._tls if listener.family == socket.AF_INET else None, Threshold()
        while True:
            sock = await _accept(listener)
            try:
                stream = Stream(sock if tls is None else tls.accept(sock))
            except OSError as error:  # it has gone already
                log.info("a connection ended as it was accepted: %s", error)
                sock.close()
            else:
                self._tasks.create_task(self._serve_peer(stream, threshold))

    async def _serve_peer(self, stream: Stream, threshold: Threshold) -> None:
        if self.store is None:
            reason = f"{self._config.instance} has no pool yet, its worker has not attached: come again"
            await turn_away(
                stream,
                reason,
                self._config.cluster_key,
                self._traffic,
                threshold,
                timeout_s=self._config.settings.connect_timeout_s,
            )
        else:
            await self.store.sessions.serve(stream, threshold)

    def remote_user(self, name: str) -> User:
        """A client that writes no page itself."""
        return User(next(self._owners), name, None)


async def _accept(listener: socket.socket) -> socket.socket:
    """The next connection, after a turn for the one before: a crowd must not keep everybody else waiting, nor
    get past its limits. Without descriptors for it, those who connect wait until some are free again."""
    while True:
        await asyncio.sleep(0)  # one that waits already is accepted without a turn of the loop
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:
            log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_ACCEPT_RETRY_S)
        else:
            return sock


@contextlib.contextmanager
def listen_unix(path: str, kind: socket.SocketKind) -> Iterator[socket.socket]:
    """Listens at `path`, replacing a dead predecessor's file. Raises ConfigError if it is in use."""
    with socket.socket(socket.AF_UNIX, kind) as listener:
        try:
            _remove_stale(path, kind)
            listener.bind(path)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error}") from error
        try:
            os.chmod(path, 0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_stale(path: str, kind: socket.SocketKind) -> None:
    """Unlinks the socket file of a process that listens no more."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        error_code = probe.connect_ex(path)
    if error_code == 0:
        raise ConfigError(f"somebody listens at {path} already; give each instance its own paths")
    if error_code == errno.ECONNREFUSED and stat.S_ISSOCK(os.stat(path).st_mode):
        os.unlink(path)


@contextlib.contextmanager
def listen_tcp(host: str, port: int) -> Iterator[socket.socket]:
    """Listens at `host`:`port`. Raises ConfigError if that cannot be had."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        begin_unpaced(listener)
        try:
            listener.bind((host, port))
        except socket.gaierror as error:
            raise ConfigError(
                f"cannot listen at {host}: it is, or has, no IPv4 address ({error.strerror}); name one"
            ) from error
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener


@contextlib.contextmanager
def listen_clients(address: str) -> Iterator[socket.socket]:
    """Listens for clients of other hosts."""
    try:
        with listen_tcp(*host_and_port(address)) as listener:
            yield listener
    except ConfigError as error:
        raise ConfigError(f"kvcache.listen: {error}") from error


def event_loop(config: MessengerProcess) -> ListeningLoop:
    """Of a process for `serve`."""
    return ListeningLoop(1e-6 * config.settings.poll_us)


async def serve(config: MessengerProcess) -> None:
    """Serves one instance until cancelled."""
    checksums.prepare()
    direct.prepare()
    listening.prepare()
    cards = open_cards(config.settings)
    async with contextlib.AsyncExitStack() as stack:
        user_listener = stack.enter_context(listen_unix(config.worker_socket, socket.SOCK_SEQPACKET))
        peer_listener = stack.enter_context(listen_unix(config.peer_socket, socket.SOCK_STREAM))
        tcp_listeners = [
            stack.enter_context(listen_tcp(host, config.settings.port)) for host in config.settings.hosts
        ]
        endpoints = [listener.getsockname() for listener in tcp_listeners]
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        service = Service(config, tasks, endpoints, cards)
        for listener in (peer_listener, *tcp_listeners):
            tasks.create_task(service.accept_peers(listener))
        detail = ", ".join(f"{host}:{port}" for host, port in endpoints)
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
