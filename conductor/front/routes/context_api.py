"""The endpoint `/v1/context_caches`: prefixes that are computed once, and kept for a time by id and name.

Owns: these routes, their bodies and answers. Does not know: which caches there are (`context_caches`), where
their blocks are kept (`conductor.replication.contexts`).
"""

import asyncio
import time
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from conductor.front.caches.beginning import Beginning
from conductor.front.caches.context_caches import ContextCache
from conductor.front.generation.reception import Event
from conductor.front.http.boundary import read_body
from conductor.front.http.disconnects import while_connected
from conductor.front.openai.body import parse
from conductor.front.openai.fields import KnownFields
from conductor.front.requests.context_beginnings import ContextCacheRequest, Ttl
from conductor.front.requests.validation import Job, fit_into_pool
from conductor.front.routes.openapi import described
from conductor.front.routes.shared import FrontState, claimed, key_of
from mooncake.bus.in_process import Inbox
from mooncake.errors import RequestError
from mooncake.messages.fronts import Accepted, DropContext, KeepContext

PATH = "/v1/context_caches"
_MAX_EXTEND_BYTES = 4096


class ExtendRequest(KnownFields):
    """The body of `POST /v1/context_caches/ID`: the new time to live in seconds, from now on."""

    ttl: Ttl


def context_caches(front: FrontState) -> APIRouter:
    """Return the routes of context caches."""
    router = APIRouter(prefix=PATH)

    @router.post("", openapi_extra=described(ContextCacheRequest))
    async def create(request: Request) -> Response:
        caches, key = front.caches, key_of(request)
        with while_connected(request):
            new = await front.reading.beginning(await front.read_body(request), key)
        job = claimed(request, fit_into_pool(new.job, front.cluster(), front.model.block_size))
        [prompt] = job.prompts
        beginning = Beginning(prompt.token_ids, new.chat_prefix_json, new.cache_salt)
        cache = caches.add(key, new.name, beginning, job.root_key, prompt.keys, _now())
        try:
            with while_connected(request):
                await _compute(front, job)
            caches.find(key, cache.id, _now())  # raises if the cache was deleted meanwhile
            await _keep(front, cache, new.ttl_s)
        except BaseException as error:
            if cache.expires_s is not None or isinstance(error, asyncio.CancelledError):
                await caches.delete(cache)  # the cache is stored, or may be
            else:
                caches.remove(cache)
            raise
        return JSONResponse(_shown(cache, front))

    @router.get("")
    async def listed(request: Request) -> Response:
        key = key_of(request)
        found = front.caches.of(key, _now())
        num_tokens = sum(cache.num_tokens for cache in found)
        quota = {"tokens": front.caches.quota_of(key), "used_tokens": num_tokens}
        data = [_shown(cache, front) for cache in found]
        return JSONResponse({"object": "list", "data": data, "quota": quota})

    @router.get("/{cache}")
    async def one(request: Request, cache: str) -> Response:
        return JSONResponse(_shown(front.caches.find(key_of(request), cache, _now()), front))

    @router.post("/{cache}", openapi_extra=described(ExtendRequest))
    async def extend(request: Request, cache: str) -> Response:
        front.drain.check()
        wanted = parse(ExtendRequest, (await read_body(request, _MAX_EXTEND_BYTES)).whole())
        found = front.caches.find(key_of(request), cache, _now())
        if found.expires_s is None:
            message = f"the context cache {found.id} is still being made"
            raise RequestError(message, status=409, code="context_cache_not_ready")
        await _keep(front, found, wanted.ttl)
        return JSONResponse(_shown(found, front))

    @router.delete("/{cache}")
    async def delete(request: Request, cache: str) -> Response:
        found = front.caches.find(key_of(request), cache, _now())
        await front.caches.delete(found)
        await front.link.tell(DropContext(found.id))
        return JSONResponse({"id": found.id, "object": "context_cache", "deleted": True})

    return router


async def _compute(front: FrontState, job: Job) -> None:
    """Run a job so that a pool gets the prompt's blocks; drop the answer. Raises RequestError."""
    generation = front.generation(job, _now())
    inbox = Inbox[Event]()
    async with aclosing(generation):
        await generation.begin(inbox.put_nowait)
        while not generation.is_over:
            event = await inbox.get()
            assert not isinstance(event, Accepted), "the job has one choice"
            if (gained := generation.gain(event)) is not None and gained.finish_reason is not None:
                await generation.end(event.request_id, gained.finish_reason)


async def _keep(front: FrontState, cache: ContextCache, ttl_s: int) -> None:
    await front.caches.keep(cache, ttl_s, _now())
    await front.link.tell(KeepContext(cache.id, cache.keys, ttl_s))


def _shown(cache: ContextCache, front: FrontState) -> dict[str, Any]:
    since_1970_s = time.time() - _now()
    saved = cache.saved
    return {
        "id": cache.id,
        "object": "context_cache",
        "name": cache.name,
        "model": front.config.served_model_name,
        "status": "creating" if cache.expires_s is None else "ready",
        "created_at": int(cache.created_at),
        "expires_at": None if cache.expires_s is None else int(since_1970_s + cache.expires_s),
        "tokens": cache.num_tokens,
        "saved": {
            "prompts": saved.num_prompts,
            "tokens": saved.num_tokens,
            "prefill_seconds": round(saved.prefill_s, 6),
        },
    }


def _now() -> float:
    return asyncio.get_running_loop().time()
