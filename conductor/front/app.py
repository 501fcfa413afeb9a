"""The routes.

Owns: paths, readiness, and that every error has OpenAI's body. Does not know: how an answer comes about
(`generation`, `response`).
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from conductor.display import Display
from conductor.front.access import AccessControl, KeyRing
from conductor.front.admin import admin
from conductor.front.answer import AnswerFormat
from conductor.front.boundary import Boundary, read_body
from conductor.front.config import FrontConfig
from conductor.front.errors import RETRY_AFTER_S, UnavailableError, error_response
from conductor.front.generation import Generation
from conductor.front.grammars import WantedGrammar
from conductor.front.link import Link
from conductor.front.metrics import Metrics, Outcome
from conductor.front.model import ServedModel
from conductor.front.monitoring import monitoring
from conductor.front.response import GenerationResponse, outcome_of
from conductor.front.schema import ChatCompletionRequest, CompletionRequest, check_model, shortened
from conductor.front.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from conductor.front.validation import Endpoint, Job, fit_into_pool, read_job
from mooncake.api_keys import ApiKey
from mooncake.errors import GrammarError, OverloadedError, RequestError
from mooncake.messages import ClusterState

UNSERVED_ENDPOINTS = tuple(
    f"/v1/{name}"
    for name in (
        *("assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals", "files"),
        *("fine_tuning", "images", "messages", "moderations", "realtime", "rerank", "responses", "score"),
        *("threads", "uploads", "vector_stores", "videos"),
    )
)
"""OpenAI's and vLLM's, so that a client learns that it is not a misspelling. 404: clients retry a 501"""

# Tokenizing more than this takes long enough (milliseconds) to be felt in the streams on the same loop.
_MAX_INLINE_BYTES = 4096
_MAX_WAITING_GRAMMARS = 16

log = logging.getLogger(__name__)
T = TypeVar("T")


class Front:
    """What the routes share: the link to the cluster, the model, the metrics."""

    def __init__(
        self,
        config: FrontConfig,
        model: ServedModel,
        registry: CollectorRegistry,
        display: Display | None = None,
    ) -> None:
        """Raises ConfigError for endpoints that cannot be used."""
        self.config, self.model = config, model
        self.registry, self.display = registry, display
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

    async def read_job(self, endpoint: Endpoint, body: bytes, key: ApiKey | None) -> Job:
        """The valid job in `body`, for a cluster that could hold it. Raises RequestError.

        Whether there are instances to serve it is the Conductor's to say: a lost one may come back.
        """
        read = functools.partial(
            read_job,
            endpoint,
            body,
            self.model,
            self.config.served_model_name,
            self.config.max_choices,
            key,
        )
        job = fit_into_pool(await _beside(body, read), self.cluster(), self.model.block_size)
        if job.grammar is not None:
            await self._check(job.grammar)
        return job

    async def _check(self, grammar: WantedGrammar) -> None:
        grammars = self.model.grammars
        if grammars.num_waiting >= _MAX_WAITING_GRAMMARS:
            raise OverloadedError(f"{grammars.num_waiting} grammars are being compiled", RETRY_AFTER_S)
        try:
            await grammars.get(grammar.text)
        except GrammarError as error:
            raise RequestError(
                f"{grammar.field}: {error}", param=grammar.field, code="invalid_schema"
            ) from None

    async def about_tokens(
        self, answer: Callable[[bytes, ServedModel, str], dict[str, Any]], request: Request
    ) -> dict[str, Any]:
        """What `answer` makes of a request's body. Raises RequestError."""
        body = await read_body(request, self.config.max_request_bytes)
        return await _beside(body, functools.partial(answer, body, self.model, self.config.served_model_name))


def create_app(front: Front) -> FastAPI:
    """The HTTP API of `front`, whose link someone else runs. Raises ConfigError for unusable API keys."""
    app = FastAPI(title="mooncake-serve", docs_url=None, redoc_url=None, redirect_slashes=False)
    if (keys_file := front.config.api_keys_file) is not None:
        app.add_middleware(AccessControl, ring=KeyRing(keys_file), metrics=front.metrics)
    if front.config.cors_origins:  # outside: browsers ask for permission without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=front.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Boundary)

    async def generate(endpoint: Endpoint, request: Request) -> Response:
        arrived_s = asyncio.get_running_loop().time()
        try:
            body = await read_body(request, front.config.max_request_bytes)
            key: ApiKey | None = getattr(request.state, "api_key", None)
            job = await front.read_job(endpoint, body, key)
        except RequestError as error:
            front.metrics.request_ended(outcome_of(error))
            raise
        except ClientDisconnect:
            front.metrics.request_ended(Outcome.ABORTED)
            raise
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

    @app.post("/tokenize", openapi_extra=_described(TokenizeRequest))
    async def tokenized(request: Request) -> Response:
        return JSONResponse(await front.about_tokens(tokenize, request))

    @app.post("/detokenize", openapi_extra=_described(DetokenizeRequest))
    async def detokenized(request: Request) -> Response:
        return JSONResponse(await front.about_tokens(detokenize, request))

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
        check_model(name, front.config.served_model_name)
        return JSONResponse(served)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/live")
    async def live() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def served_version() -> Response:
        return JSONResponse({"version": version("mooncake-serve")})

    @app.get("/ready")
    async def ready() -> Response:
        cluster = front.ready_cluster()
        return JSONResponse(
            {"status": "ready", "num_prefill": cluster.num_prefill, "num_decode": cluster.num_decode}
        )

    app.include_router(admin(front.link))
    app.include_router(monitoring(front.registry, front.display, front.link))

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
            if request.url.path.startswith(UNSERVED_ENDPOINTS):
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

    return app


async def _beside(body: bytes, read: Callable[[], T]) -> T:
    """In a thread, if `body` may take long."""
    return read() if len(body) <= _MAX_INLINE_BYTES else await asyncio.to_thread(read)


def _described(body: type[BaseModel]) -> dict[str, Any]:
    # FastAPI describes only bodies that it parses itself. `$id` makes the references inside the schema local.
    schema = {"$id": body.__name__, **body.model_json_schema()}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
