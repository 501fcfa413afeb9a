"""Where HTTP comes in: ids of requests, the size of bodies, and what becomes of bugs.

Owns: that every response has an id and that no exception leaves without OpenAI's error body.
Does not know: routes.
"""

import asyncio
import logging
import re
import secrets

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.front.errors import UnavailableError, error_response
from conductor.front.schema import REQUEST_ID_PATTERN, shortened
from mooncake.errors import RequestError

DIRECT_SEND = "mooncake.direct_send"
"""extension of the scope: where to send a response's body, once its start has been sent the usual way"""

log = logging.getLogger(__name__)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises RequestError for more than `max_bytes`, ClientDisconnect if the client hangs up."""
    too_large = RequestError(
        f"the request body is larger than {max_bytes} bytes; send less", status=413, code="request_too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


class Boundary:
    """Outermost: gives each request an id that its response carries, and turns bugs into an error body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        state = scope.setdefault("state", {})
        text = given.decode("latin-1")
        state["request_id"] = text if re.fullmatch(REQUEST_ID_PATTERN, text) else secrets.token_hex(16)
        started = False
        # What lies between would pass each event of a stream on, one after the other, and change none.
        scope.setdefault("extensions", {})[DIRECT_SEND] = send

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if started:
                raise
            # The server ends, and cancels what has not: a request that is still being sent.
            await error_response(UnavailableError("the server is shutting down"))(
                scope, receive, send_with_id
            )
        except Exception:
            log.exception("request %s met a bug", state["request_id"])
            if started:
                raise
            error = RequestError("internal error; the server's log says more", status=500, code="internal")
            await error_response(error)(scope, receive, send_with_id)


def answer_errors(app: FastAPI, unserved: tuple[str, ...] = ()) -> None:
    """Call it behind the last route. `unserved` are paths that others have: their absence has a code."""
    known = ", ".join(
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    )

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path, code = shortened(request.url.path), None
        if error.status_code == 404:
            if request.url.path.startswith(unserved):
                code = "unsupported_endpoint"
            message = f"there is no {request.method} {path} here; this server has {known}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path} does not take {request.method}; use {allowed}"
        else:
            message = error.detail
        return error_response(
            RequestError(message, status=error.status_code, code=code), dict(error.headers or {})
        )
