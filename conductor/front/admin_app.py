"""The listener for those who look after the cluster (`http.admin_listen`), with keys of its own.

Owns: what is reached there, by whom. Does not know: what the routes show (`monitoring`).
"""

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from conductor.front.access import AccessControl, KeyLimits, KeyRing
from conductor.front.admin import admin
from conductor.front.boundary import Boundary, answer_errors
from conductor.front.front import Front
from conductor.front.monitoring import monitoring


def create_admin_app(front: Front) -> FastAPI:
    """Raises ConfigError for unusable keys."""
    app = FastAPI(title="mooncake-serve, admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    keys_file = front.config.admin_keys_file
    if keys_file is not None:
        app.add_middleware(AccessControl, ring=KeyRing(keys_file), limits=KeyLimits(), metrics=front.metrics)
    app.add_middleware(Boundary)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    app.include_router(admin(front.link, is_only_local=keys_file is None))
    app.include_router(monitoring(front.registry, front.display, front.link))
    answer_errors(app)
    return app
