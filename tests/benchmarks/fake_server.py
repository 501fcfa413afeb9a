"""An OpenAI-compatible server that answers as a test tells it, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.deadline import DEADLINE_S

CONTEXT_LEN = 4096


def event(text: str) -> str:
    return f"data: {text}\n\n"


def chunk(text: str, finish_reason: str | None = None) -> str:
    return event(json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}))


async def tokens(body: dict[str, Any], gap_s: float = 0.0) -> Any:
    """Yield the events of an answer with all wanted tokens, and then its usage.

    The usage says that a quarter of the prompt was cached.
    """
    num_tokens = body["max_tokens"]
    for index in range(num_tokens):
        await asyncio.sleep(gap_s)
        yield chunk("a", "length" if index + 1 == num_tokens else None)
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 4},
    }
    yield event(json.dumps({"choices": [], "usage": usage}))
    yield event("[DONE]")


async def answer(body: dict[str, Any]) -> Response:
    return StreamingResponse(tokens(body), media_type="text/event-stream")


class FakeServer:
    """The state of a fake server.

    `behaviour` answers each completion; `bodies` are the bodies of all requests.
    """

    def __init__(self) -> None:
        self.behaviour: Callable[[dict[str, Any]], Awaitable[Response]] = answer
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake/model", "max_model_len": CONTEXT_LEN}]})

    async def refuse(self, _: Request) -> Response:
        return JSONResponse({}, status_code=401)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return await self.behaviour(body)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Make a context with a fake server on a free port of the loopback interface."""
    fake = FakeServer()
    routes = [
        Route("/v1/models", fake.models),
        Route("/locked/v1/models", fake.refuse),
        Route("/v1/completions", fake.complete, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    is_up = threading.Event()

    async def serve() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        fake.url = f"http://127.0.0.1:{port}"
        is_up.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert is_up.wait(DEADLINE_S)
        yield fake
    finally:
        server.should_exit = server.force_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
