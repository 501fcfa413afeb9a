"""The boundary of the application: ids of requests, the size of bodies, and responses to errors.

`RequestIds` is around each application. In the clients' application, `Boundary` is inside the CORS
middleware, so that errors too have its headers.

Owns: the id of every request that reaches an application, and OpenAI's error body for an exception before
its response has started. Does not know: routes.
"""

import asyncio
import difflib
import logging
import re
import secrets

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.front.errors import UnavailableError, error_response
from conductor.front.openai.body import ReceivedBody
from conductor.front.openai.schema import REQUEST_ID_PATTERN, shortened
from mooncake.errors import RequestError

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_TRACE_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<id>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-|$)"
)
_ID_HEADERS = frozenset({b"x-request-id", b"traceparent"})
log = logging.getLogger(__name__)


async def read_body(request: Request, max_bytes: int) -> ReceivedBody:
    """Return a request's body.

    Raises RequestError for a body of more than `max_bytes`, ClientDisconnect if the client hangs up.
    """
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body, has_more = ReceivedBody(), True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body.add(message.get("body", b""))
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        has_more = message.get("more_body", False)
    return body


def _too_large(max_bytes: int) -> RequestError:
    message = f"the request body is larger than {max_bytes} bytes; send less"
    return RequestError(message, status=413, code="request_too_large")


class RequestIds:
    """ASGI middleware that gives each request an id, which is in a header of the response.

    The id is the client's `x-request-id`, else the client's trace id (W3C Trace Context), else random. The
    application may replace it in `request.state.request_id`. A HEAD request is passed on as a GET request;
    the server leaves the body out of its response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        state = scope.setdefault("state", {})
        state["request_id"] = _given_id(scope) or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _given_id(scope: Scope) -> str | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = {name: value.decode("latin-1") for name, value in headers if name in _ID_HEADERS}
    if _REQUEST_ID.fullmatch(given.get(b"x-request-id", "")):
        return given[b"x-request-id"]
    trace = _TRACE_PARENT.match(given.get(b"traceparent", ""))
    return None if trace is None else trace["id"]


class Boundary:
    """ASGI middleware that answers a failed request with an error body.

    A request fails if an unexpected exception or a cancellation ends it before its response has started.
    """

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
            # The server ends, and cancels requests that have not ended, such as one whose body still arrives.
            await error_response(UnavailableError("the server is shutting down"))(scope, receive, send)
        except Exception:
            log.exception("request %s met a bug", scope["state"]["request_id"])
            if started:
                raise
            error = RequestError("internal error; the server's log says more", status=500, code="internal")
            await error_response(error)(scope, receive, send)


def response_to(error: RequestError | ClientDisconnect) -> Response:
    """Return the response to a request that failed with `error`.

    If the client has disconnected, the response is empty, as nobody reads it.
    """
    return error_response(error) if isinstance(error, RequestError) else Response(status_code=400)


def answer_errors(app: FastAPI, unserved: tuple[str, ...] = ()) -> None:
    """Make the application answer errors as OpenAI does.

    `unserved` are path prefixes of endpoints that other servers have and this server lacks.
    """

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return response_to(error.with_traceback(None))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return response_to(error)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_parameter(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return response_to(RequestError(f"{name}: {first['msg']}", param=name))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path, code, headers = shortened(request.url.path), None, dict(error.headers or {})
        if error.status_code == 404:
            hint = ";"
            if request.url.path.startswith(unserved):
                code = "unsupported_endpoint"
            elif near := difflib.get_close_matches(path, app.openapi()["paths"], n=1):
                hint = f"; did you mean {near[0]}?"
            message = f"there is no {request.method} {path} here{hint} GET /openapi.json lists what there is"
        elif error.status_code == 405:
            # Starlette names only the methods of the first route that fits.
            allowed = ", ".join(_methods_of(app, request.url.path))
            headers["Allow"] = allowed.replace("GET", "GET, HEAD")
            message = f"{path} does not take {request.method}; use {allowed}"
        else:
            message = error.detail
        return error_response(RequestError(message, status=error.status_code, code=code), headers)


def _methods_of(app: FastAPI, path: str) -> list[str]:
    """Return the methods of all routes of a path."""
    scope = {"type": "http", "path": path, "headers": []}
    return [
        method
        for method in ("DELETE", "GET", "POST")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.routes)
    ]
