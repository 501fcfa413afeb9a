"""Writes and fetches between two messengers while nothing breaks."""

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from messenger.sender.peer_session import MAX_QUEUED_REQUESTS, PeerSession
from messenger.sender.requests import ProbeRequest, Urgency, WriteOutcome
from messenger.shm import copy_table
from messenger.shm.shared_pages import SharedPages
from messenger.transport.transports import Traffic, Transport
from messenger.wire.messages import Abandon, Write, WriteEntry
from messenger.wire.protocol import encode_frame
from mooncake.errors import PoolError, TransferError
from mooncake.messages.blocks import KVLayout
from tests.messenger.fabric import LARGE, SMALL, TINY, fabric, key, until

PAGES = range(6)
WAYS = [("tcp", 1, 1), ("tcp", 2, 1), ("tcp", 4, 1), ("tcp", 1, 2), ("tcp", 2, 2), ("shm", 1, 1)]
every_way = pytest.mark.parametrize(("transport", "streams", "num_addresses"), WAYS)


def num_lanes(transport: str, streams: int, num_addresses: int) -> int:
    return 1 if transport == "shm" else streams * num_addresses


@every_way
async def test_writes_arrive_whole(tmp_path: Path, transport: str, streams: int, num_addresses: int) -> None:
    async with fabric(tmp_path, transport=transport, streams=streams) as node:
        for _ in range(num_addresses if transport == "tcp" else 0):
            node.proxy()
        await node.peer(num_lanes(transport, streams, num_addresses))
        grant = node.pages.grant(1, PAGES)
        await node.write(1, PAGES)
        node.assert_written(PAGES)
        assert grant.is_complete
        num_bytes = len(PAGES) * SMALL.block_bytes
        assert node.sent.sent_bytes[Transport(transport)] == num_bytes
        assert node.received.received_bytes[Transport(transport)] == num_bytes
        await until(lambda: not grant.writers)


@every_way
async def test_fetches_bring_what_is_there(
    tmp_path: Path, transport: str, streams: int, num_addresses: int
) -> None:
    async with fabric(tmp_path, transport=transport, streams=streams) as node:
        for _ in range(num_addresses if transport == "tcp" else 0):
            node.proxy()
        peer = await node.peer(num_lanes(transport, streams, num_addresses))
        node.publish([0, 2, 3])
        untouched = bytes(node.sender_memory.page(1))
        assert await node.fetch(range(4)) == [0, 2, 3]
        for page in (0, 2, 3):
            assert node.sender_memory.page(page) == node.receiver_memory.page(page)
        assert node.sender_memory.page(1) == untouched
        assert await node.fetch([7, 8]) == []
        layers = range(1, 3)
        view = node.sender_memory.layers(9, layers)
        checksums = node.receiver_memory.checksums(3, layers)
        assert await peer.fetch([key(3)], [view], layers) == {0: checksums}
        assert view == node.receiver_memory.layers(3, layers)
        await until(lambda: node.pages.num_leases == 0)
        assert node.sent.received_bytes[Transport(transport)] == 3 * SMALL.block_bytes + len(view)


@pytest.mark.parametrize(("transport", "streams"), [("tcp", 1), ("tcp", 2), ("shm", 1)])
async def test_many_transfers_and_fetches_at_once(tmp_path: Path, transport: str, streams: int) -> None:
    async with fabric(tmp_path, num_pages=240, transport=transport, streams=streams) as node:
        peer = await node.peer()
        node.publish(range(200, 240))
        async with asyncio.TaskGroup() as tasks:
            for number in range(50):
                pages = range(number * 4, number * 4 + 4)
                node.pages.grant(number, pages)
                urgency = Urgency.BULK if number % 3 else Urgency.LATENCY
                tasks.create_task(node.write(number, pages, urgency))
            fetches = [tasks.create_task(node.fetch([page, page + 1])) for page in range(200, 240, 2)]
        node.assert_written(range(200))
        assert [fetch.result() for fetch in fetches] == [[0, 1]] * 20
        for page in range(200, 240):
            assert node.sender_memory.page(page) == node.receiver_memory.page(page)
        assert peer.throughput.in_flight_bytes == 0


@pytest.mark.parametrize("urgency", list(Urgency))
@pytest.mark.parametrize(("transport", "streams"), [("tcp", 1), ("tcp", 4), ("shm", 1)])
async def test_more_bytes_than_the_windows_take(
    tmp_path: Path, transport: str, streams: int, urgency: Urgency
) -> None:
    async with fabric(tmp_path, LARGE, 24, transport=transport, streams=streams) as node:
        pages = range(20)
        grant = node.pages.grant(1, pages)
        await node.write(1, pages, urgency)
        assert grant.is_complete
        node.assert_written(pages)


async def test_one_frame_may_have_parts_of_many_pages(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        peer = await node.peer()
        node.pages.grant(1, PAGES)
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "parts", lambda: None) as transfer:
            for layers in (range(2), range(2, 3), range(3, 4)):
                entries = [node.entry(page, layers) for page in PAGES]
                num_bytes = len(PAGES) * len(layers) * SMALL.layer_bytes
                await transfer.write(entries, num_bytes, outcomes.append)
            await until(lambda: len(outcomes) == 3)
        node.assert_written(PAGES)


async def test_a_source_that_fails_fails_the_fetch_and_nothing_else(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        node.publish([0])
        node.pages.read_failure = PoolError("the disk is on fire")
        with pytest.raises(TransferError, match=r"receiver cannot send: the disk is on fire"):
            await node.fetch([0])
        node.pages.read_failure = None
        assert await node.fetch([0]) == [0]
        with pytest.raises(TransferError, match=r"layers \[0, 9\) are no part of \[0, 4\)"):
            await (await node.peer()).fetch([key(0)], [node.sender_memory.page(0)], range(9))
        await node.assert_works()


async def test_a_fetch_of_nothing_finds_nothing(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        assert await node.fetch([]) == []


async def test_a_fetch_of_too_much_is_refused(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 8) as node:
        with pytest.raises(TransferError, match="ask for fewer blocks"):
            await node.fetch(range(5))
        assert await node.fetch([0]) == []


async def test_a_cancelled_fetch_leaves_its_views_alone_afterwards(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        node.publish([0])
        node.pages.may_read.clear()
        fetch = asyncio.create_task(node.fetch([0]))
        peer = await node.peer()
        await until(lambda: peer.lanes[0].num_outstanding == 1)
        fetch.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not fetch.done()  # its bytes may still come
        node.pages.may_read.set()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        node.sender_memory.page(0)[:] = bytes(SMALL.block_bytes)
        await node.assert_works()
        assert node.sender_memory.page(0) == bytes(SMALL.block_bytes)
        await until(lambda: node.pages.num_leases == 0)


async def test_a_cancelled_write_is_given_up_at_the_other_side(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 24) as node:
        grant = node.pages.grant(1, range(20))
        write = asyncio.create_task(node.write(1, range(20), Urgency.BULK))
        await until(lambda: grant.arrived)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
        await until(lambda: grant.failure is not None)
        assert grant.failure == "sender gave up: cancelled by its worker"
        await node.assert_works()
        assert (await node.peer()).throughput.in_flight_bytes == 0


@pytest.mark.parametrize("streams", [1, 2])
async def test_a_transfer_left_by_an_exception_tells_the_receiver_why(tmp_path: Path, streams: int) -> None:
    async with fabric(tmp_path, streams=streams) as node:
        peer = await node.peer(streams)
        grant = node.pages.grant(1, PAGES)

        async def give_up() -> None:
            with peer.transfer(1, "given up", lambda: None) as transfer:
                await transfer.write([node.entry(0)], SMALL.block_bytes, lambda outcome: None)
                await until(lambda: grant.arrived)
                raise TransferError("the source is gone")

        with pytest.raises(TransferError, match="the source is gone"):
            await give_up()
        await until(lambda: grant.failure is not None)
        assert grant.failure == "sender gave up: the source is gone"
        await node.assert_works()


async def test_a_revoked_grant_ends_the_transfer(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        peer = await node.peer()
        grant = node.pages.grant(1, PAGES)
        changed = asyncio.Event()
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "revoked", changed.set) as transfer:
            await transfer.write([node.entry(0)], SMALL.block_bytes, outcomes.append)
            await until(lambda: grant.arrived)
            node.pages.revoke(1, "nobody wants it")
            await until(lambda: transfer.failure is not None)
            with pytest.raises(TransferError, match="receiver ended the transfer: nobody wants it"):
                await transfer.write([node.entry(1)], SMALL.block_bytes, outcomes.append)
            await until(lambda: len(outcomes) == 2)
        assert outcomes == [WriteOutcome.PLACED, WriteOutcome.FAILED]
        await node.assert_works()


async def test_a_grant_revoked_between_writes_refuses_those_to_come(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 24) as node:
        grant = node.pages.grant(1, range(20))
        write = asyncio.create_task(node.write(1, range(20)))
        await until(lambda: grant.arrived)
        node.pages.revoke(1, "nobody wants it")
        with pytest.raises(TransferError, match=r"nobody wants it|revoked meanwhile|is unknown here"):
            await write
        await node.assert_works()


async def test_an_unknown_grant_is_refused_by_name(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        with pytest.raises(TransferError, match="grant 77 is unknown here"):
            await node.write(77, [0])
        await node.assert_works()


async def test_a_probe_moves_bytes_for_nobody(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        peer = await node.peer()
        await asyncio.gather(*(peer.probe(memoryview(bytes(3 << 20))) for _ in range(4)))
        assert node.sent.sent_bytes[Transport.TCP] == 0
        assert peer.throughput.in_flight_bytes == 0
        await node.assert_works()


async def test_bulk_does_not_wait_for_a_latency_request_that_takes_long(tmp_path: Path) -> None:
    async with fabric(tmp_path, SMALL, 16) as node:
        node.publish([15])
        peer = await node.peer()
        node.pages.grant(1, [0, 1])
        node.pages.may_read.clear()  # it is on SSD
        urgent = asyncio.create_task(node.fetch([15], peer))
        await until(lambda: peer.throughput.in_flight_bytes)
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
        await until(lambda: peer.throughput.in_flight_bytes == MAX_QUEUED_REQUESTS * LARGE.block_bytes)
        complete = node.pages.complete

        def record(grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
            order.append(grant_id)
            return complete(grant_id, entry, heads)

        node.pages.complete = record  # type: ignore[method-assign]
        urgent = asyncio.create_task(node.write(2, [18], Urgency.LATENCY))
        await until(lambda: peer.throughput.in_flight_bytes == (MAX_QUEUED_REQUESTS + 1) * LARGE.block_bytes)
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
    num_requests = 3 * MAX_QUEUED_REQUESTS
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
        await until(lambda: len(waiting) == num_requests - MAX_QUEUED_REQUESTS)
        assert peer.throughput.in_flight_bytes == MAX_QUEUED_REQUESTS * SMALL.block_bytes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(done) == num_requests - MAX_QUEUED_REQUESTS  # who never got in has heard of it
        proxy.heal()
        await until(lambda: len(done) == num_requests)
        assert peer.throughput.in_flight_bytes == 0
        await node.assert_works()


async def test_a_refused_write_costs_no_connection(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        peer = await node.peer()
        (lane,) = peer.lanes
        node.pages.grant(1, [0, 1])
        with pytest.raises(TransferError, match="page 5 is no part of grant 1"):
            await node.write(1, [0, 5])
        await node.assert_works()
        assert list(peer.lanes) == [lane]


async def test_a_write_refused_on_completion_is_heard_of(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        node.pages.grant(1, [0])
        begin = node.pages.begin

        def begin_and_revoke(grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview | None:
            view = begin(grant_id, entry, heads)
            if grant_id == 1:
                node.pages.grants[1].failure = "revoked"
            return view

        node.pages.begin = begin_and_revoke  # type: ignore[method-assign]
        with pytest.raises(TransferError, match="refused a write: revoked meanwhile"):
            await node.write(1, [0])
        await node.assert_works()


@pytest.mark.parametrize("layout", [LARGE, TINY])
async def test_where_a_sender_cannot_write_itself_the_receiver_copies(
    tmp_path: Path, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no compiler, or the layers are too short for what it compiles."""

    if layout is LARGE:
        monkeypatch.setattr(copy_table, "native", lambda: None)
    async with fabric(tmp_path, layout, 4, transport="shm") as node:
        node.pages.grant(1, [0, 1])
        await node.write(1, [0, 1])
        node.assert_written([0, 1])
        assert node.sent.sent_bytes[Transport.SHM] == 2 * layout.block_bytes


async def test_what_is_written_over_shared_memory_is_there_before_the_receiver_knows(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 4, transport="shm") as node:
        grant = node.pages.grant(1, [0])
        peer = await node.peer()
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "quick", lambda: None) as transfer:
            writing = transfer.write([node.entry(0)], node.layout.block_bytes, outcomes.append)
            with pytest.raises(StopIteration):
                writing.send(None)
            assert outcomes == [WriteOutcome.PLACED]
            node.assert_written([0])
            assert not grant.is_complete
            assert not transfer.is_confirmed
            await until(lambda: transfer.is_confirmed)
            assert grant.is_complete


async def test_what_is_waited_for_is_copied_between_pieces_of_bulk(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 16, transport="shm") as node:
        node.pages.grant(1, [0])
        node.pages.grant(2, range(1, 9))
        node.pages.grant(3, [9])
        await node.write(1, [0])  # from now on others are expected to be in a hurry
        peer, order = await node.peer(), list[str]()
        with (
            peer.transfer(2, "bulk", lambda: None, Urgency.BULK) as bulk,
            peer.transfer(3, "urgent", lambda: None) as urgent,
        ):
            for page in range(1, 9):
                await bulk.write([node.entry(page)], LARGE.block_bytes, lambda _: order.append("bulk"))
            while not order:
                await asyncio.sleep(0)
            await urgent.write([node.entry(9)], LARGE.block_bytes, lambda _: order.append("urgent"))
            await until(lambda: bulk.is_confirmed and urgent.is_confirmed and len(order) == 9)
        assert order == ["bulk", "urgent", *["bulk"] * 7]
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
            if not (bulk.is_confirmed and urgent.is_confirmed and num_through == 12):
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
            await until(lambda: bulk.is_confirmed and urgent.is_confirmed and num_through == 12)
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
    peer, gave_way = PeerSession("receiver", Traffic()), []
    assert not peer.should_yield()
    for _ in range(6):
        request = ProbeRequest(memoryview(b"1"), Urgency.LATENCY, lambda _: None)
        await peer.submit(request)
        request.done(None)
        gave_way.append(peer.should_yield())
    assert gave_way == [True, True, False, True, True, False]
    assert not peer.should_yield()


async def test_who_has_waited_goes_on_before_bulk_is_sent() -> None:
    peer, is_answered, order = PeerSession("receiver", Traffic()), asyncio.Event(), list[str]()

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


async def test_of_bulk_that_was_placed_the_receiver_hears_with_what_somebody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messenger.sender.send_queue.NOT_URGENT_S", 3600.0)
    async with fabric(tmp_path, LARGE, 16, transport="shm", streams=1) as node:
        grant, outcomes = node.pages.grant(1, range(8)), list[WriteOutcome]()
        node.pages.grant(2, [8])
        peer = await node.peer()
        with peer.transfer(1, "bulk", lambda: None, Urgency.BULK) as bulk:
            for page in range(8):
                await bulk.write([node.entry(page)], LARGE.block_bytes, outcomes.append)
            await until(lambda: len(outcomes) == 8)
            assert not grant.arrived
            await node.write(2, [8])
            await until(lambda: bulk.is_confirmed)
        assert grant.is_complete
        node.assert_written(range(9))


@pytest.mark.parametrize("num_slots", [2, 1])
async def test_what_the_receiver_was_not_told_is_said_again_on_another_lane(
    tmp_path: Path, num_slots: int
) -> None:
    """Also on one that found no slot."""
    async with fabric(tmp_path, LARGE, 4, transport="shm", streams=2) as node:
        slots = node.receiver_memory.copy_table
        take_slot = slots.take_slot
        slots.take_slot = lambda pid: take_slot(pid) if len(node.slots_taken) < num_slots else None  # type: ignore[method-assign]
        grant = node.pages.grant(1, [0, 1])
        peer = await node.peer(2)
        with_slot = sorted(peer.lanes, key=lambda lane: lane._copies.pages is None)
        assert [lane._copies.pages is not None for lane in with_slot] == [True, num_slots == 2]
        peer._queues.set_lanes(with_slot)  # the first one takes it
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "told twice", lambda: None) as transfer:
            for lane in peer.lanes:  # what they say is lost with them
                lane._send_queue._outbox.post = lambda *_: None  # type: ignore[method-assign]
                if lane._copies.pages is not None:
                    sends(lane._copies.pages, lambda fd, word: len(word))
            await transfer.write([node.entry(0)], node.layout.block_bytes, outcomes.append)
            node.sender_memory.page(0)[:8] = bytes(8)  # nobody reads it any more
            lane = next(lane for lane in peer.lanes if lane.num_outstanding)
            other = next(each for each in peer.lanes if each is not lane)
            del other._send_queue._outbox.post
            lane.give_up("a test")
            await until(lambda: transfer.is_confirmed)
            assert outcomes == [WriteOutcome.PLACED]
            assert [page for page, _ in grant.arrived] == [0] * node.layout.num_layers


def sends(shared: SharedPages, send: Callable[[int, bytes], int]) -> None:
    """What is said when bytes are in their pages goes there."""
    place = shared.place

    def place_and_send(write: Write, layer_bytes: int, fd: int, word: bytes) -> int | None:
        return None if place(write, layer_bytes) is None else send(fd, word)

    shared.place = place_and_send  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("num_bytes", [0, 1, 30])
async def test_what_did_not_leave_with_the_bytes_that_it_is_about_follows(
    tmp_path: Path, num_bytes: int
) -> None:
    def send(fd: int, word: bytes) -> int:
        assert len(word) > 30
        return os.write(fd, word[:num_bytes]) if num_bytes else 0

    async with fabric(tmp_path, LARGE, 4, transport="shm", streams=1) as node:
        peer = await node.peer()
        (lane,) = peer.lanes
        assert lane._copies.pages is not None
        sends(lane._copies.pages, send)
        for page in range(3):  # with each the end of the one before
            grant = node.pages.grant(page, [page])
            await node.write(page, [page])
            assert grant.is_complete
        await until(lambda: not any(grant.writers for grant in node.pages.grants.values()))
        grant = node.pages.grant(3, [3])
        with peer.transfer(3, "said at once", lambda: None) as transfer:
            entry, word = node.entry(3), Abandon(99)
            await transfer.write([entry], LARGE.block_bytes, lambda _: lane.post(word, may_wait=True))
            await until(lambda: transfer.is_confirmed)
        assert grant.is_complete


async def test_a_placed_write_that_is_refused_fails_its_transfer(tmp_path: Path) -> None:
    async with fabric(tmp_path, transport="shm") as node:
        grant = node.pages.grant(1, [0])
        peer = await node.peer()
        outcomes: list[WriteOutcome] = []
        with peer.transfer(1, "revoked", lambda: None) as transfer:
            await transfer.write([node.entry(0)], node.layout.block_bytes, outcomes.append)
            grant.failure = "revoked"
            await until(lambda: transfer.failure is not None)
            assert transfer.failure == "receiver refused a write: grant 1 is unknown here"
        assert outcomes == [WriteOutcome.PLACED]
        node.pages.revoke(1, "revoked")
        await node.assert_works()


async def test_two_senders_do_not_meet(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        other = node.peers_with(key=node.key, instance="other")
        node.pages.grant(1, [0])
        node.pages.grant(2, [1])
        await asyncio.gather(node.write(1, [0]), node.write(2, [1], peer=await other.peer(node.address)))
        node.assert_written([0, 1])


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_an_address_of_an_earlier_life_is_refused(tmp_path: Path, transport: str) -> None:
    async with fabric(tmp_path, transport=transport) as node:
        late = node.address_with(incarnation=2)
        with pytest.raises(TransferError, match="the grant is out of date"):
            await node.peers.peer(late)
        await until(lambda: not node.slots_taken)
        await node.assert_works()


async def test_an_address_without_a_place_is_refused(tmp_path: Path) -> None:
    async with fabric(tmp_path) as node:
        with pytest.raises(TransferError, match="no path"):
            await node.peers.peer(node.address_with(tcp_endpoints=()))
        await node.assert_works()


async def test_the_mapping_of_a_lost_messenger_goes_at_once(tmp_path: Path) -> None:
    gc.disable()
    try:
        async with fabric(tmp_path, transport="shm") as node:
            before = num_files()
            for grant_id in range(3):
                peer = await node.peer()
                node.pages.grant(grant_id, [grant_id])
                await node.write(grant_id, [grant_id])
                assert num_files() > before
                peer.lanes[0].give_up("its end")
                await until(lambda peer=peer: peer.closed_reason and num_files() == before)  # type: ignore[misc]
    finally:
        gc.enable()


def num_files() -> int:
    """Files, sockets and shared memory that this process has open."""
    return len(os.listdir("/proc/self/fd"))
