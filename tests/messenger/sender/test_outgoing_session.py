"""Writes and fetches between two messengers while nothing breaks."""

import asyncio
import gc
import os
from pathlib import Path

import pytest

from messenger.sender.requests import Urgency, WriteOutcome
from messenger.transport.transports import Transport
from messenger.wire.messages import WriteEntry
from mooncake.errors import PoolError, TransferError
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
        assert peer.throughput.pending_bytes == 0


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
        assert (await node.peer()).throughput.pending_bytes == 0


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
        assert peer.throughput.pending_bytes == 0
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
