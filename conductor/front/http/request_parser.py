"""Requests of one connection: from bytes to heads and bodies, without IO.

The parser, httptools, cannot be stopped within the bytes that it gets. So it gets pieces, and no piece goes
beyond the current request. The only exception is a piece in which a chunked body ends: a few requests may
follow the body in that piece.

Owns: bytes that are not parsed yet, the progress of the latest request, the limits of heads and chunks. Does
not know: responses, deadlines.
"""

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

import httptools

MAX_HEAD_BYTES = 1 << 16
MAX_HEADERS = 256
"""The most headers of a request.

Thousands of short headers would take tens of milliseconds of the event loop.
"""
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_CHUNKED_PIECE_BYTES = 256
"""Bytes of a chunked body that are parsed at once.

They are few because the piece in which the body ends may also hold the next requests, which have 18 bytes
each or more.
"""


class InvalidRequestError(Exception):
    """The error of received bytes that are no valid HTTP request."""


class TunnelRequestedError(Exception):
    """The error of a CONNECT request. The bytes that follow it belong to another protocol."""


class Arrival(Enum):
    """The part of the latest request that is arriving; NOTHING between requests."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class RequestHead(NamedTuple):
    """The request line and headers of a request; header names are in lower case."""

    method: str
    version: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    """Whether the client may send another request on the same connection."""
    expects_continue: bool
    """Whether the client sends the body only after a 100 response."""


class RequestListener(Protocol):
    """The interface through which the parser reports requests, in order of arrival."""

    def request_began(self) -> None: ...

    def head_arrived(self, head: RequestHead) -> None: ...

    def body_arrived(self, part: bytes) -> None: ...

    def request_arrived(self) -> None: ...


class RequestParser:
    """An incremental HTTP/1.1 parser that reports requests to `listener`."""

    def __init__(self, listener: RequestListener) -> None:
        self._listener = listener
        self._parser = httptools.HttpRequestParser(self)
        self.arrival = Arrival.NOTHING
        self._unread, self._unread_from = b"", 0
        """Received bytes, and the position in them at which the parser goes on."""
        self._num_held_bytes = 0
        """Bytes that httptools has got since the latest complete head, body part or request.

        The number is limited because httptools may keep all of these bytes.
        """
        self._num_body_bytes_left = 0
        """Bytes of a body of known length that have not arrived."""
        self._num_excess_bytes = 0
        """Bytes of a chunked body's framing, less the bytes of its content.

        The number is limited because each chunk takes processor time.
        """
        self.num_parts = 0
        """The number of parts of bodies that were reported."""
        self._end_of_read = b""
        """The last two parsed bytes of a head that is not complete."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._is_cut_off = False
        """Whether the head asks for another protocol.

        No other protocol is served, but httptools skips the body of such a request. So httptools gets a
        second head, which is not reported, and parses the body after it.
        """

    @property
    def num_unread_bytes(self) -> int:
        """The number of bytes that were added and are not parsed yet."""
        return len(self._unread) - self._unread_from

    def add(self, data: bytes) -> None:
        """Add received bytes, to be parsed by `parse_piece`."""
        self._unread, self._unread_from = self._unread[self._unread_from :] + data, 0

    def clear(self) -> None:
        """Drop received bytes that are not parsed."""
        self._unread, self._unread_from = b"", 0

    def close(self) -> None:
        """Break the reference cycle between this object and httptools, so that both are freed at once."""
        self.clear()
        del self._parser, self._listener

    def parse_piece(self) -> None:
        """Parse a piece of the received bytes, up to the end of a head or body of known length at most.

        Raises InvalidRequestError for bytes that are no valid request, TunnelRequestedError for a CONNECT
        request.
        """
        end = self._end_of_piece()
        piece = memoryview(self._unread)[self._unread_from : end]
        self._unread_from = end
        if end == len(self._unread):
            self.clear()
        read, self._end_of_read = self._end_of_read, b""
        self._num_held_bytes += len(piece)
        if self.arrival is Arrival.BODY and not self._num_body_bytes_left:
            self._num_excess_bytes += len(piece)
        try:
            self._feed(piece)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, InvalidRequestError):  # a callback has raised it
                raise error.__context__ from None
            raise InvalidRequestError("the request is not valid HTTP/1.1") from None
        if self._num_excess_bytes > MAX_HEAD_BYTES:
            raise InvalidRequestError("the chunks of the request's body are too small; send larger ones")
        if self._num_held_bytes > MAX_HEAD_BYTES:
            raise InvalidRequestError(f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        if self.arrival is Arrival.HEAD:
            self._end_of_read = (read + bytes(piece[-2:]))[-2:]

    def _feed(self, piece: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as stop:
            if not self._is_cut_off:
                raise TunnelRequestedError from None
            [num_parsed_bytes] = stop.args
            self._parser.feed_data(_head_before_body(self._headers))
            self._feed(piece[num_parsed_bytes:])

    def _end_of_piece(self) -> int:
        most = len(self._unread)
        if self.arrival is Arrival.BODY:
            return min(most, self._unread_from + (self._num_body_bytes_left or _CHUNKED_PIECE_BYTES))
        begun, num_read = self._end_of_read, len(self._end_of_read)
        if end := _END_OF_HEAD.search(begun + self._unread[self._unread_from : self._unread_from + 2]):
            return self._unread_from + end.end() - num_read
        end = _END_OF_HEAD.search(self._unread, self._unread_from)
        return most if end is None else end.end()

    # -- what httptools calls ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_cut_off:
            return
        self.arrival, self._url, self._headers = Arrival.HEAD, b"", []
        self._num_body_bytes_left, self._num_excess_bytes, self._expects_continue = 0, 0, False
        self._listener.request_began()

    def on_url(self, part: bytes) -> None:
        self._url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.arrival is not Arrival.HEAD:
            return  # a trailer, behind a body
        name = name.lower()
        if name == b"content-length":
            self._num_body_bytes_left = int(value)
        elif name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"
        if len(self._headers) == MAX_HEADERS:
            raise InvalidRequestError(f"the request has more than {MAX_HEADERS} headers")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_cut_off:
            self._is_cut_off = False
            return
        method = self._parser.get_method()
        self._is_cut_off = self._parser.should_upgrade() and method != b"CONNECT"
        self.arrival, self._num_held_bytes = Arrival.BODY, 0
        url, version = httptools.parse_url(self._url), self._parser.get_http_version()
        self._listener.head_arrived(
            RequestHead(
                method.decode("ascii"),
                version,
                url.path or b"/",
                url.query or b"",
                self._headers,
                version != "1.0" and self._parser.should_keep_alive(),
                version != "1.0" and self._expects_continue,
            )
        )

    def on_body(self, part: bytes) -> None:
        self._num_held_bytes = 0
        self.num_parts += 1
        if self._num_body_bytes_left:
            self._num_body_bytes_left -= len(part)
        else:
            self._num_excess_bytes -= 2 * len(part)
        self._listener.body_arrived(part)

    def on_message_complete(self) -> None:
        if self._is_cut_off:
            return
        self.arrival, self._num_held_bytes = Arrival.NOTHING, 0
        self._listener.request_arrived()


def _head_before_body(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a request head with the framing of `headers`, so that a parser can read the body behind it."""
    framing = [b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING]
    return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing)
