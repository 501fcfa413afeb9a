"""Sending one generation's answer, for as long as its client listens.

Owns: the HTTP status (known with the first token, not before), the event stream, and the watch over the
client's connection. Does not know: what is in an answer.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conductor.front.errors import error_body, error_response
from conductor.front.generation.answer import AnswerFormat, event
from conductor.front.generation.generation import Delta, Generation
from conductor.front.generation.reception import Event, Received
from conductor.front.http.connection import BODY, Body
from conductor.front.http.eager import run_eagerly
from conductor.front.metrics import Metrics, Outcome
from mooncake.errors import RequestError

T = TypeVar("T")
_MAX_EVENTS_AT_ONCE = 64
"""sent to a client that has not read for a while"""
_MAX_BYTES_AT_ONCE = 1 << 17
"""of an answer that is not streamed"""

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
    """Runs `generation` and sends what comes. A client that hangs up ends it at once.

    What the link receives is sent within the same turn of the event loop: without a task, and between the
    first tokens and the last ones past all that lies around the application. To a client that does not read
    it is sent by a task, later, and what comes meanwhile waits as token ids.
    """

    def __init__(self, generation: Generation, answers: AnswerFormat, stream: bool, metrics: Metrics) -> None:
        super().__init__()
        self._generation, self._answers, self._metrics = generation, answers, metrics
        self._is_streamed = stream
        self._events: deque[Event] = deque()
        """received and not sent"""
        self._is_sending = self._has_started = self._has_ended = False
        self._slow_sending: asyncio.Task[None] | None = None
        self._body: Body | None = None
        """of a stream that has started"""
        self._outcome = Outcome.ABORTED
        self._bug: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._task = asyncio.current_task()
        try:
            async with aclosing(self._generation):
                try:
                    await self._generation.begin(self._on_event)
                except RequestError as error:
                    await self._send_error(error)
                # The server says so too when the answer has been sent.
                while (await receive())["type"] != "http.disconnect":
                    pass
        except asyncio.CancelledError:
            if self._bug is None:
                raise
            raise self._bug from None
        finally:
            self._metrics.request_ended(self._outcome)
            if self._slow_sending is not None:
                self._slow_sending.cancel()
                await asyncio.wait([self._slow_sending])

    def _on_event(self, event: Event) -> None:
        if self._has_ended:
            return
        body = self._body
        if body is not None and not self._is_sending and isinstance(event, Received) and body.takes_more():
            self._write(event, body)
            return
        self._events.append(event)
        if not self._is_sending:
            self._slow_sending = run_eagerly(self._send_what_has_come())

    def _write(self, event: Received, body: Body) -> None:
        try:
            delta = self._generation.gain(event)
            if delta is None:
                return
            delta = self._answers.seen(delta)
            if delta.finish_reason is not None:
                self._slow_sending = run_eagerly(self._send_what_has_come((delta, event.request_id)))
            elif chunks := self._answers.chunks(delta, self._generation.usage):
                body.write(chunks)
        except Exception as error:  # noqa: BLE001 - raised where the request's exceptions belong
            self._end_by(error)

    async def _send_what_has_come(self, first: tuple[Delta, str] | None = None) -> None:
        """`first`: what a request, whose id it is, has gained already."""
        self._is_sending = True
        try:
            if first is not None:
                await self._send_delta(*first)
            for num_sent in itertools.count(1):
                if not self._events or self._has_ended:
                    break
                if num_sent % _MAX_EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                event = self._events.popleft()
                try:
                    delta = self._generation.gain(event)
                except RequestError as error:
                    await self._send_error(error)
                    break
                if delta is not None:
                    await self._send_delta(self._answers.seen(delta), event.request_id)
        except Exception as error:  # noqa: BLE001 - raised where the request's exceptions belong
            self._end_by(error)
        finally:
            self._is_sending = False

    async def _send_delta(self, delta: Delta, request_id: str) -> None:
        chunks = b""
        if not self._is_streamed:
            self._answers.gather(delta)
        else:
            if not self._has_started:
                await self._start()
            chunks = self._answers.chunks(delta, self._generation.usage)
        if delta.finish_reason is not None:
            await self._generation.end(request_id, delta.finish_reason)
            if self._generation.is_over:
                await self._end(chunks)
                self._outcome = Outcome.FINISHED
                return
        if chunks:
            await self._send({"type": "http.response.body", "body": chunks, "more_body": True})

    def _end_by(self, bug: Exception) -> None:
        self._has_ended = True
        self._outcome, self._bug = Outcome.FAILED, bug
        assert self._task is not None
        self._task.cancel()  # it waits for the client to hang up

    async def _start(self) -> None:
        self._has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        self._body = self._scope["extensions"][BODY]

    async def _end(self, chunks: bytes) -> None:
        """`chunks`: the last ones of a stream."""
        self._has_ended = True
        await self._generation.aclose()  # who has the answer finds it counted
        usage = self._generation.usage()
        if self._is_streamed:
            await self._send({"type": "http.response.body", "body": chunks + self._answers.end(usage)})
            return
        parts, num_bytes = [], 0
        for part in self._answers.whole(usage):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > _MAX_BYTES_AT_ONCE:
                await asyncio.sleep(0)
                num_bytes = 0
        size = (b"content-length", b"%d" % sum(map(len, parts)))
        headers = [(b"content-type", b"application/json"), size]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_error(self, error: RequestError) -> None:
        self._has_ended = True
        self._outcome = outcome_of(error)
        await self._generation.aclose()
        if self._has_started:
            await self._send({"type": "http.response.body", "body": event(error_body(error))})
        else:
            await self._respond(error_response(error))

    async def _respond(self, response: Response) -> None:
        await response(self._scope, self._receive, self._send)


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
