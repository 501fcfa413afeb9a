"""One HTTP/1.1 connection, to a client that may be slow, greedy or hostile.

Requests are answered one after the other. While a complete request is being answered, bytes behind it wait
unparsed, except the rest of a parsed piece (`request_parser`).

Owns: the deadlines for a request to arrive, for a client to read, and for an idle connection; the responses
that no application makes (400, 408, 503). Does not know: what the application answers, how many connections
there may be (`sharing`).
"""

import asyncio
import contextlib
import itertools
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.types import ASGIApp, Scope

from conductor.front.errors import error_body
from conductor.front.http.exchange import MAX_UNSENT_BYTES, RESPONSE_STREAM, Exchange, ResponseState
from conductor.front.http.request_parser import (
    Arrival,
    InvalidRequestError,
    RequestHead,
    RequestParser,
    TunnelRequestedError,
)
from conductor.front.http.sharing import ConnectionTable, ReadingTurns, UploadBudget
from conductor.front.http.timers import Timeouts, Timer
from mooncake.errors import RequestError

_MAX_BUFFERED_BYTES = 1 << 16
"""The most bytes of a request's body that wait for the application before the client has to wait."""
_MAX_PIECES_AT_ONCE, _MAX_PARTS_AT_ONCE = 256, 512
"""The most pieces, and the most parts of bodies, that are parsed in one turn of a connection.

256 pieces of a chunked body have 64 KiB.
"""


@dataclass(slots=True)
class Serving:
    """The state that all connections of a server share."""

    app: ASGIApp
    timeouts: Timeouts
    table: ConnectionTable
    uploads: UploadBudget["Connection"]
    loop: asyncio.AbstractEventLoop
    turns: ReadingTurns = field(default_factory=ReadingTurns)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """The tasks of requests that the application is answering."""
    keeps_connections: bool = True
    """Whether connections stay open after a response. They close if the server drains or shuts down."""


class Connection(asyncio.Protocol):
    """The asyncio protocol of one connection.

    `accepted` is the accepted socket. The connection counts as *waiting* in the table from the beginning, so
    also during its TLS handshake.
    """

    _transport: asyncio.Transport

    def __init__(self, accepted: socket.socket, serving: Serving, scheme: str) -> None:
        self._accepted: socket.socket | None = accepted
        self._serving = serving
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": scheme,
            "root_path": "",
        }
        """The part of the ASGI scope that all requests of the connection share."""
        self._parser = RequestParser(self)
        self._arriving: Exchange | None = None
        """The latest request whose head is complete and whose body is not."""
        self._answering: Exchange | None = None
        """The request that the application is answering."""
        self._pipelined: deque[tuple[Exchange, Scope]] = deque()
        """Requests that the parser has read already, behind the request that is being answered."""
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_reading = True
        self._awaits_turn = False
        """Whether the connection is queued for its turn to parse received bytes."""
        self._request_timer, self._idle_timer, self._send_timer = Timer(), Timer(), Timer()
        serving.table.accepted(self)

    # -- the transport ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport, self._accepted = transport, None
        transport.set_write_buffer_limits(MAX_UNSENT_BYTES)  # TLS would keep 512 KiB
        self._scope["client"] = _address(transport.get_extra_info("peername"))
        self._scope["server"] = _address(transport.get_extra_info("sockname"))
        self._start_request_timer()

    def close_unless_made(self) -> None:
        """Close the accepted socket and forget the connection, unless the socket has got a transport."""
        if self._accepted is not None:
            self._accepted.close()
            self._serving.table.lost(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._serving.table.lost(self)
        self._serving.uploads.release(self)
        for timer in (self._request_timer, self._idle_timer, self._send_timer):
            timer.stop()
        self._parser.close()
        self._disconnect()
        self._can_write.set()

    def _disconnect(self) -> None:
        """Tell the application that its client has disconnected."""
        exchanges = [self._answering, *(exchange for exchange, _ in self._pipelined)]
        self._answering = self._arriving = None
        self._pipelined.clear()
        for exchange in exchanges:
            if exchange is not None:
                exchange.disconnect()

    def data_received(self, data: bytes) -> None:
        self._parser.add(data)
        self._serving.uploads.add(self, len(data))
        self._read_on()

    def _read_on(self) -> None:
        """Parse received bytes, until a request is complete or it is the turn of other connections.

        No bytes are parsed behind a request that is complete and is being answered.
        """
        most_parts = self._parser.num_parts + _MAX_PARTS_AT_ONCE
        for num_pieces in itertools.count():
            if self._transport.is_closing():
                return
            if not self._parser.num_unread_bytes:
                break
            if self._answering is not None and self._answering.has_arrived:
                self._pause_reading()
                return
            if num_pieces == _MAX_PIECES_AT_ONCE or self._parser.num_parts >= most_parts:
                self._read_later()
                return
            try:
                self._parser.parse_piece()
            except TunnelRequestedError:
                self._end_behind_whole_requests()
            except InvalidRequestError as error:
                self._refuse("400 Bad Request", str(error), "invalid_http")
        if self._arriving is not None and self._answering is None:
            self._serving.uploads.release(self)  # the response has ended, so no more of the body is kept
        self.resume_reading()

    def _read_later(self) -> None:
        """Stop reading, and parse more when it is this connection's turn."""
        self._pause_reading()
        if not self._awaits_turn:
            self._awaits_turn = True
            self._serving.turns.add(self._take_turn)

    def _take_turn(self) -> None:
        self._awaits_turn = False
        self._read_on()

    def resume_reading(self) -> None:
        """Resume reading, unless bytes wait for the parser, or too many parsed bytes for the application."""
        waits = self._parser.num_unread_bytes or (
            self._arriving is not None and self._arriving.num_unread_bytes > _MAX_BUFFERED_BYTES
        )
        if not self._is_reading and not waits:
            self._is_reading = True
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    # -- requests ---------------------------------------------------------------------------------

    def request_began(self) -> None:
        self._idle_timer.stop()
        self._start_request_timer()

    def head_arrived(self, head: RequestHead) -> None:
        exchange = Exchange(
            self,
            is_head=head.method == "HEAD",
            takes_chunks=head.version != "1.0",
            keep_alive=head.keep_alive and self._serving.keeps_connections,
            expects_continue=head.expects_continue,
        )
        path = head.raw_path.decode("ascii")
        scope = {
            **self._scope,
            "http_version": head.version,
            "method": head.method,
            "path": unquote(path) if "%" in path else path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            "state": {},
            "extensions": {RESPONSE_STREAM: exchange},
        }
        self._arriving = exchange
        if self._answering is None:
            self._answer(exchange, scope)
        else:
            self._pipelined.append((exchange, scope))

    def body_arrived(self, part: bytes) -> None:
        assert self._arriving is not None, "its head has arrived"
        self._arriving.add_body(part)
        if self._arriving.num_unread_bytes > _MAX_BUFFERED_BYTES:
            self._pause_reading()

    def request_arrived(self) -> None:
        assert self._arriving is not None, "its head has arrived"
        self._arriving.arrived()
        self._arriving = None
        self._request_timer.stop()
        self._serving.uploads.release(self)
        if num_bytes := self._parser.num_unread_bytes:
            self._serving.uploads.add(self, num_bytes)
        if self._answering is None:
            self._wait()
        else:
            self._serving.table.is_served(self)

    # -- responses --------------------------------------------------------------------------------

    def _answer(self, exchange: Exchange, scope: Scope) -> None:
        self._answering = exchange
        if self._can_write.is_set():  # the next response hides how much of the last one is read
            self._send_timer.stop()
        task = self._serving.loop.create_task(exchange.run(self._serving.app, scope))
        self._serving.tasks.add(task)
        task.add_done_callback(self._serving.tasks.discard)

    def response_ended(self) -> None:
        """Go on with the connection's next request after the end of a response, or close the connection."""
        assert self._answering is not None
        if self._answering is self._arriving:
            self._serving.uploads.release(self)  # no more of the body is kept
            if num_bytes := self._parser.num_unread_bytes:
                self._serving.uploads.add(self, num_bytes)
        keep_alive, self._answering = self._answering.keep_alive, None
        if not keep_alive:
            self.close()
            return
        self._start_send_timer()
        if self._pipelined:
            exchange, scope = self._pipelined.popleft()
            self._answer(exchange, scope)
            if not exchange.has_arrived:
                self._serving.table.waits(self)
        elif self._parser.arrival is Arrival.NOTHING:
            self._wait()
        if self._parser.num_unread_bytes:
            self._read_later()
        else:
            self.resume_reading()

    def _wait(self) -> None:
        """Start to wait for the connection's next request; close the connection if none comes in time."""
        self._serving.table.waits(self)
        self._idle_timer.start(self._serving.loop, self._serving.timeouts.idle_s, self.close)

    @property
    def takes_more(self) -> bool:
        """Whether the client is connected and reads the response."""
        return self._can_write.is_set() and not self._transport.is_closing()

    async def wait_until_it_takes_more(self) -> None:
        """Wait until the client reads again or has disconnected."""
        await self._can_write.wait()

    def write(self, data: bytes | memoryview) -> None:
        """Send `data` behind all earlier data; drop `data` if the connection is closing."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._can_write.clear()
        self._start_send_timer()
        self._serving.table.stalls(self)

    def resume_writing(self) -> None:
        self._can_write.set()
        self._send_timer.stop()
        self._serving.table.reads_on(self)

    def _start_send_timer(self) -> None:
        if self._scope["scheme"] == "https" and self._transport.is_closing():
            return  # the end of TLS has a deadline of its own
        if num_bytes := self._transport.get_write_buffer_size():
            delay_s = self._serving.timeouts.send_s
            self._send_timer.start(self._serving.loop, delay_s, self._abort_if_unsent, num_bytes)

    def _abort_if_unsent(self, num_bytes: int) -> None:
        """Abort the connection if the client has read nothing of the `num_bytes` pending bytes."""
        self._send_timer.stop()
        if self._transport.get_write_buffer_size() >= num_bytes:
            self.abort()
        else:
            self._start_send_timer()

    # -- the end ----------------------------------------------------------------------------------

    def _start_request_timer(self) -> None:
        self._request_timer.start(
            self._serving.loop, self._serving.timeouts.request_s, self._miss_request_deadline
        )

    def _miss_request_deadline(self) -> None:
        self._request_timer.stop()
        if self._has_whole_request():
            # The arriving request is pipelined: this side may not read it until the response has ended.
            self._start_request_timer()
        elif self._parser.arrival is Arrival.NOTHING:
            self.close()
        else:
            message = f"the request did not arrive within {self._serving.timeouts.request_s:g} s"
            self._refuse("408 Request Timeout", message, "request_timeout")

    def _has_whole_request(self) -> bool:
        """Return whether the request that is being answered has arrived completely."""
        return self._answering is not None and self._answering is not self._arriving

    def _refuse(self, status: str, message: str, code: str) -> None:
        """Close the connection, with an error for the request that is arriving.

        If an earlier request is being answered, the connection closes after that response, without the error.
        """
        if self._has_whole_request():
            self._end_behind_whole_requests()
            return
        self._write_error(status, message, code)
        self.close()
        self._disconnect()

    def _end_behind_whole_requests(self) -> None:
        """Answer the requests that have arrived completely, then close the connection."""
        if self._pipelined and self._pipelined[-1][0] is self._arriving:
            self._pipelined.pop()
        latest = self._pipelined[-1][0] if self._pipelined else self._answering
        assert latest is not None, "a request has arrived whole"
        latest.keep_alive = False
        self._parser.clear()

    def _write_error(self, status: str, message: str, code: str) -> None:
        """Answer the request that is arriving with an error, unless its response has started."""
        if self._arriving is None or self._arriving.state is ResponseState.PENDING:
            body = msgspec.json.encode(error_body(RequestError(message, status=int(status[:3]), code=code)))
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def make_room(self) -> None:
        """Close the connection to free its slot, with an error for the request that is arriving.

        If an earlier request is being answered, the connection closes after that response, without the error.
        """
        if self._accepted is not None:
            self.abort()
            return
        if self._has_whole_request():
            self._end_behind_whole_requests()
            return
        self._parser.clear()
        if self._parser.arrival is not Arrival.NOTHING:
            message = "too many requests arrive at once, and this one took longer than others; try again"
            self._write_error("503 Service Unavailable", message, "server_busy")
        if self._transport.get_write_buffer_size():
            self.close()
        else:
            self.abort()  # at once, without the end of TLS
        self._disconnect()

    def shutdown(self) -> None:
        """Close the connection after the response that is being made, and drop the requests behind it.

        A connection without such a response closes at once, or soon if it is just being set up.
        """
        self._pipelined.clear()
        if self._answering is not None:
            self._answering.keep_alive = False
        elif self._accepted is None:
            self.close()
        elif self._scope["scheme"] == "https":
            self.abort()  # plain HTTP goes on, as a request may have come with the connection

    def close(self) -> None:
        """Close the connection when the client has read all that was written."""
        if not self._transport.is_closing():
            self._transport.close()
            self._serving.table.closes(self)
            self._start_send_timer()

    def abort(self) -> None:
        """Close the connection at once; unread data is lost."""
        if self._accepted is None:
            self._transport.abort()
            return
        with contextlib.suppress(OSError):  # the client has gone already
            self._accepted.shutdown(socket.SHUT_RDWR)


def _address(address: Any) -> tuple[str, int] | None:
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
