"""The routes for those who run the cluster: taking instances out of service, and back in.

Owns: these paths, and that they answer on this machine only where no key of an admin is asked for: not to a
proxy on it, nor to a web page in a browser on it. Does not know: how an instance drains (`conductor.policy`).
"""

import ipaddress

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from conductor.front.link import Link
from mooncake.errors import RequestError

_ON_BEHALF = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via", "origin")
"""headers of who asks for somebody else: a proxy, a web page"""


def admin(link: Link, *, is_only_local: bool) -> APIRouter:
    """`POST /admin/instances/{name}/drain`, and `.../serve`, which undoes it."""
    router = APIRouter()

    async def told(request: Request, name: str, *, is_wanted: bool) -> Response:
        if is_only_local:
            _check_is_local(request)
        drains = await link.drain(name, is_wanted=is_wanted)
        if drains.state is None:
            raise RequestError(f"no instance {name!r} is registered", status=404, code="unknown_instance")
        return JSONResponse({"name": name, "state": drains.state, "num_requests": drains.num_requests})

    @router.post("/admin/instances/{name}/drain")
    async def drain(request: Request, name: str) -> Response:
        return await told(request, name, is_wanted=True)

    @router.post("/admin/instances/{name}/serve")
    async def serve(request: Request, name: str) -> Response:
        return await told(request, name, is_wanted=False)

    return router


def _check_is_local(request: Request) -> None:
    host = request.client.host if request.client is not None else ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local or any(header in request.headers for header in _ON_BEHALF):
        message = (
            "/admin answers on the server's own machine only, at a loopback address, and to no proxy or"
            " web page there; for others there are http.admin_listen and http.admin_keys_file"
        )
        raise RequestError(message, status=403, code="not_local")
