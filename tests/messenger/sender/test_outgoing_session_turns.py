"""The order of transfers between two messengers: urgent ones go before bulk."""

import asyncio
from pathlib import Path

import pytest

from messenger.sender.outgoing_session import MAX_PENDING_REQUESTS, OutgoingSession
from messenger.sender.requests import ProbeRequest, Urgency, WriteOutcome
from messenger.transport.transports import Traffic
from messenger.wire.messages import Abandon, WriteEntry
from messenger.wire.protocol import encode_frame
from tests.messenger.fabric import LARGE, SMALL, fabric, until


async def test_bulk_does_not_wait_for_a_latency_request_that_takes_long(tmp_path: Path) -> None:
    async with fabric(tmp_path, SMALL, 16) as node:
        node.publish([15])
        peer = await node.peer()
        node.pages.grant(1, [0, 1])
        node.pages.may_read.clear()  # it is on SSD
        urgent = asyncio.create_task(node.fetch([15], peer))
        await until(lambda: peer.throughput.pending_bytes)
        await node.write(1, [0, 1], Urgency.BULK)
        assert not urgent.done()
        node.pages.may_read.set()
        await urgent


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_nothing_is_written_for_a_fetch_that_was_cancelled(tmp_path: Path, transport: str) -> None:
    """At whatever moment: while it is submitted, listens for the answer, waits."""
    layout = LARGE if transport == "shm" else SMALL  # listened for, and long enough for others' turns
    async with fabric(tmp_path, layout, 4, transport=transport) as node:
        node.publish([0, 1])
        peer = await node.peer()
        view = node.sender_memory.page(0)
        for num_turns in range(60):
            view[:] = bytes(len(view))
            task = asyncio.create_task(node.fetch([0], peer))
            for _ in range(num_turns % 6):
                await asyncio.sleep(0)
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert outcome == [0] or isinstance(outcome, asyncio.CancelledError)
            view[:] = bytes(len(view))  # it belongs to somebody else now
            assert await node.fetch([1], peer) == [0]
            assert view == bytes(len(view))


async def test_latency_goes_before_bulk_that_still_waits(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 24, streams=1) as node:
        proxy = node.proxy()
        peer = await node.peer()
        order: list[int] = []
        node.pages.grant(1, range(18))
        node.pages.grant(2, [18])
        proxy.black_hole()
        bulk = asyncio.create_task(node.write(1, range(18), Urgency.BULK))
        await until(lambda: peer.throughput.pending_bytes == MAX_PENDING_REQUESTS * LARGE.block_bytes)
        complete = node.pages.complete

        def record(grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
            order.append(grant_id)
            return complete(grant_id, entry, heads)

        node.pages.complete = record  # type: ignore[method-assign]
        urgent = asyncio.create_task(node.write(2, [18], Urgency.LATENCY))
        await until(lambda: peer.throughput.pending_bytes == (MAX_PENDING_REQUESTS + 1) * LARGE.block_bytes)
        num_sent = peer.lanes[0].num_outstanding
        assert num_sent < 12
        proxy.heal()
        await asyncio.gather(bulk, urgent)
        # What was under way cannot be overtaken.
        assert order.index(2) <= num_sent + 1


async def test_bulk_takes_all_streams_while_nobody_is_in_a_hurry(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 24, streams=2) as node:
        proxy = node.proxy()
        peer = await node.peer(2)
        proxy.black_hole()
        node.pages.grant(1, range(18))
        bulk = asyncio.create_task(node.write(1, range(18), Urgency.BULK))
        await until(lambda: all(lane.num_outstanding for lane in peer.lanes))
        proxy.heal()
        await bulk
        node.assert_written(range(18))


async def test_a_stream_is_kept_free_of_bulk_once_somebody_was_in_a_hurry(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 24, streams=2) as node:
        proxy = node.proxy()
        peer = await node.peer(2)
        node.pages.grant(3, [19])
        await node.write(3, [19], Urgency.LATENCY)
        proxy.black_hole()
        node.pages.grant(1, range(18))
        bulk = asyncio.create_task(node.write(1, range(18), Urgency.BULK))
        await until(lambda: any(lane.num_outstanding for lane in peer.lanes))
        idle = [lane for lane in peer.lanes if not lane.num_outstanding]
        assert len(idle) == 1
        node.pages.grant(2, [18])
        urgent = asyncio.create_task(node.write(2, [18], Urgency.LATENCY))
        await until(lambda: idle[0].num_outstanding == 1)
        proxy.heal()
        await asyncio.gather(bulk, urgent)
        node.assert_written(range(20))


async def test_requests_that_wait_are_few(tmp_path: Path) -> None:
    num_requests = 3 * MAX_PENDING_REQUESTS
    async with fabric(tmp_path, num_pages=num_requests + 1) as node:
        proxy = node.proxy()
        peer = await node.peer()
        proxy.black_hole()
        waiting: set[int] = set()
        done: list[WriteOutcome] = []

        async def submit(page: int) -> None:
            with peer.transfer(page, "one of many", lambda: None, Urgency.BULK) as transfer:
                waiting.add(page)
                await transfer.write([node.entry(page)], SMALL.block_bytes, done.append)
                waiting.discard(page)
                await asyncio.Event().wait()

        for page in range(num_requests):
            node.pages.grant(page, [page])
        tasks = [asyncio.create_task(submit(page)) for page in range(num_requests)]
        await until(lambda: len(waiting) == num_requests - MAX_PENDING_REQUESTS)
        assert peer.throughput.pending_bytes == MAX_PENDING_REQUESTS * SMALL.block_bytes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(done) == num_requests - MAX_PENDING_REQUESTS  # who never got in has heard of it
        proxy.heal()
        await until(lambda: len(done) == num_requests)
        assert peer.throughput.pending_bytes == 0
        await node.assert_works()


async def test_what_is_waited_for_is_copied_between_pieces_of_bulk(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 16, transport="shm") as node:
        node.pages.grant(1, [0])
        node.pages.grant(2, range(1, 9))
        node.pages.grant(3, [9])
        peer = await node.peer()
        now_s = asyncio.get_running_loop().time()
        peer._now_s = lambda: now_s  # bulk that has waited for 10 ms would go first
        await node.write(1, [0])  # from now on others are expected to be in a hurry

        def copied() -> list[int]:
            """The pages that have been copied, of which the peer may be told later."""
            pages = node.receiver_memory, node.sender_memory
            return [page for page in range(1, 10) if len({bytes(side.page(page)) for side in pages}) == 1]

        with (
            peer.transfer(2, "bulk", lambda: None, Urgency.BULK) as bulk,
            peer.transfer(3, "urgent", lambda: None) as urgent,
        ):
            for page in range(1, 9):
                await bulk.write([node.entry(page)], LARGE.block_bytes, lambda _: None)
            while not (before := copied()):
                await asyncio.sleep(0)
            await urgent.write([node.entry(9)], LARGE.block_bytes, lambda _: None)
            assert copied() == [*before, 9]
            assert 8 not in before
            await until(lambda: bulk.is_acknowledged and urgent.is_acknowledged)
        node.assert_written(range(10))


async def test_those_in_a_hurry_add_no_turns_of_bulk(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 16, transport="shm") as node:
        node.pages.grant(1, range(8))
        node.pages.grant(2, range(8, 12))
        peer, order, loop = await node.peer(), list[str](), asyncio.get_running_loop()
        (lane,) = peer.lanes
        turn = lane._turn

        def counted() -> None:
            order.append("lane")
            turn()

        def tick() -> None:
            order.append("loop")
            if not (bulk.is_acknowledged and urgent.is_acknowledged and num_through == 12):
                loop.call_soon(tick)

        def through(_: WriteOutcome) -> None:
            nonlocal num_through
            num_through += 1

        num_through = 0
        lane._turn = counted  # type: ignore[method-assign]
        with (
            peer.transfer(1, "bulk", lambda: None, Urgency.BULK) as bulk,
            peer.transfer(2, "urgent", lambda: None) as urgent,
        ):
            tick()
            for page in range(8):
                await bulk.write([node.entry(page)], LARGE.block_bytes, through)
            for page in range(8, 12):
                await urgent.write([node.entry(page)], LARGE.block_bytes, through)
            await until(lambda: bulk.is_acknowledged and urgent.is_acknowledged and num_through == 12)
        assert "lane lane" not in " ".join(order)


async def test_what_cannot_wait_for_its_turn_goes_behind_what_was_said_before(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        (lane,) = (await node.peer()).lanes
        sent, post, answers = list[bytes](), lane._send_queue._outbox.post, list[str | None]()
        lane._send_queue._outbox.post = lambda *pieces: (sent.append(b"".join(pieces)), post(*pieces))  # type: ignore[func-returns-value]
        lane.post(Abandon(99))
        lane.send(ProbeRequest(memoryview(b"1"), Urgency.LATENCY, answers.append))
        assert sent[0].startswith(encode_frame(Abandon(99)))
        await until(lambda: answers == [None])
        assert len(sent) == 1


async def test_a_lane_gives_way_to_who_was_served_but_not_for_ever() -> None:
    peer, gave_way = OutgoingSession("receiver", Traffic()), []
    assert not peer.should_yield()
    for _ in range(6):
        request = ProbeRequest(memoryview(b"1"), Urgency.LATENCY, lambda _: None)
        await peer.submit(request)
        request.done(None)
        gave_way.append(peer.should_yield())
    assert gave_way == [True, True, False, True, True, False]
    assert not peer.should_yield()


async def test_who_has_waited_goes_on_before_bulk_is_sent() -> None:
    peer, is_answered, order = OutgoingSession("receiver", Traffic()), asyncio.Event(), list[str]()

    async def wait() -> None:
        await is_answered.wait()
        order.append("goes on")

    request = ProbeRequest(memoryview(b"1"), Urgency.LATENCY, lambda _: is_answered.set())
    await peer.submit(ProbeRequest(memoryview(b"2"), Urgency.BULK, lambda _: None))
    await peer.submit(request)
    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    peer._wake_one = lambda urgency: order.append(urgency.name)  # type: ignore[func-returns-value, method-assign, return-value]
    request.done(None)
    await until(lambda: len(order) > 1)
    await waiting
    assert order[:2] == ["goes on", "BULK"]
