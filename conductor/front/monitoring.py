"""The routes for those who look after the cluster: `/metrics` for Prometheus, `/dashboard` for people.

Owns: these paths. Does not know: what is measured, what the page draws.
"""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from conductor.front.link import Link
from conductor.view import ClusterView


def monitoring(registry: CollectorRegistry, view: ClusterView | None, link: Link) -> APIRouter:
    """Without a Conductor in this process there is only the front to tell about."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        body = generate_latest(registry)
        if view is not None:
            body += view.metrics_text().encode()
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    return router
