"""One HTTP request and its response, as an ASGI application sees them.

ASGI's `send` is a coroutine that passes through every middleware. A stream has a short event for each token,
so once a response has started the application may write parts of its body without `send`
(`ResponseStream`). This keeps the processor time of a request within 1.25 times that of a bare FastAPI
application.

Owns: the part of the request's body that has arrived, the framing of the response, whether the connection
stays open afterwards. Does not know: sockets, deadlines, how a request is parsed (`connection`).
"""

import asyncio
import http
import logging
import re
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from enum import Enum, auto
from functools import lru_cache
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

RESPONSE_STREAM = "mooncake.response_stream"
"""The key of the request's `ResponseStream` in the extensions of the ASGI scope."""
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}
_WITHOUT_BODY = frozenset({204, 304})
MAX_UNSENT_BYTES = 1 << 16
"""The most bytes of a response that wait for the client before the application has to wait.

A body is written in pieces of this size, as TLS copies each write.
"""
_UNSAFE_IN_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
log = logging.getLogger(__name__)


class Channel(Protocol):
    """The part of a connection's interface that an exchange needs."""

    @property
    def takes_more(self) -> bool:
        """Whether the client is connected and reads the response."""

    async def wait_until_it_takes_more(self) -> None:
        """Wait until the client reads again or has disconnected."""

    def write(self, data: bytes | memoryview) -> None:
        """Send `data`, which is not empty, behind all earlier data."""

    def resume_reading(self) -> None:
        """Resume reading the request's body."""

    def response_ended(self) -> None:
        """Go on with the connection's next request after the end of a response, or close the connection."""

    def close(self) -> None:
        """Close the connection when the client has read all that was written."""


class ResponseStream(Protocol):
    """The means of an application to send parts of a response's body without waiting.

    The first message and the last part go through ASGI's `send`.
    """

    @property
    def takes_more(self) -> bool:
        """Whether the response has started, and a part can be sent without waiting."""

    def write(self, part: bytes) -> None:
        """Send a part of the body without waiting. To be called only while `takes_more` is true."""

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """Register a callback, called once when the client disconnects before the end of the response.

        A later callback replaces an earlier one. If the client has gone already, `callback` is called now.
        """


class ResponseState(Enum):
    """The progress of a response, from before its head to its end."""

    PENDING = auto()
    STARTED = auto()
    ENDED = auto()
    DISCONNECTED = auto()
    """The client has disconnected before the end of the response."""


class Exchange:
    """The ASGI `receive` and `send`, and the `ResponseStream`, of one request."""

    __slots__ = (
        "_body",
        "_changed",
        "_channel",
        "_disconnected",
        "_expects_continue",
        "_has_body",
        "_has_chunks",
        "_num_bytes_left",
        "_takes_chunks",
        "has_arrived",
        "keep_alive",
        "state",
    )

    def __init__(
        self,
        channel: Channel,
        *,
        is_head: bool = False,
        takes_chunks: bool = True,
        keep_alive: bool = True,
        expects_continue: bool = False,
    ) -> None:
        """Prepare the exchange of one request.

        Args:
            channel: The connection.
            is_head: Whether the method is HEAD, so that the response has no body.
            takes_chunks: Whether the client understands chunked bodies.
            keep_alive: Whether the connection stays open after the response.
            expects_continue: Whether the client sends its body only after a 100 response.
        """
        self._channel = channel
        self._has_body, self._takes_chunks = not is_head, takes_chunks
        self._expects_continue = expects_continue
        self.keep_alive = keep_alive
        self.has_arrived = False
        """Whether the request has arrived completely."""
        self.state = ResponseState.PENDING
        self._body = bytearray()
        self._changed = asyncio.Event()
        self._disconnected: Callable[[], object] | None = None
        self._has_chunks = False
        self._num_bytes_left: int | None = None
        """Bytes of the response's body that are still to be sent; None if its length is unknown."""

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the application on this request.

        The connection closes if the application leaves the response unfinished.
        """
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            log.exception("the application has a bug")
        finally:
            if self.state in (ResponseState.PENDING, ResponseState.STARTED):
                self._channel.close()

    # -- the request ------------------------------------------------------------------------------

    @property
    def num_unread_bytes(self) -> int:
        """The bytes of the body that have arrived and that the application has not received."""
        return len(self._body)

    def add_body(self, part: bytes) -> None:
        """Add a part of the request's body; drop it if the response has ended or the client has gone."""
        if self.state in (ResponseState.PENDING, ResponseState.STARTED):
            self._body += part
            self._expects_continue = False
            self._changed.set()

    def arrived(self) -> None:
        """Record that the request has arrived completely."""
        self.has_arrived, self._expects_continue = True, False
        self._changed.set()

    def disconnect(self) -> None:
        """Record that the client has disconnected."""
        if self.state is not ResponseState.ENDED:
            self.state = ResponseState.DISCONNECTED
        self._changed.set()
        disconnected, self._disconnected = self._disconnected, None
        if disconnected is not None:
            disconnected()

    async def receive(self) -> Message:
        """Wait for a part of the body, and return all that has arrived since the last call.

        After the end of the response, or if the client disconnects, return the ASGI event of a disconnect.
        """
        if self._expects_continue and self.state is ResponseState.PENDING:
            self._expects_continue = False
            self._channel.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.state in (ResponseState.PENDING, ResponseState.STARTED):
            self._channel.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.state in (ResponseState.ENDED, ResponseState.DISCONNECTED):
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.has_arrived}

    # -- the response -----------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Write a part of the response as fast as the client reads; drop the part if the client has gone.

        Raises RuntimeError for a part that comes too early or too late, and for a body that has not the
        length in its Content-Length. Raises ValueError for a header with a control character.
        """
        if not await self._client_reads():
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            return
        if self.state is not ResponseState.STARTED:
            raise RuntimeError("the response has not started, or has ended")
        body = memoryview(message.get("body", b""))
        for start in range(0, len(body), MAX_UNSENT_BYTES):
            if start:
                await asyncio.sleep(0)  # other connections go on between the pieces
            if not await self._client_reads():
                return
            self.write(body[start : start + MAX_UNSENT_BYTES])
        if message.get("more_body", False):
            return
        if self._num_bytes_left:
            raise RuntimeError("the response's body has not the length that its head says")
        if self._has_chunks:
            self._channel.write(b"0\r\n\r\n")
        self.state, self._disconnected = ResponseState.ENDED, None
        self._body.clear()
        self._changed.set()
        self._channel.response_ended()

    async def _client_reads(self) -> bool:
        """Wait until the client reads. Returns False if the client has disconnected."""
        if not self._channel.takes_more:
            await self._channel.wait_until_it_takes_more()
        return self.state is not ResponseState.DISCONNECTED

    @property
    def takes_more(self) -> bool:
        """Whether the response has started, and a part can be sent without waiting."""
        return self.state is ResponseState.STARTED and self._channel.takes_more

    def write(self, part: bytes | memoryview) -> None:
        """Send a part of the body without waiting.

        Raises RuntimeError if the body gets longer than its Content-Length.
        """
        if not part or not self._has_body:
            return
        if self._has_chunks:
            part = b"%x\r\n%b\r\n" % (len(part), bytes(part))
        elif self._num_bytes_left is not None:
            self._num_bytes_left -= len(part)
            if self._num_bytes_left < 0:
                raise RuntimeError("the response's body is longer than its head says")
        self._channel.write(part)

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """Register a callback, called once when the client disconnects before the end of the response.

        A later callback replaces an earlier one. If the client has gone already, `callback` is called now.
        """
        if self.state is ResponseState.DISCONNECTED:
            callback()
        else:
            self._disconnected = callback

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.state is not ResponseState.PENDING:
            raise RuntimeError("the response has started already")
        lines, length = [_STATUS_LINES[status], _date_line(int(time.time()))], None
        for name, value in headers:
            if _UNSAFE_IN_HEADER.search(value):
                raise ValueError(f"the header {name.decode('latin-1')} has a control character")
            if name == b"content-length":
                length = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        if status in _WITHOUT_BODY:
            self._has_body = False
        if self._has_body:
            self._num_bytes_left = length
            self._has_chunks = length is None and self._takes_chunks
            if self._has_chunks:
                lines.append(b"transfer-encoding: chunked\r\n")
            elif length is None:  # the end of the connection is the end of the body
                self.keep_alive = False
        if self._expects_continue:  # the client may still send the body, or may not
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.state = ResponseState.STARTED
        self._channel.write(b"".join(lines))


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    return b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
