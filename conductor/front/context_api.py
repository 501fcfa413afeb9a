"""`/v1/context_caches`: a prompt's beginning is computed once, kept for a while, and used by id or name.

Owns: these routes, their bodies and answers. Does not know: which caches there are (`context_caches`), where
their blocks are kept (the Conductor's `contexts`).
"""

import asyncio
import functools
import time
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Request
from pydantic import Field, SkipValidation
from starlette.responses import JSONResponse, Response

from conductor.front.body import parse, refusing_depth
from conductor.front.context_caches import ContextCache
from conductor.front.fields import WHOLE, KnownFields, ListOf
from conductor.front.front import Front, beside, key_of
from conductor.front.generation import Generation
from conductor.front.model import ServedModel
from conductor.front.openapi import described
from conductor.front.prompt import ChatPrefix, check_num_messages, prefix_tokens, prompts_of, tenant_root
from conductor.front.reception import Event
from conductor.front.response import until_hang_up
from conductor.front.schema import (
    MAX_CACHE_NAME_CHARS,
    MAX_SALT_CHARS,
    Message,
    Priority,
    Text,
    TokenIds,
    check_message_fields,
    check_model,
)
from conductor.front.tools import MAX_TOOLS, ToolFields
from conductor.front.validation import Endpoint, Job, Prompt, UsageShown, fit_into_pool, priority_of
from mooncake.api_keys import ApiKey
from mooncake.blocks import block_keys
from mooncake.errors import RequestError
from mooncake.front_messages import DropContext, KeepContext
from mooncake.line import Inbox
from mooncake.requests import SamplingParams

PATH = "/v1/context_caches"
MAX_TTL_S = 30 * 24 * 3600
DEFAULT_TTL_S = 3600
_NAME_PATTERN = r"^[A-Za-z0-9._-]+$"

Ttl = Annotated[int, Field(ge=1, le=MAX_TTL_S), WHOLE]


class ContextCacheRequest(KnownFields):
    """Body of `POST /v1/context_caches`: a conversation's beginning, or that of a prompt."""

    model: str | None = None
    name: Annotated[str, Field(pattern=_NAME_PATTERN, max_length=MAX_CACHE_NAME_CHARS)] | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    tools: Annotated[ListOf[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    prompt: SkipValidation[Text | TokenIds | None] = Field(None, description="a text, or token ids")
    ttl: Ttl | None = Field(None, description=f"seconds; default: {DEFAULT_TTL_S}")
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    priority: Priority | None = None


class ExtendRequest(KnownFields):
    """Body of `POST /v1/context_caches/ID`: so long from now on."""

    ttl: Ttl


class _Beginning(NamedTuple):
    """What is to be kept."""

    request: ContextCacheRequest
    prefix: ChatPrefix | None
    job: Job
    """computes it: a prompt whose answer is one token, which nobody reads"""


def context_caches(front: Front) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix=PATH)

    @router.post("", openapi_extra=described(ContextCacheRequest))
    async def create(request: Request) -> Response:
        caches, key = front.caches, key_of(request)
        body = await front.read_body(request)
        beginning = await beside(body, functools.partial(_read, body, front, key))
        job = fit_into_pool(beginning.job, front.cluster(), front.model.block_size)
        (prompt,), wanted = job.prompts, beginning.request
        cache = caches.add(
            key, wanted.name, beginning.prefix, prompt.token_ids, prompt.keys, wanted.cache_salt, _now()
        )
        try:
            await until_hang_up(request.receive, _compute(front, job))
            caches.find(key, cache.id, _now())  # or it has been deleted
            await _keep(front, cache, wanted.ttl or DEFAULT_TTL_S)
        except BaseException:
            caches.remove(cache)
            raise
        return JSONResponse(_shown(cache, front))

    @router.get("")
    async def listed(request: Request) -> Response:
        key = key_of(request)
        found = front.caches.of(key, _now())
        num_tokens = sum(len(cache.token_ids) for cache in found)
        quota = {"tokens": front.caches.quota_of(key), "used_tokens": num_tokens}
        data = [_shown(cache, front) for cache in found]
        return JSONResponse({"object": "list", "data": data, "quota": quota})

    @router.get("/{cache}")
    async def one(request: Request, cache: str) -> Response:
        return JSONResponse(_shown(front.caches.find(key_of(request), cache, _now()), front))

    @router.post("/{cache}", openapi_extra=described(ExtendRequest))
    async def extend(request: Request, cache: str) -> Response:
        wanted = parse(ExtendRequest, await front.read_body(request))
        found = front.caches.find(key_of(request), cache, _now())
        if found.expires_s is None:
            message = f"the context cache {found.id} is still being made"
            raise RequestError(message, status=409, code="context_cache_not_ready")
        await _keep(front, found, wanted.ttl)
        return JSONResponse(_shown(found, front))

    @router.delete("/{cache}")
    async def delete(request: Request, cache: str) -> Response:
        found = front.caches.find(key_of(request), cache, _now())
        await front.link.tell(DropContext(found.id))
        front.caches.remove(found)
        return JSONResponse({"id": found.id, "object": "context_cache", "deleted": True})

    return router


def _read(body: bytes, front: Front, key: ApiKey | None) -> _Beginning:
    """Raises RequestError."""
    wanted = parse(ContextCacheRequest, body, functools.partial(check_num_messages, model=front.model))
    check_model(wanted.model, front.config.served_model_name)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise RequestError(
            "expected either messages or prompt", param="messages", code="missing_required_parameter"
        )
    model, prefix = front.model, None
    if wanted.messages is not None:
        check_message_fields(wanted.messages)
        prefix = ChatPrefix(wanted.messages, wanted.tools or ())
        with refusing_depth():
            token_ids = prefix_tokens(prefix, model)
    elif wanted.tools is not None:
        raise RequestError("tools is for messages", param="tools", code="invalid_value")
    else:
        token_ids, *others = prompts_of(wanted.prompt, model)
        if others:
            raise RequestError("prompt: expected one prompt", param="prompt", code="invalid_value")
    if len(token_ids) < model.block_size:
        raise RequestError(
            f"there are {len(token_ids)} tokens, and KVCache is kept in blocks of {model.block_size}",
            param="messages" if prefix else "prompt",
            code="invalid_value",
        )
    return _Beginning(wanted, prefix, _job_for(token_ids, wanted, model, key))


def _job_for(
    token_ids: list[int], wanted: ContextCacheRequest, model: ServedModel, key: ApiKey | None
) -> Job:
    root, is_salted = tenant_root(model, key, wanted.cache_salt)
    return Job(
        endpoint=Endpoint.COMPLETION,
        id=f"cache-{time.time_ns():x}",
        prompts=[Prompt(token_ids, block_keys(token_ids, model.block_size, root))],
        num_choices_per_prompt=1,
        sampling=[SamplingParams(max_tokens=1, temperature=0.0)],
        max_tokens_field=None,
        stops=(),
        stream=False,
        usage_shown=UsageShown.NOWHERE,
        return_token_ids=False,
        client_request_id=None,
        root_key=root,
        is_salted=is_salted,
        priority=priority_of(wanted.priority, key),
        tenant="" if key is None else key.name,
    )


async def _compute(front: Front, job: Job) -> None:
    """Raises RequestError. Its blocks are in a pool then."""
    generation = Generation(job, front.model, front.link, front.metrics, _now())
    inbox = Inbox[Event]()
    async with aclosing(generation):
        await generation.begin(inbox.put_nowait)
        while not generation.is_over:
            event = await inbox.get()
            if (gained := generation.gain(event)) is not None and gained.finish_reason is not None:
                await generation.end(event.request_id, gained.finish_reason)


async def _keep(front: Front, cache: ContextCache, ttl_s: int) -> None:
    await front.link.tell(KeepContext(cache.id, cache.keys, ttl_s))
    cache.expires_s = _now() + ttl_s


def _shown(cache: ContextCache, front: Front) -> dict[str, Any]:
    since_1970_s = time.time() - _now()
    saved = cache.saved
    return {
        "id": cache.id,
        "object": "context_cache",
        "name": cache.name,
        "model": front.config.served_model_name,
        "status": "creating" if cache.expires_s is None else "ready",
        "created_at": int(since_1970_s + cache.created_s),
        "expires_at": None if cache.expires_s is None else int(since_1970_s + cache.expires_s),
        "tokens": len(cache.token_ids),
        "saved": {
            "prompts": saved.num_prompts,
            "tokens": saved.num_tokens,
            "prefill_seconds": round(saved.prefill_s, 6),
        },
    }


def _now() -> float:
    return asyncio.get_running_loop().time()
