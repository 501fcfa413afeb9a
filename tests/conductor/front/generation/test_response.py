"""What is received leaves at once if the client reads, else when it reads again."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from conductor.front.errors import GenerationFailedError
from conductor.front.generation.generation import Delta
from conductor.front.generation.reception import Event, Lost, Receive, Received
from conductor.front.generation.response import GenerationResponse
from conductor.front.http.exchange import RESPONSE_STREAM
from conductor.front.metrics import Metrics, RequestOutcome
from mooncake.messages.requests import FinishReason


class FakeGeneration:
    """One choice."""

    def __init__(self) -> None:
        self.is_over = self.is_closed = False
        self.num_gained = 0

    async def begin(self, receive: Receive) -> None:
        self.receive = receive

    def gain(self, event: Event) -> Delta:
        self.num_gained += 1
        if isinstance(event, Lost):
            raise event.error
        return Delta(0, str(event.token_ids[0]), event.token_ids, event.finish_reason)

    async def end(self, request_id: str, reason: FinishReason) -> None:
        self.is_over = True

    def usage(self) -> None:
        pass

    async def aclose(self) -> None:
        self.is_closed = True


class FakeAnswers:
    def seen(self, delta: Delta) -> Delta:
        return delta

    def chunks(self, delta: Delta, usage: Callable[[], None]) -> bytes:
        if delta.text == "-1":
            raise KeyError("a bug")
        return delta.text.encode()

    def end(self, usage: None) -> bytes:
        return b"end"


class Client:
    """And the server between. Reads while `reads` is set."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.has_started = self.is_over = self.is_broken = self.is_gone = False

    async def send(self, message: Any) -> None:
        if self.is_broken:
            raise RuntimeError("a bug of the server")
        await self.reads.wait()
        if self.is_gone:
            return
        self.has_started = True
        if message["type"] == "http.response.body":
            self.write(message["body"])
            self.is_over = not message["more_body"]

    @property
    def takes_more(self) -> bool:
        return self.has_started and self.reads.is_set() and not self.is_broken

    def write(self, part: bytes) -> None:
        assert not self.is_over, "nothing may follow the end"
        assert part
        self.bodies.append(part)

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        self.disconnected = callback

    def hang_up(self) -> None:
        self.is_gone = True
        self.disconnected()
        self.reads.set()

    async def receive(self) -> dict[str, str]:
        raise AssertionError("the body has been read")


class Served:
    def __init__(self) -> None:
        self.client, self.generation = Client(), FakeGeneration()
        self._registry = CollectorRegistry()
        metrics = Metrics(self._registry, "model")
        response = GenerationResponse(self.generation, FakeAnswers(), True, metrics)  # type: ignore[arg-type]
        scope = {"type": "http", "extensions": {RESPONSE_STREAM: self.client}}
        self.task = asyncio.ensure_future(response(scope, self.client.receive, self.client.send))

    def receive(self, token_id: int, finish_reason: FinishReason | None = None) -> None:
        self.generation.receive(Received("r", [token_id], 0, finish_reason))

    def num(self, outcome: RequestOutcome) -> float | None:
        return self._registry.get_sample_value("mooncake_requests_total", {"outcome": outcome.value})


@pytest.fixture
async def served() -> Served:
    served = Served()
    await asyncio.sleep(0)  # the task that answers has begun
    return served


@pytest.fixture
async def started(served: Served) -> Served:
    """The first token has been sent."""
    served.receive(1)
    await asyncio.sleep(0)
    assert served.client.bodies == [b"1"]
    return served


async def test_between_first_and_last_what_is_received_has_been_sent_when_the_call_returns(
    started: Served,
) -> None:
    served = started
    for token_id in (2, 3):
        served.receive(token_id)
        assert served.client.bodies[-1] == b"%d" % token_id
    served.receive(4, FinishReason.LENGTH)
    await served.task
    assert served.client.bodies == [b"1", b"2", b"3", b"4end"]
    assert served.generation.is_closed
    assert served.num(RequestOutcome.FINISHED) == 1


async def test_nothing_overtakes_what_is_being_sent(started: Served) -> None:
    started.client.reads.clear()
    started.receive(2)
    await asyncio.sleep(0)
    started.client.reads.set()  # the task has not gone on yet
    started.receive(3)
    started.receive(4, FinishReason.LENGTH)
    await started.task
    assert started.client.bodies == [b"1", b"2", b"3", b"4end"]


async def test_what_a_slow_client_has_no_room_for_waits_as_it_came(started: Served) -> None:
    served = started
    served.client.reads.clear()
    for token_id in range(2, 100):
        served.receive(token_id, FinishReason.LENGTH if token_id == 99 else None)
    await asyncio.sleep(0)
    assert (served.client.bodies, served.generation.num_gained) == ([b"1"], 2)
    served.client.reads.set()
    await served.task
    assert served.client.bodies == [*(b"%d" % token_id for token_id in range(1, 99)), b"99end"]


async def test_a_slow_client_that_hangs_up_ends_the_sending(started: Served) -> None:
    served = started
    served.client.reads.clear()
    served.receive(2)
    await asyncio.sleep(0)
    served.client.hang_up()
    await served.task
    assert served.client.bodies == [b"1"]
    assert served.generation.is_closed
    assert served.num(RequestOutcome.ABORTED) == 1
    assert len(asyncio.all_tasks()) == 1


async def test_nothing_follows_an_error(started: Served) -> None:
    served = started
    served.generation.receive(Lost("r", GenerationFailedError("gone")))
    served.receive(2)
    await served.task
    assert len(served.client.bodies) == 2
    assert b"gone" in served.client.bodies[1]
    assert served.num(RequestOutcome.FAILED) == 1


async def test_a_bug_is_raised_where_the_request_is_served(served: Served) -> None:
    served.receive(-1)
    with pytest.raises(KeyError, match="a bug"):
        await served.task
    assert served.generation.is_closed
    assert served.num(RequestOutcome.FAILED) == 1


async def test_nothing_is_sent_after_a_bug(started: Served) -> None:
    started.receive(-1)
    started.receive(2)
    with pytest.raises(KeyError):
        await started.task
    assert started.client.bodies == [b"1"]


async def test_whoever_tells_of_an_error_does_not_get_the_bug_that_it_met(served: Served) -> None:
    served.client.is_broken = True
    served.generation.receive(Lost("r", GenerationFailedError("gone")))
    with pytest.raises(RuntimeError, match="a bug of the server"):
        await served.task
    assert served.generation.is_closed
    assert served.num(RequestOutcome.FAILED) == 1
