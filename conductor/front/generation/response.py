"""The response that sends one generation's answer, for as long as its client is connected.

Owns: the HTTP status (known with the first token, not before), the event stream, and the watch over the
client's connection. Does not know: the contents of answers.
"""

import asyncio
import itertools
from collections import deque
from contextlib import aclosing
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conductor.front.errors import error_body, error_response
from conductor.front.generation.answer import AnswerFormat, event
from conductor.front.generation.generation import Delta, Generation
from conductor.front.generation.reception import Event, Lost, Received
from conductor.front.http.exchange import RESPONSE_STREAM, ResponseStream
from conductor.front.metrics import Metrics, RequestOutcome
from mooncake.errors import RequestError
from mooncake.messages.fronts import Accepted

_MAX_EVENTS_AT_ONCE = 64
"""The most events sent in one turn of the event loop to a client that has not read for a while."""
_MAX_BYTES_AT_ONCE = 1 << 17
"""The bytes of an answer that are encoded in one turn of the event loop, for answers that are not streamed.

Choices are encoded as a whole, so the choice that reaches this number may exceed it.
"""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect tokens
]


def outcome_of(error: RequestError) -> RequestOutcome:
    """Return the outcome under which a request that ends with `error` is counted."""
    if error.status in (429, 503):
        return RequestOutcome.REJECTED
    return RequestOutcome.INVALID if error.status < 500 else RequestOutcome.FAILED


class _Ending(NamedTuple):
    """The last output of a choice, which has not been sent yet."""

    request_id: str
    delta: Delta


class GenerationResponse(Response):
    """An ASGI response that runs `generation` and sends its output.

    The request ends at once when its client hangs up.

    The request's task sends the first event, and the last event of each choice. Events between them are sent
    in the turn of the event loop in which their tokens are received. While the client does not read, output
    waits as token ids, and the task sends all of it.
    """

    def __init__(self, generation: Generation, answers: AnswerFormat, stream: bool, metrics: Metrics) -> None:
        super().__init__()
        self._generation, self._answers, self._metrics = generation, answers, metrics
        self._is_streamed = stream
        self._pending: deque[Event | _Ending | Exception] = deque()
        """Output that the task is to send, or an error that it is to raise.

        The first entry stays until it has been sent.
        """
        self._news = asyncio.Event()
        """An event that is set when something is pending or the client has gone."""
        self._has_started = self._is_disconnected = False
        self._outcome = RequestOutcome.ABORTED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._stream: ResponseStream = scope["extensions"][RESPONSE_STREAM]
        self._stream.on_disconnect(self._on_disconnect)
        self._send = send
        try:
            async with aclosing(self._generation):
                try:
                    await self._generation.begin(self._on_event)
                    await self._send_what_comes()
                except RequestError as error:
                    error.__traceback__ = None
                    self._outcome = outcome_of(error)
                    await self._generation.aclose()  # counts the request before the answer ends
                    if self._has_started:
                        await self._send_part(event(error_body(error)), is_last=True)
                    else:
                        await error_response(error)(scope, receive, send)
        except Exception:
            self._outcome = RequestOutcome.FAILED
            raise
        finally:
            self._metrics.request_ended(self._outcome)

    def _on_disconnect(self) -> None:
        self._is_disconnected = True
        self._news.set()

    def _on_event(self, event: Event) -> None:
        is_read = not self._is_streamed or self._stream.takes_more
        if isinstance(event, Lost | Accepted) or self._pending or not is_read:
            self._pending.append(event)
            self._news.set()
            return
        try:
            delta = self._gain(event)
            if delta is None:
                return
            if delta.finish_reason is None:
                if chunks := self._chunks(delta):
                    self._stream.write(chunks)
                return
            self._pending.append(_Ending(event.request_id, delta))
        except Exception as error:  # noqa: BLE001 - raised where the request's exceptions belong
            self._pending.append(error)
        self._news.set()

    async def _send_what_comes(self) -> None:
        for num_sent in itertools.count(1):
            while not self._pending and not self._is_disconnected:
                self._news.clear()
                await self._news.wait()
            if self._is_disconnected:
                return
            await self._send_pending(self._pending[0])
            if self._generation.is_over:
                self._outcome = RequestOutcome.FINISHED
                return
            self._pending.popleft()
            if num_sent % _MAX_EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _send_pending(self, pending: Event | _Ending | Exception) -> None:
        if isinstance(pending, Exception):
            raise pending
        if isinstance(pending, Accepted):
            await self._generation.go_on(self._on_event)
            return
        delta = pending.delta if isinstance(pending, _Ending) else self._gain(pending)
        if delta is None:
            return
        if self._is_streamed and not self._has_started:
            self._has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        chunks = self._chunks(delta)
        if delta.finish_reason is not None:
            await self._generation.end(pending.request_id, delta.finish_reason)
            if self._generation.is_over:
                await self._end(chunks)
                return
        if chunks:
            await self._send_part(chunks)

    def _gain(self, event: Received | Lost) -> Delta | None:
        """Return the new output in `event`, searched for tool calls.

        Returns None, or raises an error, if `Generation.gain` does.
        """
        delta = self._generation.gain(event)
        return None if delta is None else self._answers.seen(delta)

    def _chunks(self, delta: Delta) -> bytes:
        """Return the chunks of `delta` to send now.

        If the answer is not streamed, `delta` is kept for its end, and the result is empty.
        """
        if self._is_streamed:
            return self._answers.chunks(delta, self._generation.usage)
        self._answers.gather(delta)
        return b""

    async def _end(self, chunks: bytes) -> None:
        """Send the whole answer or, if it is streamed, its last chunks `chunks` and the end of the stream."""
        await self._generation.aclose()  # counts the request before the answer ends
        usage = self._generation.usage()
        if self._is_streamed:
            await self._send_part(chunks + self._answers.end(usage), is_last=True)
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
            await self._send_part(part)
        await self._send_part(b"", is_last=True)

    async def _send_part(self, part: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": not is_last})
