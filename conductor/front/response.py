"""Sending one generation's answer, for as long as its client listens.

Owns: the HTTP status (known with the first token, not before), the event stream, and the watch over the
client's connection. Does not know: what is in an answer.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conductor.front.answer import AnswerFormat, event
from conductor.front.boundary import DIRECT_SEND
from conductor.front.errors import error_body, error_response
from conductor.front.generation import Delta, Generation, joined
from conductor.front.metrics import Metrics, Outcome
from mooncake.errors import RequestError

T = TypeVar("T")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect tokens
]


def outcome_of(error: RequestError) -> Outcome:
    """How a request that ends with `error` is counted."""
    if error.status in (429, 503):
        return Outcome.REJECTED
    return Outcome.INVALID if error.status < 500 else Outcome.FAILED


class GenerationResponse(Response):
    """Runs `generation` and sends what comes. A client that hangs up ends it at once."""

    def __init__(self, generation: Generation, answers: AnswerFormat, stream: bool, metrics: Metrics) -> None:
        super().__init__()
        self._generation, self._answers, self._metrics = generation, answers, metrics
        self._send_answer = self._send_stream if stream else self._send_whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = Outcome.ABORTED
        try:
            outcome = await until_hang_up(receive, self._send_answer(scope, receive, send))
        except ClientDisconnect:
            return
        except Exception:
            outcome = Outcome.FAILED
            raise
        finally:
            self._metrics.request_ended(outcome)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        parts: dict[int, list[Delta]] = {}
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    parts.setdefault(delta.choice_index, []).append(delta)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return outcome_of(error)
        whole = [joined(parts[index]) for index in range(len(parts))]
        body = self._answers.whole(whole, self._generation.usage())
        await Response(body, media_type="application/json")(scope, receive, send)
        return Outcome.FINISHED

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        started = False
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                        send = scope["extensions"][DIRECT_SEND]
                    if events := self._answers.chunks(delta, self._generation.usage):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            outcome, end = Outcome.FINISHED, self._answers.end(self._generation.usage())
        except RequestError as error:
            outcome, end = outcome_of(error), event(error_body(error))
            if not started:
                await error_response(error)(scope, receive, send)
                return outcome
        await send({"type": "http.response.body", "body": end})
        return outcome


async def until_hang_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientDisconnect, and nothing of it goes on, if the client hangs up."""
    task = asyncio.create_task(work)
    hang_up = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, hang_up), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        hang_up.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
