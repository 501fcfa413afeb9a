"""The routes for those who run the cluster: taking instances out of service, and back in.

Owns: these paths. Does not know: who may use them (`admin_access`), how an instance drains
(`conductor.policy`).
"""

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from conductor.front.access.admin_access import ADMIN, AdminAccess
from conductor.front.generation.link import Link
from mooncake.errors import RequestError


def admin(link: Link, access: AdminAccess) -> APIRouter:
    """`POST /admin/instances/{name}/drain`, and `.../serve`, which undoes it."""
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

    return router
