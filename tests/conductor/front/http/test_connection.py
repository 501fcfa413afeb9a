"""For how long an answer waits for a client that takes nothing of it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.types import Receive, Scope, Send

from conductor.front.http.connection import Connection, Serving
from conductor.front.http.exchange import RESPONSE_STREAM, ResponseStream
from conductor.front.http.sharing import ConnectionTable, UploadBudget
from conductor.front.http.timers import Timeouts

SEND_TIMEOUT_S = 60.0
LONG_S = 1e9


@dataclass
class Timer:
    due_s: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """Its time passes when a test says so; `run` runs its tasks until they wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.num_run = 0

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(self.now_s + delay_s, lambda: callback(*args))
        self.timers.append(timer)
        return timer

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> Mock:
        self.tasks.append(coroutine)
        return Mock()

    def run(self) -> None:
        for task in self.tasks[self.num_run :]:
            with contextlib.suppress(StopIteration):
                task.send(None)
        self.num_run = len(self.tasks)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer.due_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer.due_s > self.now_s]
        for timer in due:
            if not timer.is_cancelled:
                timer.callback()


class Transport:
    """`num_bytes` wait for the client."""

    num_bytes = most_bytes = 0
    is_aborted = is_closed = False
    is_reading = True

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def set_write_buffer_limits(self, high: int) -> None:
        self.most_bytes = high

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_aborted or self.is_closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", 1


class Client:
    """And the connection to it. `scopes` are those of the requests that have come."""

    def __init__(self, max_pending_bytes: int = 1 << 30) -> None:
        self.loop, self.transport = Loop(), Transport()
        self.table = ConnectionTable(is_tls=False)
        self.scopes: list[Scope] = []
        uploads = UploadBudget[Connection](max_pending_bytes, Connection.make_room)
        timeouts = Timeouts(request_s=LONG_S, send_s=SEND_TIMEOUT_S, idle_s=LONG_S)
        loop: Any = self.loop
        self.connection = Connection(
            Mock(), Serving(self.answer, timeouts, self.table, uploads, loop), "http"
        )
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As far as the test says, by what it sends."""
        self.scopes.append(scope)
        self.receive, self.send = receive, send
        await asyncio.Future()

    def ask(self, request: bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") -> None:
        self.connection.data_received(request)
        self.loop.run()

    def answered(
        self, body: bytes = b"", *, status: int = 200, more_body: bool = False, headers: Any = ()
    ) -> bytes:
        """What is written when the application sends its response."""
        num_before = len(self.transport.written)
        for message in (
            {"type": "http.response.start", "status": status, "headers": headers},
            {"type": "http.response.body", "body": body, "more_body": more_body},
        ):
            with contextlib.suppress(StopIteration):
                self.send(message).send(None)  # type: ignore[attr-defined]
        return self.transport.written[num_before:]

    def is_cut_off_after(self, seconds: float) -> bool:
        self.loop.wait(seconds)
        return self.transport.is_aborted


@pytest.fixture
async def client() -> Client:
    return Client()


def test_who_takes_nothing_is_cut_off(client: Client) -> None:
    client.transport.num_bytes = 100
    client.connection.pause_writing()
    assert not client.is_cut_off_after(SEND_TIMEOUT_S - 1)
    assert client.is_cut_off_after(1)


def test_who_takes_something_may_take_as_long_again(client: Client) -> None:
    client.transport.num_bytes = 100
    client.connection.pause_writing()
    for num_bytes in (90, 80):
        client.transport.num_bytes = num_bytes
        assert not client.is_cut_off_after(SEND_TIMEOUT_S)
    assert client.is_cut_off_after(SEND_TIMEOUT_S)


def test_who_has_made_room_again_may_wait(client: Client) -> None:
    client.transport.num_bytes = 100
    client.connection.pause_writing()
    client.connection.resume_writing()
    assert not client.is_cut_off_after(SEND_TIMEOUT_S)


def test_the_end_of_an_answer_does_not_wait_for_ever(client: Client) -> None:
    client.ask()
    client.transport.num_bytes = 100
    client.answered()
    assert client.is_cut_off_after(SEND_TIMEOUT_S)


def test_nor_does_the_end_of_the_last_one(client: Client) -> None:
    client.ask(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    client.transport.num_bytes = 100
    client.answered()
    assert client.transport.is_closed
    assert client.is_cut_off_after(SEND_TIMEOUT_S)


def test_what_is_left_of_one_answer_tells_nothing_beside_the_next(client: Client) -> None:
    client.ask()
    client.transport.num_bytes = 100
    client.answered()
    client.ask()
    assert not client.is_cut_off_after(SEND_TIMEOUT_S)


def test_nothing_is_watched_where_all_has_been_taken_or_nobody_is_there(client: Client) -> None:
    client.ask()
    client.answered()
    assert not client.is_cut_off_after(SEND_TIMEOUT_S)
    client.transport.num_bytes = 100
    client.connection.pause_writing()
    client.connection.connection_lost(OSError())
    assert not client.is_cut_off_after(SEND_TIMEOUT_S)


def test_parts_of_a_body_are_taken_while_the_client_reads(client: Client) -> None:
    client.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    stream: ResponseStream = client.scopes[0]["extensions"][RESPONSE_STREAM]
    assert not stream.takes_more, "it has not started"
    client.answered(b"first", more_body=True)
    assert stream.takes_more
    num_before = len(client.transport.written)
    stream.write(b"part")
    assert client.transport.written[num_before:] == b"4\r\npart\r\n"
    client.connection.pause_writing()
    assert not stream.takes_more
    client.connection.resume_writing()
    assert stream.takes_more
    has_gone = Mock()
    stream.on_disconnect(has_gone)
    client.connection.connection_lost(None)
    has_gone.assert_called_once_with()
    assert not stream.takes_more


async def test_a_large_body_is_written_as_the_client_reads(client: Client) -> None:
    """TLS copies what is written, and hundreds of clients may read nothing."""
    assert client.transport.most_bytes == 1 << 16
    client.ask()
    body, write = bytes(range(256)) * 1024, client.transport.write
    client.answered(headers=[(b"content-length", b"%d" % len(body))], more_body=True)

    def write_and_pause(data: bytes) -> None:
        write(data)
        client.connection.pause_writing()

    client.transport.write, client.transport.written = write_and_pause, b""  # type: ignore[method-assign]
    sending = asyncio.ensure_future(client.send({"type": "http.response.body", "body": body}))
    num_written = []
    while not sending.done():
        client.connection.resume_writing()
        await asyncio.sleep(0)
        num_written.append(len(client.transport.written))
    await sending
    assert client.transport.written == body
    assert max(after - before for before, after in pairwise([0, *num_written])) == 1 << 16


async def test_a_long_answer_leaves_turns_of_the_event_loop_to_others_between_its_pieces(
    client: Client,
) -> None:
    client.ask()
    client.answered(more_body=True)
    body, num_before = bytes(1 << 20), len(client.transport.written)
    sending = asyncio.ensure_future(client.send({"type": "http.response.body", "body": body}))
    num_written = [num_before]
    while not sending.done():
        await asyncio.sleep(0)
        num_written.append(len(client.transport.written))
    assert num_written[-1] >= num_before + len(body)
    assert max(after - before for before, after in pairwise(num_written)) < len(body) / 8


async def test_what_a_client_that_has_gone_has_not_read_is_dropped(client: Client) -> None:
    client.ask()
    client.answered(more_body=True)
    client.connection.pause_writing()
    sending = asyncio.ensure_future(client.send({"type": "http.response.body", "body": bytes(1 << 20)}))
    await asyncio.sleep(0)
    num_before = len(client.transport.written)
    client.connection.connection_lost(None)
    await sending
    assert len(client.transport.written) == num_before


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_who_makes_room_gets_what_waits_of_an_answer(client: Client, num_bytes: int) -> None:
    client.ask()
    client.answered()
    client.transport.num_bytes = num_bytes
    client.connection.make_room()
    assert (client.transport.is_closed, client.transport.is_aborted) == (num_bytes > 0, num_bytes == 0)


def test_a_connection_that_only_waits_for_its_client_to_read_can_make_room(client: Client) -> None:
    client.ask(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    client.transport.num_bytes = 100
    client.answered()
    assert not client.transport.is_aborted
    assert client.table.make_room()
    assert client.transport.is_aborted


def test_a_pipelined_request_that_still_arrives_can_make_room(client: Client) -> None:
    whole = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    client.ask(whole + b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    assert not client.table.make_room(), "the first one is answered"
    client.answered()
    client.loop.run()
    assert client.table.make_room()
    assert b" 503 " in client.transport.written


def test_trailers_are_no_headers(client: Client) -> None:
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.ask(chunked + b"1\r\nx\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
    assert client.scopes[0]["headers"] == [(b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize(
    ("request_line", "headers", "written"),
    [
        (b"GET / HTTP/1.1", [], b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"),
        (b"GET / HTTP/1.1", [(b"content-length", b"4")], b"content-length: 4\r\n\r\nbody"),
        (b"HEAD / HTTP/1.1", [(b"content-length", b"4")], b"content-length: 4\r\n\r\n"),
        (b"GET / HTTP/1.0", [], b"connection: close\r\n\r\nbody"),
    ],
    ids=["chunked", "of known length", "head", "HTTP/1.0"],
)
def test_framing_of_a_response(client: Client, request_line: bytes, headers: Any, written: bytes) -> None:
    client.ask(request_line + b"\r\nHost: x\r\n\r\n")
    head, _, rest = client.answered(b"body", headers=headers).partition(b"GMT\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert rest == written
    assert client.transport.is_closed == request_line.endswith(b"1.0")


@pytest.mark.parametrize("body", [b"more than 4", b"4"])
def test_a_body_that_is_not_as_long_as_its_head_says_is_a_bug(client: Client, body: bytes) -> None:
    client.ask()
    with pytest.raises(RuntimeError):
        client.answered(body, headers=[(b"content-length", b"4")])


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_has_none_whatever_the_application_sends(client: Client, status: int) -> None:
    client.ask()
    assert client.answered(b"body", status=status).endswith(b"GMT\r\n\r\n")


@pytest.mark.parametrize("has_ended", [False, True], ids=["before the head", "behind the end"])
def test_a_body_before_the_head_or_behind_the_end_is_a_bug(client: Client, has_ended: bool) -> None:
    client.ask()
    if has_ended:
        client.answered()
    num_before = len(client.transport.written)
    with pytest.raises(RuntimeError):
        client.send({"type": "http.response.body", "body": b"body"}).send(None)  # type: ignore[attr-defined]
    assert len(client.transport.written) == num_before


def test_a_header_cannot_end_early(client: Client) -> None:
    client.ask()
    with pytest.raises(ValueError, match="x-name"):
        client.answered(headers=[(b"x-name", b"value\r\nother: x")])


@pytest.mark.parametrize("num_late", range(5))
async def test_small_chunks_are_parsed_some_at_a_time(client: Client, num_late: int) -> None:
    """Each takes as long as a large one: a body of them would hold up all others.

    `num_late` bytes of the head come with the body.
    """
    num_chunks = 5000
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.ask(head[: len(head) - num_late])
    client.ask(head[len(head) - num_late :] + b"1\r\nx\r\n" * num_chunks + b"0\r\n\r\n")
    num_turns, num_bytes = 0, 0
    while True:
        message: Any = None
        try:
            client.receive().send(None)  # type: ignore[attr-defined]
        except StopIteration as returned:
            message = returned.value
        assert message is not None
        assert len(message["body"]) < num_chunks / 4
        num_bytes += len(message["body"])
        if not message["more_body"]:
            break
        assert not client.transport.is_reading
        await asyncio.sleep(0)
        num_turns += 1
    assert num_bytes == num_chunks
    assert num_turns > 4
    assert client.transport.is_reading


async def turns_of(client: Client) -> None:
    """Until no received bytes wait for their turn."""
    while not client.transport.is_reading and not client.transport.is_closing():
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("chunk", "is_refused"), [(b"1\r\nx\r\n", True), (b"10\r\n0123456789abcdef\r\n", False)]
)
async def test_a_body_that_is_mostly_framing_is_refused(
    client: Client, chunk: bytes, is_refused: bool
) -> None:
    client.ask(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.answered()
    client.ask(chunk * 20_000 + b"0\r\n\r\n")
    await turns_of(client)
    assert client.transport.is_closed == is_refused
    if not is_refused:
        client.ask(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100)
        assert len(client.scopes) == 2


async def test_large_chunks_have_longer_turns_than_small_ones(client: Client) -> None:
    client.ask(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.answered()
    client.ask(b"8000\r\n" + bytes(1 << 15) + b"\r\n")
    assert client.transport.is_reading


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n" * 10_000, b"8000\r\n" + bytes(1 << 15) + b"\r\n"])
async def test_bytes_behind_an_early_answer_count_until_they_are_parsed(chunk: bytes) -> None:
    client = Client(max_pending_bytes=2 * len(chunk) - 1)
    client.ask(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.answered()
    client.ask(chunk)
    waits = not client.transport.is_reading
    client.ask(chunk)
    assert client.transport.is_closing() == waits == (chunk[0] == ord("1"))


def test_more_headers_than_any_client_sends_are_refused(client: Client) -> None:
    few = b"".join(b"X-%d: \r\n" % number for number in range(256))
    client.ask(b"GET / HTTP/1.1\r\n" + few + b"\r\n")
    assert len(client.scopes) == 1
    client.answered()
    client.ask(b"GET / HTTP/1.1\r\n" + few + b"One-more: \r\n\r\n")
    assert len(client.scopes) == 1
    assert b" 400 " in client.transport.written
    assert b"more than 256 headers" in client.transport.written
    assert client.transport.is_closed


async def test_a_client_that_stops_reading_can_make_room(client: Client) -> None:
    client.ask()
    assert not client.table.make_room()
    client.connection.pause_writing()
    client.connection.resume_writing()
    assert not client.table.make_room()
    client.connection.pause_writing()
    assert client.table.make_room()
    assert client.transport.is_aborted


def test_a_body_that_nobody_receives_makes_the_client_wait(client: Client) -> None:
    client.ask(b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
    client.ask(bytes(1 << 17))
    assert not client.transport.is_reading
    client.answered()
    assert client.transport.is_reading, "the rest is read, and left"


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"", b""),
        (b"Content-Length: 4\r\n", b"body"),
        (b"Transfer-Encoding: chunked\r\n", b"4\r\nbody\r\n0\r\n\r\n"),
    ],
    ids=["no body", "of known length", "chunked"],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(
    client: Client, framing: bytes, body: bytes, at_once: bool
) -> None:
    """Java's client asks for HTTP/2 with each POST."""
    head = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n" + framing + b"\r\n"
    for part in [head + body] if at_once else [head, body[:3], body[3:]]:
        client.ask(part)
    message = await client.receive()
    assert (message["body"], message["more_body"]) == (b"body" if body else b"", False)
    client.answered()
    client.ask()
    assert len(client.scopes) == 2
    assert not client.transport.is_closed


def test_behind_a_connect_nothing_is_read(client: Client) -> None:
    client.ask(b"CONNECT /x HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n\r\n")
    client.answered()
    assert client.transport.is_closed
    assert [scope["method"] for scope in client.scopes] == ["CONNECT"]


EXPECTING = b"POST / HTTP/%b\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "written"),
    [
        (EXPECTING % b"1.1", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (EXPECTING % b"1.1" + b"b", b""),
        (EXPECTING % b"1.0", b""),
    ],
    ids=["it waits", "it did not wait", "HTTP/1.0 knows no such answer"],
)
async def test_a_client_that_waits_with_its_body_is_told_to_go_on(
    client: Client, said: bytes, written: bytes
) -> None:
    client.ask(said)
    receiving = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0)
    assert client.transport.written == written
    receiving.cancel()


@pytest.mark.parametrize("has_come", [b"", b"b"], ids=["it waits", "it did not wait"])
def test_behind_a_body_that_may_never_come_there_is_no_request(client: Client, has_come: bytes) -> None:
    client.ask(EXPECTING % b"1.1" + has_come)
    head = client.answered()
    assert (b"connection: close\r\n" in head) == client.transport.is_closed == (not has_come)


def test_a_target_without_a_path_is_the_root(client: Client) -> None:
    client.ask(b"GET http://host?x=1 HTTP/1.1\r\nHost: host\r\n\r\n")
    assert (client.scopes[0]["path"], client.scopes[0]["query_string"]) == ("/", b"x=1")


async def test_a_body_whose_response_has_ended_takes_no_room_from_others() -> None:
    client = Client(max_pending_bytes=1000)
    client.ask(b"POST / HTTP/1.1\r\nContent-Length: 2900\r\n\r\n" + bytes(900))
    client.answered()
    for _ in range(2):
        client.ask(bytes(990))
    assert not client.transport.is_closing()
    client.ask(bytes(20) + b"POST / HTTP/1.1\r\nContent-Length: 2900\r\n\r\n" + bytes(900))
    assert len(client.scopes) == 2
    client.ask(bytes(100))
    assert b" 503 " in client.transport.written, "this one is kept"


async def test_a_request_that_makes_room_does_not_end_the_answer_before_it() -> None:
    client = Client(max_pending_bytes=1000)
    client.ask()
    client.ask(b"POST / HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + bytes(1000))
    assert not client.transport.is_closing()
    assert b"connection: close\r\n" in client.answered(b"body")
    assert client.transport.is_closed
