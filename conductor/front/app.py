"""The routes.

Owns: paths, readiness, and that every error has OpenAI's body. Does not know: how an answer comes about
(`generation`, `response`).
"""

import asyncio
import logging
import time
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from conductor.front.access import AccessControl, KeyRing
from conductor.front.admin import admin
from conductor.front.answer import AnswerFormat
from conductor.front.boundary import Boundary
from conductor.front.context_api import context_caches
from conductor.front.errors import error_response
from conductor.front.front import Front, key_of
from conductor.front.generation import Generation
from conductor.front.metrics import Outcome
from conductor.front.monitoring import monitoring
from conductor.front.response import GenerationResponse, outcome_of
from conductor.front.schema import ChatCompletionRequest, CompletionRequest, check_model, described, shortened
from conductor.front.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from conductor.front.validation import Endpoint
from mooncake.errors import RequestError

UNSERVED_ENDPOINTS = tuple(
    f"/v1/{name}"
    for name in (
        *("assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals", "files"),
        *("fine_tuning", "images", "messages", "moderations", "realtime", "rerank", "responses", "score"),
        *("threads", "uploads", "vector_stores", "videos"),
    )
)
"""OpenAI's and vLLM's, so that a client learns that it is not a misspelling. 404: clients retry a 501"""

log = logging.getLogger(__name__)


def create_app(front: Front) -> FastAPI:
    """The HTTP API of `front`, whose link someone else runs. Raises ConfigError for unusable API keys."""
    app = FastAPI(title="mooncake-serve", docs_url=None, redoc_url=None, redirect_slashes=False)
    if (keys_file := front.config.api_keys_file) is not None:
        app.add_middleware(AccessControl, ring=KeyRing(keys_file), metrics=front.metrics)
    if front.config.cors_origins:  # outside: browsers ask for permission without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=front.config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Boundary)

    async def generate(endpoint: Endpoint, request: Request) -> Response:
        arrived_s = asyncio.get_running_loop().time()
        try:
            body = await front.read_body(request)
            job = await front.read_job(endpoint, body, key_of(request))
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

    @app.post("/v1/chat/completions", openapi_extra=described(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await generate(Endpoint.CHAT, request)

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await generate(Endpoint.COMPLETION, request)

    @app.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenized(request: Request) -> Response:
        return JSONResponse(await front.about_tokens(tokenize, request))

    @app.post("/detokenize", openapi_extra=described(DetokenizeRequest))
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
    app.include_router(context_caches(front))
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
