"""The HTTP application of a front: its middleware, and the routes of inference.

Owns: which paths are served, and the order in which middleware sees a request. Does not know: how an answer
is made and sent (`generation`, `response`), when a front is ready (`shared`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from conductor.front.access.access import AccessControl, AccessMetrics, KeyLimits
from conductor.front.access.admin_access import AdminAccess
from conductor.front.access.key_ring import KeyRing
from conductor.front.errors import RateLimitedError
from conductor.front.generation.answer import AnswerFormat
from conductor.front.generation.http_span import TracedRequests
from conductor.front.generation.response import GenerationResponse, outcome_of
from conductor.front.http.boundary import Boundary, answer_errors, response_to
from conductor.front.http.disconnects import while_connected
from conductor.front.metrics import Denial, RequestOutcome
from conductor.front.openai.schema import ChatCompletionRequest, CompletionRequest, check_model
from conductor.front.requests.slo_classes import SLO_CLASS_HEADER, in_class
from conductor.front.requests.tokenization import AboutTokens, DetokenizeRequest, TokenizeRequest
from conductor.front.requests.validation import ApiEndpoint
from conductor.front.routes.admin import admin
from conductor.front.routes.context_api import context_caches
from conductor.front.routes.monitoring import monitoring
from conductor.front.routes.openapi import describe, described
from conductor.front.routes.pages import add_pages
from conductor.front.routes.shared import FrontState, claimed, key_of
from mooncake.errors import RequestError

UNSERVED_ENDPOINTS = tuple(
    f"/v1/{name}"
    for name in (
        *("assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals", "files"),
        *("fine_tuning", "images", "messages", "moderations", "realtime", "rerank", "responses", "score"),
        *("threads", "uploads", "vector_stores", "videos"),
    )
)
"""Endpoints of OpenAI and vLLM that are not served. The answer is 404, as clients would retry after a 501."""

# The front has its own metrics. FastAPI's would cost more than these, even to find at each request that they
# are not wanted.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}

log = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


class _DirectRoutes:
    """ASGI middleware that answers POST requests for some paths before FastAPI looks for a route.

    FastAPI's search for a route takes about 6% of the processor time of a request with an answer of 64
    events. The limit of 1.25 times the time of a bare application leaves no room for that. The application
    has these paths as routes as well, so that `/openapi.json` describes them.
    """

    def __init__(self, app: ASGIApp, answers: Mapping[str, Handler]) -> None:
        self._app, self._answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = None
        if scope["type"] == "http" and scope["method"] == "POST":
            answer = self._answers.get(scope["path"])
        if answer is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await answer(Request(scope, receive, send))
        except (RequestError, ClientDisconnect) as error:
            response = response_to(error.with_traceback(None))
        await response(scope, receive, send)


def create_app(front: FrontState, access: AdminAccess) -> FastAPI:
    """Make the HTTP API of `front`, whose link the caller runs. Raises ConfigError for unusable API keys.

    `access` checks the clients of the admin routes. These routes are served here unless they have a listener
    of their own.
    """
    app = FastAPI(
        title="mooncake-serve", docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_NO_TELEMETRY
    )

    async def generate(endpoint: ApiEndpoint, request: Request) -> Response:
        arrived_s, key = asyncio.get_running_loop().time(), key_of(request)
        try:
            with while_connected(request):
                body = await front.read_body(request)
                job = await front.read_job(endpoint, body, key)
            slo_class = request.headers.get(SLO_CLASS_HEADER)
            job = in_class(job, slo_class, front.config.slo_classes, key)
            job = claimed(request, job)
        except RateLimitedError:
            front.metrics.request_denied(Denial.LIMIT)
            raise
        except RequestError as error:
            front.metrics.request_ended(outcome_of(error))
            raise
        except ClientDisconnect:
            front.metrics.request_ended(RequestOutcome.ABORTED)
            raise
        if job.client_request_id is not None:
            request.scope["state"]["request_id"] = job.client_request_id
        log.debug("request %s is %s", request.scope["state"]["request_id"], job.id)
        return GenerationResponse(
            front.generation(job, arrived_s, request.scope["state"].get("span")),
            AnswerFormat(job, front.config.served_model_name, front.model),
            job.stream,
            front.metrics,
        )

    async def chat_completions(request: Request) -> Response:
        return await generate(ApiEndpoint.CHAT, request)

    async def completions(request: Request) -> Response:
        return await generate(ApiEndpoint.COMPLETION, request)

    generating = (
        ("/v1/chat/completions", chat_completions, ChatCompletionRequest),
        ("/v1/completions", completions, CompletionRequest),
    )
    _add_middleware(app, front, {path: answer for path, answer, _ in generating})
    for path, answer, schema in generating:
        app.add_api_route(path, answer, methods=["POST"], openapi_extra=described(schema))

    @app.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenized(request: Request) -> Response:
        return await front.about_tokens(AboutTokens.TOKENIZE, request)

    @app.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenized(request: Request) -> Response:
        return await front.about_tokens(AboutTokens.DETOKENIZE, request)

    _add_models(app, front)

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

    app.include_router(context_caches(front))
    if front.config.admin_listen is None:
        app.include_router(admin(front.link, access))
        app.include_router(monitoring(front.registry, front.display, front.link, access))
    add_pages(app, front.config.served_model_name)
    answer_errors(app, UNSERVED_ENDPOINTS)
    clients_need_key = front.config.api_keys_file is not None
    admins_need_key = clients_need_key or front.config.admin_keys_file is not None
    describe(app, clients_need_key=clients_need_key, admins_need_key=admins_need_key)
    return app


def _add_middleware(app: FastAPI, front: FrontState, answers: Mapping[str, Handler]) -> None:
    """Add the middleware. The middleware added last sees a request first.

    The order for a request is: CORS, the span (`TracedRequests`), the answers to errors (`Boundary`), the
    check of the API key (`AccessControl`), the paths that need no router (`_DirectRoutes`). CORS comes first
    because browsers ask for permission without a key, and should be able to read errors.
    """
    app.add_middleware(_DirectRoutes, answers=answers)
    if (keys_file := front.config.api_keys_file) is not None:
        ring, limits = KeyRing(keys_file), KeyLimits()
        app.add_middleware(AccessControl, ring=ring, limits=limits, metrics=front.metrics)
        AccessMetrics(ring, limits, front.registry)
    app.add_middleware(Boundary)
    if front.tracer is not None:
        paths, model_name = frozenset(answers), front.config.served_model_name
        app.add_middleware(TracedRequests, tracer=front.tracer, paths=paths, model_name=model_name)
    if front.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=front.config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )


def _add_models(app: FastAPI, front: FrontState) -> None:
    """Add the routes that list the one served model."""
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
