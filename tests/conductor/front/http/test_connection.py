"""For how long an answer waits for a client that takes nothing of it."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.server import ServerState

from conductor.front.http.connection import BODY, connections
from conductor.front.http.eager import run_eagerly
from conductor.front.http.outbox import Outbox

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
    """Its time passes when a test says so; its tasks never run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(self.now_s + delay_s, lambda: callback(*args))
        self.timers.append(timer)
        return timer

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> Mock:
        coroutine.close()
        return Mock()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer.due_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer.due_s > self.now_s]
        for timer in due:
            if not timer.is_cancelled:
                timer.callback()


class Transport:
    """`num_bytes` wait for the client."""

    num_bytes = 0
    is_aborted = is_closed = False

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True

    def get_extra_info(self, name: str) -> Mock | None:
        return Mock() if name == "socket" else None

    def is_closing(self) -> bool:
        return False


async def never(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    raise AssertionError


class Client:
    """And the connection to it."""

    def __init__(self) -> None:
        self.loop, self.transport, self.outbox = Loop(), Transport(), Outbox()
        config = uvicorn.Config(never, ws="none", log_config=None, timeout_keep_alive=int(LONG_S))
        kind = connections(Mock(), LONG_S, SEND_TIMEOUT_S, 1 << 30, self.outbox)
        self.connection = kind(config, ServerState(), {}, self.loop)  # type: ignore[arg-type]
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def is_cut_off_after(self, seconds: float) -> bool:
        self.loop.wait(seconds)
        return self.transport.is_aborted


@pytest.fixture
def client() -> Client:
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
    client.transport.num_bytes = 100
    client.connection.on_response_complete()
    assert client.is_cut_off_after(SEND_TIMEOUT_S)


async def test_nor_does_an_end_that_was_written_together_with_others(client: Client) -> None:
    client.connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    with client.outbox:
        await client.connection.cycle.send({"type": "http.response.start", "status": 200, "headers": []})
        assert client.transport.num_bytes == 0
        await client.connection.cycle.send({"type": "http.response.body", "body": b"all"})
    assert client.transport.num_bytes > 0
    assert client.is_cut_off_after(SEND_TIMEOUT_S)


def test_what_is_left_of_one_answer_tells_nothing_beside_the_next(client: Client) -> None:
    client.transport.num_bytes = 100
    client.connection.on_response_complete()
    client.connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert not client.is_cut_off_after(SEND_TIMEOUT_S)


def test_nothing_is_watched_where_all_has_been_taken_or_nobody_is_there(client: Client) -> None:
    client.connection.on_response_complete()
    assert not client.is_cut_off_after(SEND_TIMEOUT_S)
    client.transport.num_bytes = 100
    client.connection.pause_writing()
    client.connection.connection_lost(OSError())
    assert not client.is_cut_off_after(SEND_TIMEOUT_S)


def test_parts_of_a_body_are_taken_while_the_client_reads(client: Client) -> None:
    client.connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    cycle = client.connection.cycle
    body = cycle.scope["extensions"][BODY]
    run_eagerly(cycle.send({"type": "http.response.start", "status": 200, "headers": []}))
    num_bytes = client.transport.num_bytes
    assert body.takes_more()
    body.write(b"part")
    assert client.transport.num_bytes - num_bytes == len(b"4\r\npart\r\n")
    client.connection.pause_writing()
    assert not body.takes_more()
    client.connection.resume_writing()
    assert body.takes_more()


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_who_is_put_out_gets_what_waits_of_an_answer(client: Client, num_bytes: int) -> None:
    client.transport.num_bytes = num_bytes
    client.connection.on_response_complete()
    client.connection.put_out()  # type: ignore[attr-defined]
    assert (client.transport.is_closed, client.transport.is_aborted) == (num_bytes > 0, num_bytes == 0)
