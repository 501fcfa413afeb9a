"""Starting and stopping the front inside an event loop that others share.

Owns: the listening socket, the HTTP server's and the link's lives. Does not know: routes, signals.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Generator

import uvicorn
from prometheus_client import CollectorRegistry

from conductor.display import Display
from conductor.front.app import create_app
from conductor.front.config import FrontConfig
from conductor.front.connection import connections
from conductor.front.errors import UnavailableError
from conductor.front.front import Front
from conductor.front.model import ServedModel
from mooncake.errors import ConfigError

_BACKLOG = 2048
_ACCEPTS_AT_ONCE = 64  # asyncio tries, and logs, each of them when descriptors run out
_LAST_WORDS_S = 1  # until clients have read why their answers end
_KEEP_ALIVE_S = 75  # longer than usual clients keep idle connections, so that they close first


class _Server(uvicorn.Server):
    """Leaves signals alone: they belong to the process that embeds it. Many may connect at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio made it as short as what is accepted at once


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen, before anything else starts; port 0 takes a free one. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be resolved ({error}); choose another with --host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # two sockets can be bound to one port as long as neither listens
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def check_certificate(config: FrontConfig) -> None:
    """Raises ConfigError for a certificate and key that HTTPS cannot be spoken with."""
    if config.tls_cert is None:
        return
    try:
        # A password would be asked for on the terminal.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        raise ConfigError(
            f"http.tls_cert {config.tls_cert} and http.tls_key {config.tls_key} cannot be used ({reason});"
            " expected a PEM certificate chain and its private key without password"
        ) from None


async def serve(
    config: FrontConfig,
    model: ServedModel,
    registry: CollectorRegistry,
    listener: socket.socket | None = None,
    on_listening: Callable[[str], None] = lambda _: None,
    display: Display | None = None,
) -> None:
    """Serve until cancelled; running answers then have `config.shutdown_grace_s` to end, others an error.

    `listener` is a socket from `listen` (default: made here from `config`); it is closed at the end.
    `on_listening` gets the address, such as `http://127.0.0.1:8000`, once requests are answered.
    `display` is the Conductor's of this process, if it has one: then the front shows the cluster too.
    Raises ConfigError for a port, endpoint, certificate or file of API keys that cannot be used.
    """
    check_certificate(config)
    listener = listener or listen(config.host, config.port)
    with contextlib.closing(listener):
        front = Front(config, model, registry, display)
        server = _Server(
            uvicorn.Config(
                create_app(front),
                http=connections(config.request_timeout_s),
                ws="none",
                lifespan="off",
                backlog=_ACCEPTS_AT_ONCE,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=config.shutdown_grace_s + _LAST_WORDS_S,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        async with asyncio.TaskGroup() as group:
            link = group.create_task(front.link.run())
            http = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                host, port = listener.getsockname()[:2]
                scheme = "http" if config.tls_cert is None else "https"
                on_listening(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")
                await asyncio.shield(http)
            finally:
                server.should_exit = True
                await asyncio.wait([http], timeout=config.shutdown_grace_s)
                await front.link.end(UnavailableError("the server is shutting down"))
                await http
                link.cancel()
