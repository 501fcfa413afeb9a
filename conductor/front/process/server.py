"""Starting and stopping the front inside an event loop that others share.

Owns: the listening socket, the HTTP server's and the link's lives. Does not know: routes, signals.
"""

import asyncio
import contextlib
import errno
import socket
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Generator
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from conductor.front.access.admin_access import AdminAccess
from conductor.front.config import FrontConfig
from conductor.front.errors import UnavailableError
from conductor.front.generation.link import ConductorPeer
from conductor.front.http.accepting import Accepting
from conductor.front.http.boundary import RequestIds
from conductor.front.http.certificate import Certificate
from conductor.front.http.connection import connections
from conductor.front.http.outbox import Outbox
from conductor.front.http.waiting import Listener
from conductor.front.openai.model import ServedModel
from conductor.front.routes.admin_app import create_admin_app
from conductor.front.routes.app import create_app
from conductor.front.routes.shared import Front
from conductor.telemetry.display import Display
from mooncake import freed_memory
from mooncake.config.settings import host_and_port
from mooncake.errors import ConfigError

_BACKLOG = 2048
_FIRST_ANSWER_S = 1.0  # of the Conductor; without one there is no use in waiting longer
_LAST_WORDS_S = 1  # until clients have read why their answers end
_SEND_TIMEOUT_S = 60.0  # in which a client has to take some of an answer that waits for it
_LEAST_PENDING_BYTES = 32 << 20  # that requests may hold together before they have arrived whole
_TLS_READ_BYTES = 16 << 10  # at once, which is a record; asyncio's own buffer of 256 KiB is each connection's
_TIDY_S = 5.0
_KEEP_ALIVE_S = 75  # longer than usual clients keep idle connections, so that they close first


class _Server(uvicorn.Server):
    """Leaves signals alone: they belong to the process that embeds it. Accepts connections in its own way."""

    def __init__(self, config: uvicorn.Config, listener: Listener) -> None:
        super().__init__(config)
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        accepting = Accepting(self._listener, self._connection, self.config.ssl)
        self.servers = [accepting]  # type: ignore[list-item]  # it is closed as a server is
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        # mypy has no names for the arguments of what uvicorn calls
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def listen(host: str, port: int, option: str | None = None) -> Listener:
    """Bind and listen, before anything else starts; port 0 takes a free one. Raises ConfigError.

    `option`: by which another address can be chosen, if not --host and --port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host {host!r} cannot be resolved ({error}); choose another with {option or '--host'}"
        ) from None
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # two sockets can be bound to one port as long as neither listens
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {option or '--port'}"
            ) from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


async def serve(
    config: FrontConfig,
    model: ServedModel,
    conductor: ConductorPeer,
    registry: CollectorRegistry,
    listener: Listener | None = None,
    on_listening: Callable[[str], None] = lambda _: None,
    display: Display | None = None,
) -> None:
    """Serve until cancelled; running answers then have `config.shutdown_grace_s` to end, others an error.

    `listener` is a socket from `listen` (default: made here from `config`); it is closed at the end.
    `on_listening` gets the address, such as `http://127.0.0.1:8000`, once requests are answered.
    `display` is the Conductor's of this process, if it has one: then the front shows the cluster too.
    Raises ConfigError for a port, endpoint, certificate or file of API keys that cannot be used.
    """
    certificate = None if config.tls_cert is None else Certificate(config.tls_cert, _key_of(config))
    SSLProtocol.max_size = _TLS_READ_BYTES  # asyncio has no public option; for the whole process
    with contextlib.ExitStack() as sockets:
        main = sockets.enter_context(contextlib.closing(listener or listen(config.host, config.port)))
        admin = None
        if config.admin_listen is not None:
            admin = listen(*host_and_port(config.admin_listen), "--http-admin-listen")
            sockets.enter_context(contextlib.closing(admin))
        if certificate is not None:
            main.use_tls()
            if admin is not None:
                admin.use_tls()
        front = Front(config, model, conductor, registry, display)
        sockets.callback(front.reading.close)
        access = AdminAccess(config, front.metrics)
        listeners = [(main, _server(create_app(front, access), main, config, certificate, front.outbox))]
        if admin is not None:
            admin_app = create_admin_app(front, access)
            listeners.append((admin, _server(admin_app, admin, config, certificate, front.outbox)))
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(front.link.run()), group.create_task(front.reading.run())]
            beside.append(group.create_task(_tidy_up_behind([listener for listener, _ in listeners])))
            if certificate is not None:
                beside.append(group.create_task(certificate.follow()))
            with contextlib.suppress(TimeoutError):  # requests are told then that it does not answer
                await asyncio.wait_for(front.link.first_answer.wait(), _FIRST_ANSWER_S)
            serving = [asyncio.create_task(server.serve(sockets=[socket])) for socket, server in listeners]
            try:
                host, port = main.getsockname()[:2]
                scheme = "http" if certificate is None else "https"
                on_listening(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")
                await asyncio.shield(asyncio.gather(*serving))
            finally:
                for _, server in listeners:
                    server.should_exit = True
                await asyncio.wait(serving, timeout=config.shutdown_grace_s)
                await front.link.end(UnavailableError("the server is shutting down"))
                await asyncio.gather(*serving)
                for task in beside:
                    task.cancel()


async def _tidy_up_behind(listeners: list[Listener]) -> None:
    """Give the memory of connections that have gone back to the system, beside the loop."""
    while True:
        await asyncio.sleep(_TIDY_S)
        have_gone = [listener.crowd_has_gone() for listener in listeners]
        if any(have_gone):
            await asyncio.to_thread(freed_memory.give_back)


def _key_of(config: FrontConfig) -> Path:
    assert config.tls_key is not None, "the configuration has both or none"
    return config.tls_key


def _server(
    app: FastAPI, listener: Listener, config: FrontConfig, certificate: Certificate | None, outbox: Outbox
) -> _Server:
    return _Server(
        uvicorn.Config(
            RequestIds(app),
            http=connections(
                listener,
                config.request_timeout_s,
                _SEND_TIMEOUT_S,
                max(_LEAST_PENDING_BYTES, 2 * config.max_request_bytes),
                outbox,
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # its warnings are of what clients send, who would fill the log
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=config.shutdown_grace_s + _LAST_WORDS_S,
            ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        ),
        listener,
    )
