"""The lower bound (*floor*) of the front's benchmark: a FastAPI server that only streams tokens.

It sends one event in each step. It reads only `max_tokens`, computes nothing and counts nothing.

  python -m benchmarks.front.bare_front PORT

Owns: the floor that a front is compared with. Does not know: the front.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from benchmarks.front.instant_workers import STEP_S

_MODEL = "bare"
_encode = msgspec.json.Encoder().encode


def create_app() -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"data": [{"id": _MODEL}]})

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        return StreamingResponse(_events(body["max_tokens"]), media_type="text/event-stream")

    return app


async def _events(num_tokens: int) -> AsyncIterator[bytes]:
    now = asyncio.get_running_loop().time
    began_s = now()
    for position in range(num_tokens):
        if position:  # each token has a time of its own: a late token does not delay the next
            await asyncio.sleep(began_s + position * STEP_S - now())
        finish_reason = "length" if position + 1 == num_tokens else None
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason}
        head = {"id": "cmpl-0", "created": 0, "model": _MODEL, "object": "text_completion"}
        yield b"data: " + _encode({**head, "choices": [choice]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
