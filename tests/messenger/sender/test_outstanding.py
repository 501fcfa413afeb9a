"""What is awaited on a lane, and what a lost lane hands over."""

import asyncio

from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import FetchRequest, ProbeRequest, Urgency
from messenger.wire.messages import Close, Fetch


def probe(num_bytes: int) -> ProbeRequest:
    return ProbeRequest(memoryview(bytes(num_bytes)), Urgency.BULK, lambda reason: None)


def fetch(num_bytes: int) -> FetchRequest:
    views = [memoryview(bytearray(num_bytes))]
    return FetchRequest(Fetch([b""], 0, 1), views, num_bytes, Urgency.LATENCY, lambda found, reason: None)


async def test_fetches_are_answered_in_an_order_of_their_own() -> None:
    outstanding = Outstanding(1.0, lambda: None)
    first, second, third = probe(1), fetch(10), probe(100)
    for request in (first, second, third):
        outstanding.begin(request)
        outstanding.sent(request)
    assert outstanding.num_bytes == {Urgency.LATENCY: 10, Urgency.BULK: 101}
    assert outstanding.take_fetch() is second
    assert outstanding.take_write() is first
    assert outstanding.num_bytes == {Urgency.LATENCY: 0, Urgency.BULK: 100}
    assert outstanding.num_answered == 2
    assert outstanding.take_all() == [third]
    assert not any(outstanding.num_bytes.values())
    outstanding.end()


async def test_a_close_has_arrived_when_a_later_request_is_answered() -> None:
    outstanding = Outstanding(1.0, lambda: None)
    before, after, close = probe(1), probe(1), Close(1, None)
    for request in (before, after):
        if request is after:
            outstanding.closed(close)
        outstanding.begin(request)
        outstanding.sent(request)
    outstanding.take_write()
    assert outstanding.take_closes() == [close]
    outstanding.closed(close)
    late = probe(1)
    outstanding.begin(late)
    outstanding.sent(late)
    outstanding.take_write()
    outstanding.take_write()
    assert outstanding.take_closes() == []
    outstanding.end()


async def test_an_answer_that_does_not_come_is_missed() -> None:
    missed = asyncio.Event()
    outstanding = Outstanding(0.01, missed.set)
    answered, awaited = fetch(1), probe(1)
    for request in (answered, awaited):
        outstanding.begin(request)
        outstanding.sent(request)
    outstanding.take_fetch()
    await missed.wait()
    outstanding.end()
