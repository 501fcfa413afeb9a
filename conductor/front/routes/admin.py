"""Routes and listener for operators: to take instances out of service, and back in, to move requests.

Owns: these paths, what the listener of `http.admin_listen` serves. Does not know: who may use them
(`admin_access`), how an instance drains (`conductor.policy`), what the other routes show (`monitoring`).
"""

from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import JSONResponse, Response

from conductor.front.access.admin_access import ADMIN, AdminAccess
from conductor.front.generation.link import Link
from conductor.front.http.boundary import Boundary, answer_errors
from conductor.front.routes.monitoring import monitoring
from conductor.front.routes.shared import Front
from mooncake.errors import RequestError


def admin(link: Link, access: AdminAccess) -> APIRouter:
    """Return the routes of operators.

    `POST /admin/instances/{name}/drain`, and `.../serve`, which undoes it; `/admin/requests/{id}/migrate`.
    """
    router = APIRouter(prefix=ADMIN, dependencies=[Depends(access.check_acting)])

    async def told(name: str, *, is_wanted: bool) -> Response:
        drains = await link.drain(name, is_wanted=is_wanted)
        if drains.state is None:
            raise RequestError(f"no instance {name!r} is registered", status=404, code="unknown_instance")
        return JSONResponse({"name": name, "state": drains.state, "num_requests": drains.num_requests})

    @router.post("/instances/{name}/drain")
    async def drain(name: str) -> Response:
        return await told(name, is_wanted=True)

    @router.post("/instances/{name}/serve")
    async def serve(name: str) -> Response:
        return await told(name, is_wanted=False)

    @router.post("/requests/{request_id}/migrate")
    async def migrate(request_id: str, to: str | None = None) -> Response:
        migrates = await link.migrate(request_id, to)
        if migrates.source is None:
            raise RequestError(f"no request {request_id!r} is running", status=404, code="unknown_request")
        if migrates.destination is None:
            reason = f"request {request_id!r} stays: {migrates.refusal}"
            raise RequestError(reason, status=409, code="cannot_migrate")
        return JSONResponse(
            {"id": request_id, "source": migrates.source, "destination": migrates.destination}
        )

    return router


def create_admin_app(front: Front, access: AdminAccess) -> FastAPI:
    """Return the application of `http.admin_listen`. `access`: who may use what is reached there."""
    app = FastAPI(title="mooncake-serve, admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Boundary)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    app.include_router(admin(front.link, access))
    app.include_router(monitoring(front.registry, front.display, front.link, access))
    answer_errors(app)
    return app
