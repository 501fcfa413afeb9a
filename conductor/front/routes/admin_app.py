"""The listener for those who look after the cluster (`http.admin_listen`).

Owns: what is reached there. Does not know: who may (`admin_access`), what the routes show (`monitoring`).
"""

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from conductor.front.access.admin_access import AdminAccess
from conductor.front.http.boundary import Boundary, answer_errors
from conductor.front.routes.admin import admin
from conductor.front.routes.monitoring import monitoring
from conductor.front.routes.shared import Front


def create_admin_app(front: Front, access: AdminAccess) -> FastAPI:
    """`access`: who may use what is reached there."""
    app = FastAPI(title="mooncake-serve, admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Boundary)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    app.include_router(admin(front.link, access))
    app.include_router(monitoring(front.registry, front.display, front.link, access))
    answer_errors(app)
    return app
