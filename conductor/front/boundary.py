"""Where HTTP comes in: ids of requests, the size of bodies, and what becomes of bugs.

Owns: that every response has an id and that no exception leaves without OpenAI's error body.
Does not know: routes.
"""

import logging
import re
import secrets

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.front.errors import error_response
from conductor.front.schema import REQUEST_ID_PATTERN
from mooncake.errors import RequestError

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

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s met a bug", state["request_id"])
            if started:
                raise
            error = RequestError("internal error; the server's log says more", status=500, code="internal")
            await error_response(error)(scope, receive, send_with_id)
