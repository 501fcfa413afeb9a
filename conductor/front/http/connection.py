"""HTTP/1.1 as uvicorn and httptools speak it, to clients that get their requests across in time and size, and
take their answers.

Requests are read one after the other: while one is being answered, what has come behind it waits unread.

Owns: that deadline, from the connection or a request's first byte to its last, and the 408 of who has begun a
request by then; how much all requests that have not arrived whole may hold, and the 503 of who makes room;
how long a head may be; for how long a client may take nothing of what waits for it; that the request being
answered hears of the connection's end; when a connection waits (`waiting`); the short way for events. Does
not know: requests.
Without it a client that sends a byte now and then, or headers without end, or reads nothing, would keep a
connection, and what it has sent or is to get, forever.
"""

import asyncio
import re
import weakref
from typing import Any, Protocol

import msgspec
from uvicorn._types import ASGI3Application, HTTPResponseBodyEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from conductor.front.errors import error_body
from conductor.front.http.eager import run_eagerly
from conductor.front.http.intake import Intake
from conductor.front.http.outbox import Outbox, Writer
from conductor.front.http.turns import Turns
from conductor.front.http.waiting import Listener
from mooncake.errors import RequestError

MAX_HEAD_BYTES = 1 << 16
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_CHUNKED_PIECE_BYTES = 256
"""read at once of a body whose length is not known: behind its end there may be requests of 18 bytes"""
BODY = "mooncake.body"
"""extension of the scope: the `Body` of the answer, which takes parts of it once its start has been sent"""


class Body(Protocol):
    """Of an answer, for parts that need not wait. The last goes the usual way."""

    def takes_more(self) -> bool:
        """Whether a part can leave now: the client is there, and reads."""

    def write(self, part: bytes) -> None:
        """Send a part, which is not empty."""


def connections(
    listener: Listener,
    request_timeout_s: float,
    send_timeout_s: float,
    most_pending_bytes: int,
    outbox: Outbox,
) -> type[HttpToolsProtocol]:
    """What uvicorn calls for each connection. `send_timeout_s`: in which a client has to take something.

    `listener` accepts them. `most_pending_bytes`: of all requests that have not arrived whole. Answers leave
    through `outbox`.
    """
    late = f"the request did not arrive within {request_timeout_s:g} s"
    late_answer = _last_answer(b"408 Request Timeout", late, "request_timeout")
    crowded = "too many requests arrive at once, and this one took longer than others; try again"
    crowded_answer = _last_answer(b"503 Service Unavailable", crowded, "server_busy")

    class Connection(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._deadline: asyncio.TimerHandle | None = None
            self._has_begun = False
            """a request, at any time"""
            self._is_put_out = False
            self._is_in_head = False
            """of the latest one; `cycle` is the one before until the head is whole"""
            self._is_in_body = False
            self._num_body_bytes_left = 0
            """of a body whose length is known"""
            self._unread, self._unread_from = b"", 0
            """what has come, and where in it the parser goes on"""
            self._num_unparsed_bytes = 0
            """since the last whole head or piece of a body; they are kept until there is more"""
            self._send_deadline: asyncio.TimerHandle | None = None
            self._answered: RequestResponseCycle | None = None
            """what is being answered, or was last; `cycle` is what has come last"""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._writer = Writer(transport, outbox)
            self._set_deadline()
            listener.ready(transport.get_extra_info("socket").fileno(), self)

        def data_received(self, data: bytes) -> None:
            if self._is_put_out:
                return
            self._unread, self._unread_from = self._unread[self._unread_from :] + data, 0
            intake.came(self, len(data))
            self._read_on()

        def _read_on(self) -> None:
            """Give the parser what has come, up to the end of one request.

            The parser cannot be stopped, so it gets pieces behind whose end there is one more request at
            most, or a few behind a chunked body.
            """
            if self.transport.is_closing():
                return
            self.flow.resume_reading()
            while self._unread and not self.transport.is_closing():
                if self._owes_an_answer():
                    self.flow.pause_reading()
                    return
                end = self._end_of_piece()
                piece = memoryview(self._unread)[self._unread_from : end]
                self._unread_from = end
                if end == len(self._unread):
                    self._unread, self._unread_from = b"", 0
                self._num_unparsed_bytes += len(piece)
                if self._is_in_body and self._num_body_bytes_left:
                    self._num_body_bytes_left -= len(piece)
                super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
                if self._num_unparsed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                    self.send_400_response("The request's head is too long.")

        def _end_of_piece(self) -> int:
            most = len(self._unread)
            if self._is_in_body:
                return min(most, self._unread_from + (self._num_body_bytes_left or _CHUNKED_PIECE_BYTES))
            end = _END_OF_HEAD.search(self._unread, self._unread_from)
            return most if end is None else end.end()

        def connection_lost(self, exc: Exception | None) -> None:
            intake.left(self)
            listener.leaves(self)
            self._unset_deadline()
            self._unset_send_deadline()
            super().connection_lost(exc)
            # uvicorn tells `cycle` alone, which never begins if another one is before it.
            if self._answered is not None and not self._answered.response_complete:
                self._answered.disconnected = True
                self._answered.message_event.set()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
            self._answered = cycle
            cycle.transport = self._writer  # type: ignore[assignment]
            # Weakly: the connection has the scope, and is to be freed without a search for garbage.
            cycle.scope["extensions"] = {BODY: weakref.proxy(self)}
            if not self.flow.write_paused:  # what is left of the answer before tells nothing when more comes
                self._unset_send_deadline()
            super()._start_asgi_task(cycle, app)

        def takes_more(self) -> bool:
            assert self._answered is not None
            return not self.flow.write_paused and not self._answered.disconnected

        def write(self, part: bytes) -> None:
            assert self._answered is not None
            message: HTTPResponseBodyEvent = {"type": "http.response.body", "body": part, "more_body": True}
            waiting = run_eagerly(self._answered.send(message))
            assert waiting is None, "it takes more"

        # -- what the client takes --------------------------------------------------------------------

        def pause_writing(self) -> None:
            super().pause_writing()
            self._set_send_deadline()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unset_send_deadline()

        def on_response_complete(self) -> None:
            self._writer.flush()  # what waits for the client is told by the transport
            self._set_send_deadline()
            super().on_response_complete()
            if self.transport.is_closing():
                return
            if self._unread:
                self.flow.pause_reading()
                turns.wait(self._read_on)
            if not self._owes_an_answer():
                listener.waits(self)

        def _set_send_deadline(self) -> None:
            """Nothing is written until it is less: the connection waits for that, or is being closed."""
            if self.scheme == "https" and self.transport.is_closing():
                return  # TLS has a deadline of its own for that
            num_bytes = self.transport.get_write_buffer_size()
            if num_bytes and self._send_deadline is None:
                self._send_deadline = self.loop.call_later(send_timeout_s, self._abort_if_unsent, num_bytes)

        def _abort_if_unsent(self, num_bytes: int) -> None:
            self._send_deadline = None
            if self.transport.get_write_buffer_size() >= num_bytes:
                self.transport.abort()
            else:
                self._set_send_deadline()

        def _unset_send_deadline(self) -> None:
            if self._send_deadline is not None:
                self._send_deadline.cancel()
                self._send_deadline = None

        # -- what the parser has read -----------------------------------------------------------------

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._has_begun = self._is_in_head = True
            self._set_deadline()

        def on_headers_complete(self) -> None:
            self._num_unparsed_bytes = 0
            self._is_in_head, self._is_in_body = False, True
            self._num_body_bytes_left = next(
                (int(value) for name, value in self.headers if name == b"content-length"), 0
            )
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_unparsed_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._num_unparsed_bytes = 0
            self._is_in_body = False
            intake.left(self)
            if self._unread:
                intake.came(self, len(self._unread) - self._unread_from)
            self._unset_deadline()
            super().on_message_complete()
            if self._owes_an_answer():
                listener.leaves(self)

        def _set_deadline(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(request_timeout_s, self._give_up)

        def _give_up(self) -> None:
            if self._one_before_is_being_answered():
                # The client need not have waited for that, and we may not have read on.
                self._deadline = None
                self._set_deadline()
                return
            if self._has_begun and not self._is_being_answered():
                self.transport.write(late_answer)
            self.transport.close()

        def put_out(self) -> None:
            """Close the connection, with a 503 if a request arrives over it: others need the room."""
            self._is_put_out = True
            self._unread, self._unread_from = b"", 0
            is_arriving = self._has_begun and self._deadline is not None
            if is_arriving and not self._one_before_is_being_answered() and not self._is_being_answered():
                self.transport.write(crowded_answer)
            if self.transport.get_write_buffer_size():
                self.transport.close()  # when the client has taken what waits for it
            else:
                self.transport.abort()  # an end of TLS is not waited for

        def _owes_an_answer(self) -> bool:
            """A request has arrived whole, and its answer is not complete."""
            cycle = self._answered
            return cycle is not None and not cycle.more_body and not cycle.response_complete

        def _is_being_answered(self) -> bool:
            return not self._is_in_head and self.cycle is not None and self.cycle.response_started

        def _one_before_is_being_answered(self) -> bool:
            if self._is_in_head:
                return self.cycle is not None and not self.cycle.response_complete
            return bool(self.pipeline)

        def _unset_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    intake, turns = Intake[Connection](most_pending_bytes, Connection.put_out), Turns()
    return Connection


def _last_answer(status: bytes, message: str, code: str) -> bytes:
    """Before the connection is closed."""
    body = msgspec.json.encode(error_body(RequestError(message, status=int(status[:3]), code=code)))
    return (
        b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (status, len(body), body)
    )
