"""The messenger process: owns one instance's part of the KVCache pool and all its data connections.

    python -m kvstore.service       (configuration on stdin, see mooncake.process)

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
from collections.abc import Iterator

import msgspec

from kvstore.channel import Channel
from kvstore.grants import Grants
from kvstore.messages import Attach, Attached, FromWorker
from kvstore.pages import PageState
from kvstore.pool import Pool
from kvstore.segment import Segment
from kvstore.session import Store, WorkerSession, failed_call
from messenger.identity import Identity, host_id
from messenger.receiver import Receiver, refuse
from messenger.sender import Links
from messenger.stream import Stream
from messenger.transports import SourceSegment, Traffic
from mooncake.config import MessengerProcess
from mooncake.errors import ConfigError, MismatchError, MooncakeError, PoolError
from mooncake.messages import MessengerAddress
from mooncake.process import Ready, child_main, report

log = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(FromWorker)
_BACKLOG = 128
_ACCEPT_RETRY_S = 0.5


class Service:
    """Listens for its worker and for other messengers, and connects both to the store."""

    def __init__(self, config: MessengerProcess, tasks: asyncio.TaskGroup, tcp_port: int) -> None:
        self._config = config
        self._tasks = tasks
        self._traffic = Traffic()
        self._owners = itertools.count(1)
        self._session: WorkerSession | None = None
        self.address = MessengerAddress(
            instance=config.instance,
            incarnation=config.incarnation,
            host_id=host_id(),
            unix_path=config.peer_socket,
            tcp_host=config.settings.host,
            tcp_port=tcp_port,
        )
        segment = Segment.open(config.segment_fd)
        self.store = self._open_store(segment) if segment is not None else None

    async def accept_workers(self, listener: socket.socket) -> None:
        while True:
            sock = await _accept(listener)
            self._tasks.create_task(self._serve_worker(Channel(sock, _DECODER)))

    async def accept_peers(self, listener: socket.socket) -> None:
        while True:
            sock = await _accept(listener)
            self._tasks.create_task(self._serve_peer(Stream(sock)))

    async def _serve_peer(self, stream: Stream) -> None:
        if self.store is None:
            reason = f"{self._config.instance} has no pool yet, its worker has not attached"
            await refuse(stream, reason, self._config.settings.connect_timeout_s)
            return
        receiver = Receiver(
            stream,
            self.store.grants,
            self._traffic,
            ack_timeout_s=self._config.settings.ack_timeout_s,
            connect_timeout_s=self._config.settings.connect_timeout_s,
        )
        await receiver.run(self.store.identity)

    async def _serve_worker(self, channel: Channel[FromWorker]) -> None:
        session: WorkerSession | None = None
        try:
            async with asyncio.timeout(self._config.settings.connect_timeout_s):
                attach = await channel.receive()
                if not isinstance(attach, Attach):
                    return
                try:
                    store = self._check_attach(attach)
                except MooncakeError as error:
                    log.warning("worker of incarnation %d refused: %s", attach.incarnation, error)
                    await channel.send(failed_call(attach.call_id, error))
                    return
                session = WorkerSession(next(self._owners), attach.incarnation, channel, store, self._tasks)
                self._session = session
                await channel.send(Attached(attach.call_id, self.address), fd=self._config.segment_fd)
            await session.run()
        except (TimeoutError, ConnectionError, PoolError) as error:
            log.warning("a worker could not attach: %s", error or "no message in time")
        finally:
            if self._session is session:
                self._session = None
            channel.close()

    def _check_attach(self, attach: Attach) -> Store:
        if attach.instance != self._config.instance:
            raise MismatchError("instance", self._config.instance, attach.instance, "check the socket path")
        if self._session is not None and not self._session.channel.peer_is_gone():
            raise PoolError(
                f"messenger {self._config.instance} serves a live worker already"
                f" (incarnation {self._session.incarnation}); end that one first"
            )
        if self.store is None:
            segment = Segment.format(self._config.segment_fd, attach.fingerprint, attach.layout)
            self.store = self._open_store(segment)
        self.store.segment.check(attach.fingerprint, attach.layout)
        return self.store

    def _open_store(self, segment: Segment) -> Store:
        config, space = self._config, asyncio.Event()
        identity = Identity(
            config.instance, config.incarnation, self.address.host_id, segment.fingerprint, segment.layout
        )
        pool = Pool(segment.page_table(), on_space=space.set)
        log.info(
            "pool of %d pages, %d sealed blocks adopted",
            segment.num_pages,
            pool.table.count()[PageState.SEALED],
        )
        links = Links(
            self._tasks,
            SourceSegment.of(config.segment_fd, segment.buffer),
            self._traffic,
            identity=identity,
            choice=config.settings.transport,
            ack_timeout_s=config.settings.ack_timeout_s,
            connect_timeout_s=config.settings.connect_timeout_s,
        )
        grants = Grants(pool, segment, self.address)
        return Store(identity, segment, pool, grants, links, self._traffic, space)


async def _accept(listener: socket.socket) -> socket.socket:
    """The next connection. Without descriptors for it, those who connect wait until some are free again."""
    while True:
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
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener


async def serve(config: MessengerProcess) -> None:
    """Serves one instance until cancelled."""
    with (
        listen_unix(config.worker_socket, socket.SOCK_SEQPACKET) as worker_listener,
        listen_unix(config.peer_socket, socket.SOCK_STREAM) as peer_listener,
        listen_tcp(config.settings.host, config.settings.port) as tcp_listener,
    ):
        async with asyncio.TaskGroup() as tasks:
            service = Service(config, tasks, tcp_port=tcp_listener.getsockname()[1])
            tasks.create_task(service.accept_peers(peer_listener))
            tasks.create_task(service.accept_peers(tcp_listener))
            report(Ready(f"{config.settings.host}:{service.address.tcp_port}"))
            await service.accept_workers(worker_listener)


if __name__ == "__main__":
    child_main(MessengerProcess, serve)
