"""Routes for operators: to drain instances, to change their roles, to move their modules and requests.

Owns: these paths, the application of the listener `http.admin_listen`. Does not know: who may use them
(`admin_access`), how an instance drains (`conductor.membership`), the other routes (`monitoring`).
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from conductor.front.access.admin_access import ADMIN, AdminAccess
from conductor.front.generation.link import Link
from conductor.front.http.boundary import Boundary, answer_errors
from conductor.front.openai.schema import shortened
from conductor.front.routes.monitoring import monitoring
from conductor.front.routes.shared import FrontState
from mooncake.config.spelling import did_you_mean
from mooncake.errors import RequestError
from mooncake.messages.migration import LAYERS_PATTERN, LEAST_SHARE, MOST_SHARE, LayerRange, ModulesPart
from mooncake.messages.operators import (
    ChangeRole,
    Drain,
    InstanceList,
    ListInstances,
    Migrate,
    Migrates,
    MoveModules,
    OperatorOrder,
    Ordered,
)
from mooncake.messages.workers import Role

MOST_HEADS = 1 << 16
MODULES_SINCE = 28
"""The first protocol version of Conductors that move modules."""


def admin(link: Link, access: AdminAccess) -> APIRouter:
    """Return the routes of operators, below `/admin`.

        GET /instances                                        list the instances
        POST /instances/NAME/drain                            drain one, which then ends unless ?stay=true
        POST /instances/NAME/serve                            withdraw an order to drain or to switch roles
        POST /instances/NAME/role?role=ROLE                   change its role
        POST /instances/NAME/heads?to=HELPER&num=1            move the last KV head to a helper
        POST /instances/NAME/layers?to=HELPER&layers=10:20    move layers to a helper
        POST /instances/NAME/sequences?to=HELPER&share=0.5    move the first half of sequences to a helper
        POST /instances/NAME/back?from=HELPER                 move all modules back, whatever they are
        POST /requests/ID/migrate?to=NAME                     move a running request

    `drain` and `role` are refused if no instance would be left for prefill or decode, unless `?force=true`.
    """
    router = APIRouter(
        prefix=ADMIN, dependencies=[Depends(access.check_acting), Depends(_check_names_of_parameters)]
    )

    async def ordered(order: Callable[[int], OperatorOrder]) -> Response:
        answer = await link.order(order)
        assert isinstance(answer, Ordered)
        if answer.status is None:
            raise RequestError(answer.refusal, status=404, code="unknown_instance")
        if answer.refusal:
            raise RequestError(answer.refusal, status=409, code="refused")
        return _json(answer.status)

    @router.get("/instances")
    async def instances() -> Response:
        answer = await link.order(ListInstances)
        assert isinstance(answer, InstanceList)
        return _json({"instances": answer.instances, "epoch": answer.epoch})

    @router.post("/instances/{name}/drain")
    async def drain(name: str, force: bool = False, stay: bool = False) -> Response:
        return await ordered(lambda number: Drain(number, name, force=force, stays=stay))

    @router.post("/instances/{name}/serve")
    async def serve(name: str) -> Response:
        return await ordered(lambda number: Drain(number, name, is_wanted=False))

    @router.post("/instances/{name}/role")
    async def role(name: str, role: Role, force: bool = False) -> Response:
        return await ordered(lambda number: ChangeRole(number, name, role, force))

    @router.post("/instances/{name}/heads")
    async def heads(name: str, to: str, num: Annotated[int, Query(ge=1, le=MOST_HEADS)]) -> Response:
        return await moved(lambda number: MoveModules(number, name, to, ModulesPart(num)))

    @router.post("/instances/{name}/layers")
    async def layers(
        name: str, to: str, layers: Annotated[str, Query(json_schema_extra={"pattern": LAYERS_PATTERN})]
    ) -> Response:
        try:
            wanted = LayerRange.parse(shortened(layers))
        except ValueError as error:
            raise RequestError(str(error), param="layers") from None
        return await moved(lambda number: MoveModules(number, name, to, ModulesPart(layers=wanted)))

    @router.post("/instances/{name}/sequences")
    async def sequences(
        name: str, to: str, share: Annotated[float, Query(ge=LEAST_SHARE, le=MOST_SHARE)]
    ) -> Response:
        return await moved(lambda number: MoveModules(number, name, to, ModulesPart(share=share)))

    @router.post("/instances/{name}/back")
    async def back(name: str, helper: Annotated[str, Query(alias="from")]) -> Response:
        return await moved(lambda number: MoveModules(number, name, helper))

    async def moved(order: Callable[[int], MoveModules]) -> Response:
        if link.cluster is not None and link.cluster.version < MODULES_SINCE:
            reason = "the conductor is of the last release, which moves no modules; upgrade it first"
            raise RequestError(reason, status=409, code="refused")
        return await ordered(order)

    @router.post("/requests/{request_id}/migrate")
    async def migrate(request_id: str, to: str | None = None) -> Response:
        migrates = await link.order(lambda number: Migrate(number, request_id, to))
        assert isinstance(migrates, Migrates)
        if migrates.source is None:
            reason = f"no request {shortened(request_id)!r} is running"
            raise RequestError(reason, status=404, code="unknown_request")
        if migrates.destination is None:
            reason = f"request {shortened(request_id)!r} stays: {migrates.refusal}"
            raise RequestError(reason, status=409, code="cannot_migrate")
        return JSONResponse(
            {"id": request_id, "source": migrates.source, "destination": migrates.destination}
        )

    return router


async def _check_names_of_parameters(request: Request) -> None:
    """Check that the route knows each query parameter, and that none is repeated. Raises RequestError.

    Without this check an order to drain with a misspelt `stay` would end the instance.
    """
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        shown = shortened(name)
        if name not in known:
            expected = f"expected {' or '.join(known)}" if known else "expected none"
            meant = did_you_mean(shown, known) or f"; {expected}"
            raise RequestError(f"unknown parameter {shown!r} in the query{meant}", param=shown)
        if names.count(name) > 1:
            raise RequestError(f"{name}: is in the query more than once; send one", param=name)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def create_admin_app(front: FrontState, access: AdminAccess) -> FastAPI:
    """Return the application of the listener `http.admin_listen`. `access` checks its clients."""
    app = FastAPI(title="mooncake-serve, admin", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Boundary)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    app.include_router(admin(front.link, access))
    app.include_router(monitoring(front.registry, front.display, front.link, access))
    answer_errors(app)
    return app
