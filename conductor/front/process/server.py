"""Start and stop of the front inside an event loop that other parts share.

Owns: the listening sockets, when the HTTP servers and the link begin and end. Does not know: routes, signals.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from conductor.front.access.admin_access import AdminAccess
from conductor.front.caches.cache_store import CacheStore
from conductor.front.caches.context_caches import ContextCaches
from conductor.front.config import FrontConfig
from conductor.front.errors import UnavailableError
from conductor.front.generation.link import ConductorPeer
from conductor.front.http.boundary import RequestIds
from conductor.front.http.certificate import Certificate
from conductor.front.http.draining import FrontDrain
from conductor.front.http.server import HttpServer, listen
from conductor.front.http.timers import Timeouts
from conductor.front.openai.model import ServedModel
from conductor.front.routes.admin import create_admin_app
from conductor.front.routes.app import create_app
from conductor.front.routes.shared import FrontState
from conductor.telemetry.display import Display
from mooncake import freed_memory
from mooncake.config.settings import host_and_port
from mooncake.endpoints import bracketed

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer

_FIRST_ANSWER_S = 1.0
"""Seconds to wait for the Conductor's first answer before the front listens."""
_LAST_WORDS_S = 1.0
"""Seconds in which clients can read the error that ends their answers."""
_MIN_PENDING_BYTES = 32 << 20
"""The bytes that all incomplete requests of a listener may hold together.

If two requests of the largest size need more, the limit is what these two need.
"""
_TIDY_S = 5.0
_IDLE_S = 75.0
"""Seconds for which an idle connection stays open.

Clients usually keep connections for a shorter time, so the client's side closes them.
"""


async def serve(
    config: FrontConfig,
    model: ServedModel,
    conductor: ConductorPeer,
    registry: CollectorRegistry,
    listener: socket.socket | None = None,
    on_listening: Callable[[str], None] = lambda _: None,
    display: Display | None = None,
    cache_store: CacheStore | None = None,
    tracer: "Tracer | None" = None,
    drain: FrontDrain | None = None,
) -> None:
    """Serve the front until cancelled. Requests that are open at that time get an error.

    `listener` is a socket from `listen` (default: made here from `config`); it is closed at the end.
    `on_listening` gets the address, such as `http://127.0.0.1:8000`, once requests are answered.
    `display` is the display of this process's Conductor, with which the front shows the cluster too; None if
    the Conductor is in another process.
    `cache_store` keeps the context caches; a front without a store makes no context caches.
    `tracer` makes the spans of requests, and exports them until this function ends.
    `drain` lets the caller drain the front before the cancellation; None if the front is never drained.
    Raises ConfigError if a port, an endpoint, the certificate, a file of API keys, the store of context
    caches or the trace file cannot be used. Raises an ExceptionGroup with a ConfigError if the Conductor
    refuses the front.
    """
    certificate = None if config.tls_cert is None else Certificate(config.tls_cert, _key_of(config))
    with contextlib.ExitStack() as sockets:
        main = sockets.enter_context(contextlib.closing(listener or listen(config.host, config.port)))
        admin = None
        if config.admin_listen is not None:
            admin = listen(*host_and_port(config.admin_listen), "--http-admin-listen")
            sockets.enter_context(contextlib.closing(admin))
        caches = None
        if cache_store is not None:
            caches = await asyncio.to_thread(
                ContextCaches,
                config.context_cache_tokens,
                cache_store,
                await cache_store.load(model.fingerprint),
                model.fingerprint,
                model.block_size,
                asyncio.get_running_loop().time(),
            )
        front = FrontState(config, model, conductor, registry, caches, display, tracer, drain)
        sockets.callback(front.close)
        if tracer is not None:
            sockets.enter_context(tracer.exporting())  # starts a thread, so all forks must have been made
        access = AdminAccess(config, front.metrics)
        app = front.drain.counting(create_app(front, access))
        servers = [_http_server(app, main, config, certificate)]
        front.drain.on_begin = servers[0].keep_no_connections
        if admin is not None:
            servers.append(_http_server(create_admin_app(front, access), admin, config, certificate))
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(front.link.run()), group.create_task(front.reading.run())]
            beside.append(group.create_task(_tidy_up_behind(servers)))
            if certificate is not None:
                beside.append(group.create_task(certificate.follow()))
            with contextlib.suppress(TimeoutError):  # requests then get an error of the link
                await asyncio.wait_for(front.link.first_answer.wait(), _FIRST_ANSWER_S)
            host, port = main.getsockname()[:2]
            scheme = "http" if certificate is None else "https"
            for server in servers:
                server.start()
            try:
                on_listening(f"{scheme}://{bracketed(host)}:{port}")
                await asyncio.Event().wait()
            finally:
                for server in servers:
                    server.close()
                await front.link.end(UnavailableError("the server is shutting down"))
                await _wait_closed(servers, _LAST_WORDS_S)
                for server in servers:
                    await server.abort()
                for task in beside:
                    task.cancel()


async def _wait_closed(servers: Sequence[HttpServer], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for server in servers:
                await server.wait_closed()


async def _tidy_up_behind(servers: Sequence[HttpServer]) -> None:
    """Return the memory of ended connections to the operating system now and then, until cancelled.

    Another thread does the work, as it would stop the event loop.
    """
    while True:
        await asyncio.sleep(_TIDY_S)
        have_gone = [server.connections.crowd_has_gone() for server in servers]
        if any(have_gone):
            await asyncio.to_thread(freed_memory.release_freed_memory)


def _key_of(config: FrontConfig) -> Path:
    assert config.tls_key is not None, "the configuration has both or none"
    return config.tls_key


def _http_server(
    app: ASGIApp, listener: socket.socket, config: FrontConfig, certificate: Certificate | None
) -> HttpServer:
    return HttpServer(
        RequestIds(app),
        listener,
        Timeouts(config.request_timeout_s, config.send_timeout_s, _IDLE_S),
        max(_MIN_PENDING_BYTES, 2 * config.max_request_bytes),
        None if certificate is None else certificate.context,
    )
