"""The routes for monitoring: `/metrics` for Prometheus, `/dashboard` for people.

Owns: these paths. Does not know: the metrics, the page.
"""

import asyncio
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgspec
import xxhash
from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from conductor.front.access.admin_access import DASHBOARD, AdminAccess
from conductor.front.generation.link import Link
from conductor.telemetry.display import Display
from mooncake.errors import RequestError

_KEPT_S = 0.5
"""Seconds for which the dashboard's state is cached, so that several open pages cost as much as one."""
_METRICS_KEPT_S = 0.1
"""Seconds for which a scrape's answer is cached. Scrapes need no key, so constant scraping must be cheap."""
_PAGE = {
    "": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/app.css": ("app.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'",
    "x-content-type-options": "nosniff",
}


def monitoring(
    registry: CollectorRegistry, display: Display | None, link: Link, access: AdminAccess
) -> APIRouter:
    """Return the routes for monitoring.

    Without a Conductor in this process (`display` is None) there are only the front's metrics.
    """
    router = APIRouter()

    def metrics_text() -> bytes:
        own = generate_latest(registry)
        return own if display is None else own + display.metrics_text().encode()

    text = _Kept(metrics_text, _METRICS_KEPT_S)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(text.latest(), media_type=CONTENT_TYPE_LATEST)

    if display is not None:
        router.include_router(_dashboard(_DashboardState(display, link), access))
    return router


class _Kept:
    """A text that `make` makes, cached for `kept_s` seconds."""

    def __init__(self, make: Callable[[], bytes], kept_s: float) -> None:
        self._make, self._kept_s = make, kept_s
        self._body = b""
        self._made_s: float | None = None

    def latest(self) -> bytes:
        """Return the text, at most `kept_s` seconds old."""
        now_s = asyncio.get_running_loop().time()
        if self._made_s is None or now_s > self._made_s + self._kept_s:
            self._body, self._made_s = self._make(), now_s
        return self._body


class _DashboardState:
    """The state that the dashboard shows, as JSON: of the cluster, and of single requests."""

    def __init__(self, display: Display, link: Link) -> None:
        self._display, self._link = display, link
        self._kept = _Kept(lambda: msgspec.json.encode(display.state(link.num_received)), _KEPT_S)

    def body(self) -> bytes:
        """Return the cluster's state as JSON."""
        return self._kept.latest()

    def timeline(self, request_id: str) -> bytes | None:
        """Return one request's timeline as JSON; None for an unknown request."""
        timeline: dict[str, Any] | None = self._display.timeline(request_id, self._link.num_received)
        return None if timeline is None else msgspec.json.encode(timeline)


def _dashboard(state: _DashboardState, access: AdminAccess) -> APIRouter:
    router = APIRouter(prefix=DASHBOARD, dependencies=[Depends(access.check_looking)])
    for path, (name, media_type) in _PAGE.items():
        content = files("conductor.front.routes.dashboard").joinpath(name).read_bytes()
        _add_file(router, path, content, media_type)

    @router.get("/state")
    async def cluster_state(request: Request) -> Response:
        return _unless_known(request, state.body())

    @router.get("/requests/{request_id}")
    async def request_timeline(request: Request, request_id: str) -> Response:
        body = state.timeline(request_id)
        if body is None:
            message = "no such request: it is not running and not among the latest that have ended"
            raise RequestError(message, status=404)
        return _unless_known(request, body)

    return router


def _add_file(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    @router.get(path, include_in_schema=False)
    async def file(request: Request) -> Response:
        return _unless_known(request, content, media_type)


def _unless_known(request: Request, body: bytes, media_type: str = "application/json") -> Response:
    """Return the body as a response, or a 304 if the client's ETag matches."""
    etag = f'"{xxhash.xxh3_64_hexdigest(body)}"'
    headers = {**_HEADERS, "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
