"""Where HTTP comes in: ids of requests, the size of bodies, and what becomes of bugs.

`RequestIds` is around the whole application; `Boundary` is within what adds headers to all responses (CORS).

Owns: that every response has an id and that no exception leaves without OpenAI's error body.
Does not know: routes.
"""

import asyncio
import logging
import re
import secrets

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.front.errors import UnavailableError, error_response
from conductor.front.schema import REQUEST_ID_PATTERN, shortened
from mooncake.errors import RequestError

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
log = logging.getLogger(__name__)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises RequestError for more than `max_bytes`, ClientDisconnect if the client hangs up."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body, has_more = bytearray(), True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        has_more = message.get("more_body", False)
    return bytes(body)


def _too_large(max_bytes: int) -> RequestError:
    message = f"the request body is larger than {max_bytes} bytes; send less"
    return RequestError(message, status=413, code="request_too_large")


class RequestIds:
    """Gives each request an id that its response carries."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        state = scope.setdefault("state", {})
        text = given.decode("latin-1")
        state["request_id"] = text if _REQUEST_ID.fullmatch(text) else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class Boundary:
    """Turns bugs, and the server's end, into an error body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noting_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_start)
        except asyncio.CancelledError:
            if started:
                raise
            # The server ends, and cancels what has not: a request that is still being sent.
            await error_response(UnavailableError("the server is shutting down"))(scope, receive, send)
        except Exception:
            log.exception("request %s met a bug", scope["state"]["request_id"])
            if started:
                raise
            error = RequestError("internal error; the server's log says more", status=500, code="internal")
            await error_response(error)(scope, receive, send)


def response_to(error: RequestError | ClientDisconnect) -> Response:
    """What a request that cannot be answered gets; nobody reads it if the client has gone."""
    return error_response(error) if isinstance(error, RequestError) else Response(status_code=400)


def answer_errors(app: FastAPI, unserved: tuple[str, ...] = ()) -> None:
    """Call it behind the last route. `unserved` are paths that others have: their absence has a code."""

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return response_to(error)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return response_to(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path, code, headers = shortened(request.url.path), None, dict(error.headers or {})
        if error.status_code == 404:
            if request.url.path.startswith(unserved):
                code = "unsupported_endpoint"
            known = [
                f"{method.upper()} {known_path}"
                for known_path, operations in app.openapi()["paths"].items()
                for method in operations
            ]
            message = f"there is no {request.method} {path} here; this server has {', '.join(known)}"
        elif error.status_code == 405:
            # Starlette names those of the first route that fits.
            headers["Allow"] = allowed = ", ".join(_methods_of(app, request.url.path))
            message = f"{path} does not take {request.method}; use {allowed}"
        else:
            message = error.detail
        return error_response(RequestError(message, status=error.status_code, code=code), headers)


def _methods_of(app: FastAPI, path: str) -> list[str]:
    """Those of all routes of a path."""
    scope = {"type": "http", "path": path, "headers": []}
    return [
        method
        for method in ("DELETE", "GET", "POST")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.routes)
    ]
