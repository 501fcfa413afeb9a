"""A standby Conductor: while it waits to lead, its HTTP routes name the leader.

`mooncake.leadership.terms` waits to lead. `conductor.process.service` makes the Conductor itself once this
process leads.

Owns: these routes, until the process leads. Does not know: elections, requests of clients, which fronts
answer.
"""

import contextlib
import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from conductor.front.access.admin_access import DASHBOARD
from conductor.front.config import FrontConfig
from conductor.front.errors import UnavailableError
from conductor.front.http.boundary import response_to
from conductor.front.http.certificate import Certificate
from conductor.front.http.server import HttpServer, listen
from conductor.front.http.timers import Timeouts
from conductor.telemetry.leadership_metrics import register_leadership, register_reach
from mooncake.config.cluster_section import ClusterConfig
from mooncake.config.settings import host_and_port
from mooncake.endpoints import bracketed, is_any_address
from mooncake.leadership import terms
from mooncake.leadership.leaders import Candidate, Fit, Reach
from mooncake.leadership.terms import Standby, Term
from mooncake.node.process import Progress, Ready, report

_TIMEOUTS = Timeouts(10.0, 10.0, 10.0)
_MAX_PENDING_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def leading(
    cluster: ClusterConfig,
    life: int,
    front: FrontConfig,
    endpoint: str,
    fit: Fit,
    listener: socket.socket,
    registry: CollectorRegistry,
) -> AsyncIterator[Term]:
    """Enter a context in which this process leads, like `mooncake.leadership.terms.leading`.

    While the process waits to lead, it serves a standby's routes.

    Args:
        cluster, life: The arguments of `mooncake.leadership.terms.leading`.
        front: The settings of the front that this process has when it leads.
        endpoint: The endpoint at which workers and fronts find the Conductor.
        fit: The properties that all Conductors of the cluster share.
        listener: The listening socket of the front, which stays open.
        registry: The registry that gets the metrics of leadership.
    """
    reach, routes, leads = Reach(), StandbyRoutes(registry), False
    candidate = Candidate(endpoint, _url(front, listener, endpoint), fit)

    def on_wait(state: Standby) -> None:
        if state != routes.state:
            routes.state = state
            report(Progress(state.waits_for, 0, 0) if state.leader is None else Ready(state.waits_for))

    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as standing_by:
        if cluster.has_standbys:
            register_reach(registry, reach)
            register_leadership(registry, lambda: leads)
            await standing_by.enter_async_context(routes.served(front, listener))
        term = await stack.enter_async_context(terms.leading(cluster, candidate, life, reach, on_wait))
        await standing_by.aclose()
        leads = True
        yield term


def _url(front: FrontConfig, listener: socket.socket, endpoint: str) -> str:
    """Return the URL of the dashboard and the admin routes of this process."""
    host, port = front.host, listener.getsockname()[1]
    if front.admin_listen is not None:
        host, port = host_and_port(front.admin_listen)
    if is_any_address(host):  # the host of the Conductor's endpoint can be reached by other hosts
        host = urlsplit(endpoint).hostname or host
    scheme = "http" if front.tls_cert is None else "https"
    return f"{scheme}://{bracketed(host)}:{port}"


class StandbyRoutes:
    """The HTTP routes of a standby. `state` has the leader, and the reason why the standby waits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.state = Standby(None, "is about to start")

    @contextlib.asynccontextmanager
    async def served(self, config: FrontConfig, listener: socket.socket) -> AsyncIterator[None]:
        """Serve a standby's routes while the block runs.

        `listener` stays open: after the block, new connections wait in it.
        """
        certificate = None
        if config.tls_cert is not None and config.tls_key is not None:
            certificate = Certificate(config.tls_cert, config.tls_key)
        listeners = [listener.dup()]
        if config.admin_listen is not None:
            listeners.append(listen(*host_and_port(config.admin_listen), "--http-admin-listen"))
        tls = None if certificate is None else certificate.context
        servers = [HttpServer(self._app(), one, _TIMEOUTS, _MAX_PENDING_BYTES, tls) for one in listeners]
        for server in servers:
            server.start()
        try:
            yield
        finally:
            for server in servers:
                server.close()
                await server.abort()

    def _app(self) -> Starlette:
        methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/live", self._health),
                Route("/metrics", self._metrics),
                Route(DASHBOARD, self._dashboard),
                Route("/{path:path}", self._refuse, methods=methods),
            ]
        )

    async def _health(self, _: Request) -> Response:
        leader = self.state.leader
        return JSONResponse({"status": "standby", "leader": None if leader is None else leader.url})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _dashboard(self, request: Request) -> Response:
        if self.state.leader is None:
            return await self._refuse(request)
        return RedirectResponse(self.state.leader.url + DASHBOARD)

    async def _refuse(self, _: Request) -> Response:
        leader = self.state.leader
        hint = "" if leader is None else f"; the dashboard and /admin are at {leader.url}"
        return response_to(UnavailableError(f"this conductor {self.state.waits_for}{hint}"))
