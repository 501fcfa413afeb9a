"""The routes.

Owns: paths, request bodies, readiness, and that every response has an id and every error OpenAI's body.
Does not know: how an answer comes about (`generation`, `response`).
"""

import asyncio
import functools
import logging
import re
import secrets
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.front.answer import AnswerFormat
from conductor.front.config import FrontConfig
from conductor.front.errors import UnavailableError, error_response
from conductor.front.generation import Generation
from conductor.front.link import Link
from conductor.front.metrics import Metrics, Outcome
from conductor.front.model import ServedModel
from conductor.front.monitoring import monitoring
from conductor.front.response import GenerationResponse, outcome_of
from conductor.front.schema import REQUEST_ID_PATTERN, ChatCompletionRequest, CompletionRequest, shortened
from conductor.front.validation import Endpoint, Job, fit_into_pool, read_job, unknown_model
from conductor.view import ClusterView
from mooncake.errors import RequestError
from mooncake.messages import ClusterState

# Tokenizing more than this takes long enough (milliseconds) to be felt in the streams on the same loop.
_MAX_INLINE_BYTES = 4096

log = logging.getLogger(__name__)


class Front:
    """What the routes share: the link to the cluster, the model, the metrics."""

    def __init__(
        self,
        config: FrontConfig,
        model: ServedModel,
        registry: CollectorRegistry,
        view: ClusterView | None = None,
    ) -> None:
        """Raises ConfigError for endpoints that cannot be used."""
        self.config, self.model = config, model
        self.registry, self.view = registry, view
        self.metrics = Metrics(registry, config.served_model_name, config.ttft_slo_s, config.tbt_slo_s)
        self.link = Link(
            config.control_endpoint,
            config.reply_endpoint,
            config.cluster_key,
            model.fingerprint,
            model.block_size,
            self.metrics.output_dropped,
        )

    def cluster(self) -> ClusterState:
        """The cluster's state. Raises UnavailableError if it is not known."""
        cluster = self.link.cluster
        if cluster is None:
            raise UnavailableError("not ready: the conductor does not answer")
        return cluster

    def ready_cluster(self) -> ClusterState:
        """The cluster's state. Raises UnavailableError that says what is missing, if it cannot serve."""
        cluster = self.cluster()
        missing = [
            f"no {role} instance"
            for role, num in (("prefill", cluster.num_prefill), ("decode", cluster.num_decode))
            if num == 0
        ]
        if missing:
            raise UnavailableError(f"not ready: {' and '.join(missing)} has registered")
        return cluster

    async def read_job(self, endpoint: Endpoint, body: bytes) -> Job:
        """The valid job in `body`, for a cluster that could hold it. Raises RequestError.

        Whether there are instances to serve it is the Conductor's to say: a lost one may come back.
        """
        read = functools.partial(
            read_job, endpoint, body, self.model, self.config.served_model_name, self.config.max_choices
        )
        job = read() if len(body) <= _MAX_INLINE_BYTES else await asyncio.to_thread(read)
        return fit_into_pool(job, self.cluster(), self.model.block_size)


def create_app(front: Front) -> FastAPI:
    """The HTTP API of `front`, whose link someone else runs."""
    app = FastAPI(title="mooncake-serve", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(_Boundary)

    async def generate(endpoint: Endpoint, request: Request) -> Response:
        arrived_s = asyncio.get_running_loop().time()
        try:
            body = await _read_body(request, front.config.max_request_bytes)
            job = await front.read_job(endpoint, body)
        except RequestError as error:
            front.metrics.request_ended(outcome_of(error))
            raise
        except ClientDisconnect:
            front.metrics.request_ended(Outcome.ABORTED)
            return Response(status_code=400)  # nobody reads it
        if job.client_request_id is not None:
            request.state.request_id = job.client_request_id
        log.debug("request %s is %s", request.state.request_id, job.id)
        return GenerationResponse(
            Generation(job, front.model, front.link, front.metrics, arrived_s),
            AnswerFormat(job, front.config.served_model_name, front.model),
            job.stream,
            front.metrics,
        )

    @app.post("/v1/chat/completions", openapi_extra=_described(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await generate(Endpoint.CHAT, request)

    @app.post("/v1/completions", openapi_extra=_described(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await generate(Endpoint.COMPLETION, request)

    served = {
        "id": front.config.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "mooncake-serve",
        "max_model_len": front.model.context_len,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [served]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != front.config.served_model_name:
            raise unknown_model(name, front.config.served_model_name)
        return JSONResponse(served)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        cluster = front.ready_cluster()
        return JSONResponse(
            {"status": "ready", "num_prefill": cluster.num_prefill, "num_decode": cluster.num_decode}
        )

    app.include_router(monitoring(front.registry, front.view, front.link))

    known = ", ".join(
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    )

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = shortened(request.url.path)
        if error.status_code == 404:
            message = f"there is no {request.method} {path}; this server has {known}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path} does not take {request.method}; use {allowed}"
        else:
            message = error.detail
        return error_response(
            RequestError(message, status=error.status_code, code=None), dict(error.headers or {})
        )

    return app


def _described(body: type[BaseModel]) -> dict[str, Any]:
    # FastAPI describes only bodies that it parses itself. `$id` makes the references inside the schema local.
    schema = {"$id": body.__name__, **body.model_json_schema()}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read_body(request: Request, max_bytes: int) -> bytes:
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


class _Boundary:
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
