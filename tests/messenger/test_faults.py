"""Transfers while connections are reset, stalled, slowed and damaged."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from messenger.sender.lane import Lane
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.requests import Urgency
from messenger.wire.checksums import SHORT_LAYER_BYTES
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout
from tests.messenger.fabric import DEADLINE_S, LARGE, SMALL, TINY, Fabric, fabric, until
from tests.messenger.proxy import Link, Plan

SEED = 20
NUM_SAMPLES = 24
PAGES = range(4)
FETCHED = range(8, 11)


async def transfer(node: Fabric, grant_id: int, num_lanes: int) -> None:
    """A small write and a small fetch, checked."""
    peer = await node.peers.peer(node.address)
    await until(lambda: len(peer.lanes) >= num_lanes or broken(node))
    first = grant_id * len(PAGES)
    pages = range(first, first + len(PAGES))
    node.pages.grant(grant_id, pages)
    await node.write(grant_id, pages, peer=peer)
    node.assert_written(pages)
    assert await node.fetch(FETCHED, peer) == list(range(len(FETCHED)))
    for page in FETCHED:
        assert node.sender_memory.page(page) == node.receiver_memory.page(page)


def broken(node: Fabric) -> bool:
    return any(not link.is_open for proxy in node.proxies for link in proxy.links)


def num_lanes_up(node: Fabric) -> int:
    return sum(len(peer.lanes) for peer in node.peers.all)


def num_open_links(node: Fabric) -> int:
    return sum(link.is_open for proxy in node.proxies for link in proxy.links)


async def bytes_of_a_transfer(folder: Path, num_lanes: int, layout: KVLayout) -> tuple[int, int]:
    """Upwards and downwards, of the connection that moves most."""
    async with fabric(folder, layout, streams=num_lanes) as node:
        proxy = node.proxy()
        node.publish(FETCHED)
        await transfer(node, 0, num_lanes)
        await until(lambda: all(not grant.writers for grant in node.pages.grants.values()))
        return max(link.num_up for link in proxy.links), max(link.num_down for link in proxy.links)


async def reset_one_stream(folder: Path, plan: Plan, layout: KVLayout) -> None:
    """The only connection is lost: an error that says so, and the next transfer works."""
    async with fabric(folder, layout, streams=1) as node:
        proxy = node.proxy()
        proxy.plans.append(plan)
        node.publish(FETCHED)
        try:
            await transfer(node, 0, 1)
        except TransferError:
            assert broken(node)
        # A reset behind the last byte is noticed.
        await until(lambda: num_lanes_up(node) == num_open_links(node))
        await transfer(node, 1, 1)
        await until(lambda: node.pages.num_leases == 0)


async def reset_one_of_two(folder: Path, plan: Plan, position: int, num_addresses: int) -> None:
    """One of two connections is lost: nobody notices."""
    async with fabric(folder, TINY, streams=2 // num_addresses) as node:
        for _ in range(num_addresses):
            node.proxy()
        plans = [Plan(), Plan()]
        plans[position] = plan
        if num_addresses == 1:
            node.proxies[0].plans += plans
        else:
            for proxy, own in zip(node.proxies, plans, strict=True):
                proxy.plans.append(own)
        node.publish(FETCHED)
        await transfer(node, 0, 2)
        await transfer(node, 1, 1)
        await until(lambda: node.pages.num_leases == 0)


def offsets(num_bytes: int, *, full: bool) -> list[int]:
    everything = range(num_bytes + 1)
    return list(everything) if full else sorted(random.Random(SEED).sample(everything, NUM_SAMPLES))


async def every_fault(
    folder: Path,
    num_lanes: int,
    do: Callable[[Plan], Awaitable[None]],
    *,
    up: str = "reset_up_at",
    down: str = "reset_down_at",
    full: bool,
    layout: KVLayout = TINY,
) -> None:
    """At offsets of either direction. A failure says at which."""

    num_up, num_down = await bytes_of_a_transfer(folder, num_lanes, layout)
    plans = [Plan(**{up: at}) for at in offsets(num_up, full=full)]
    plans += [Plan(**{down: at}) for at in offsets(num_down, full=full)]
    for plan in plans:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await do(plan)
        except BaseException as error:
            error.add_note(f"with {plan}")
            raise


sample = pytest.mark.parametrize(
    "full", [pytest.param(False, id="sample"), pytest.param(True, id="every_offset", marks=pytest.mark.soak)]
)


@pytest.mark.cluster
@sample
async def test_the_only_connection_is_reset(tmp_path: Path, full: bool) -> None:
    await every_fault(tmp_path, 1, lambda plan: reset_one_stream(tmp_path, plan, TINY), full=full)


@pytest.mark.cluster
async def test_the_only_connection_is_reset_under_layers_that_compiled_code_places(tmp_path: Path) -> None:
    assert SMALL.layer_bytes > SHORT_LAYER_BYTES >= TINY.layer_bytes
    await every_fault(
        tmp_path, 1, lambda plan: reset_one_stream(tmp_path, plan, SMALL), full=False, layout=SMALL
    )


@pytest.mark.cluster
@pytest.mark.parametrize("num_addresses", [1, 2])
@pytest.mark.parametrize("position", [0, 1])
@sample
async def test_one_of_two_connections_is_reset(
    tmp_path: Path, full: bool, position: int, num_addresses: int
) -> None:
    await every_fault(
        tmp_path, 2, lambda plan: reset_one_of_two(tmp_path, plan, position, num_addresses), full=full
    )


async def test_a_lost_acknowledgement_places_nothing_twice(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        silent, healthy = node.proxy(), node.proxy()
        peer = await node.peer(2)
        silent.black_hole(up=False)
        healthy.black_hole(up=False)
        grant = node.pages.grant(1, PAGES)
        write = asyncio.create_task(node.write(1, PAGES))
        await until(lambda: grant.is_complete)
        assert not write.done()
        silent.reset()  # with acknowledgements in it
        healthy.heal()
        await write
        node.assert_written(PAGES)
        assert peer.closed_reason is None


async def test_a_path_that_dies_is_replaced_by_the_other(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 12, ack_timeout_s=0.4) as node:
        proxies = [node.proxy(), node.proxy()]
        await node.peer(2)
        grant = node.pages.grant(1, range(10))
        write = asyncio.create_task(node.write(1, range(10)))
        await until(lambda: grant.arrived)
        proxies[0].black_hole()
        await write
        node.assert_written(range(10))


async def test_what_a_dead_path_has_half_placed_is_sent_again(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 8, ack_timeout_s=0.3) as node:
        for _ in range(2):
            node.proxy()
        for proxy in node.proxies:  # on whichever is used first
            proxy.plans.append(Plan(stall_up_at=LARGE.block_bytes // 2))
        spare = node.proxy()
        peer = await node.peer(3)
        grant = node.pages.grant(1, range(6))
        write = asyncio.create_task(node.write(1, range(6), peer=peer))
        await until(lambda: grant.receiving)
        await write
        node.assert_written(range(6))
        assert spare.links[0].is_open
        assert not grant.receiving


@pytest.mark.parametrize("way", [{"up": False}, {"down": False}, {}], ids=["down", "up", "both"])
async def test_the_only_path_dies_and_works_again(tmp_path: Path, way: dict[str, bool]) -> None:
    async with fabric(tmp_path, LARGE, 12, ack_timeout_s=1.0, connect_timeout_s=1.0) as node:
        proxy = node.proxy()
        await node.peer()
        grant = node.pages.grant(1, range(10))
        await node.write(1, range(8))
        assert len(grant.arrived) == 8 * LARGE.num_layers
        proxy.black_hole(**way)
        with pytest.raises(TransferError, match=r"no acknowledgement within 1 s"):
            await node.write(1, [8, 9])  # the kernel takes it all
        with pytest.raises(TransferError, match=r"no answer within 1 s"):
            await node.write(1, [1])
        proxy.heal()
        await node.assert_works()


@pytest.mark.cluster
async def test_a_connection_that_never_holds_is_not_tried_without_a_pause(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        flapping, _ = node.proxy(), node.proxy()
        peer = await node.peer(2)
        for num_links in (1, 2):
            await until(lambda: len(peer.lanes) == 2)
            began_s = asyncio.get_running_loop().time()
            flapping.reset()
            await until(lambda num=num_links: len(flapping.links) == num + 1)  # type: ignore[misc]
        assert asyncio.get_running_loop().time() - began_s > 0.9
        await node.assert_works()


@pytest.mark.cluster
async def test_a_lane_comes_back_by_itself(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY, 16, ack_timeout_s=1.0, connect_timeout_s=1.0) as node:
        dying, other = node.proxy(), node.proxy()
        peer = await node.peer(2)
        dying.black_hole()
        node.pages.grant(1, PAGES)
        await node.write(1, PAGES)
        await until(lambda: len(peer.lanes) == 1)
        await until(lambda: len(dying.links) == 2)  # it tries again, for nothing
        dying.heal()
        await until(lambda: len(peer.lanes) == 2)
        other.reset()
        await until(lambda: len(other.links) == 2)
        await node.assert_works()
        assert await node.peers.peer(node.address) is peer


async def test_an_address_that_refuses_is_tried_again_and_does_not_matter(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        refusing, _ = node.proxy(), node.proxy()
        refusing.refuse()
        await node.assert_works()
        for proxy in node.proxies:
            proxy.close()
        await until(lambda: not node.peers.all)
        with pytest.raises(TransferError, match="cannot reach messenger receiver"):
            await node.peers.peer(node.address)
        refusing.accept_again()
        await node.assert_works()


async def test_a_lane_that_is_lost_as_soon_as_it_is_up_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fabric(tmp_path, TINY, 16, streams=1) as node:
        proxy = node.proxy()
        run_lane = OutgoingSession.run_lane

        async def lose(peer: OutgoingSession, lane: Lane) -> str:
            lane.give_up("lost at once")
            return await run_lane(peer, lane)

        monkeypatch.setattr(OutgoingSession, "run_lane", lose)
        with pytest.raises(TransferError):
            await node.peers.peer(node.address)
        assert len(proxy.links) == 2  # it was tried once more


@pytest.mark.parametrize("streams", [1, 2])
async def test_a_session_whose_connections_are_all_reset_fails_its_transfers(
    tmp_path: Path, streams: int
) -> None:
    async with fabric(tmp_path, LARGE, 13, streams=streams) as node:
        proxy = node.proxy()
        await node.peer(streams)
        node.publish([10])
        node.pages.may_read.clear()
        grant = node.pages.grant(1, [*range(9), 11])
        write = asyncio.create_task(node.write(1, range(9)))
        fetch = asyncio.create_task(node.fetch([10]))
        await until(lambda: grant.arrived)
        proxy.reset()
        for task in (write, fetch):
            with pytest.raises(TransferError, match="was lost"):
                await task
        node.pages.may_read.set()
        await until(lambda: grant.failure is not None)
        assert grant.failure is not None
        assert grant.failure.startswith("connection from sender was lost")
        await node.assert_works()


@pytest.mark.parametrize("streams", [1, 2, 4])
async def test_what_is_never_answered_is_an_error_however_many_lanes_there_are(
    tmp_path: Path, streams: int
) -> None:
    async with fabric(tmp_path, TINY, streams=streams, ack_timeout_s=0.1) as node:
        node.pages.may_read.clear()
        peer = await node.peer(streams)
        with pytest.raises(TransferError, match=r"no acknowledgement within 0\.1 s"):
            await node.fetch([0], peer)
        node.pages.may_read.set()
        await node.assert_works()


async def test_a_fetch_has_its_own_deadline_beside_writes_that_are_answered(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY, ack_timeout_s=0.3) as node:
        peer = await node.peer()
        node.pages.may_read.clear()
        fetch = asyncio.create_task(node.fetch([0], peer))
        async with asyncio.timeout(DEADLINE_S):
            while peer.closed_reason is None:
                with contextlib.suppress(TransferError):
                    await peer.probe(memoryview(b"123"))
        with pytest.raises(TransferError, match=r"no acknowledgement within 0\.3 s"):
            await fetch
        node.pages.may_read.set()


async def test_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 8) as node:
        node.proxy().slow(64 << 10, 0.001)
        node.pages.grant(1, range(4))
        node.publish([5, 6])
        await node.write(1, range(4), Urgency.BULK)
        node.assert_written(range(4))
        assert await asyncio.gather(node.fetch([5]), node.fetch([6])) == [[0], [0]]


async def test_a_closing_word_survives_the_loss_of_its_lane(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        first, second = node.proxy(), node.proxy()
        peer = await node.peer(2)
        grant = node.pages.grant(1, PAGES)
        cancelled = asyncio.create_task(node.write(1, [0], peer=peer))
        await cancelled
        with peer.transfer(1, "left", lambda: None):
            await until(lambda: grant.writers)
            first.black_hole()
            second.black_hole()
        first.reset()
        second.heal()
        await until(lambda: not grant.writers)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(3))
async def test_many_transfers_survive_resets_as_long_as_one_path_holds(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    num_transfers, num_pages = 150, 3
    async with fabric(tmp_path, SMALL, num_transfers * num_pages + 10, streams=2) as node:
        failing = [node.proxy(), node.proxy()]
        node.proxy()
        peer = await node.peer(6)
        fetched = range(num_transfers * num_pages, num_transfers * num_pages + 10)
        node.publish(fetched)

        async def write(number: int) -> None:
            pages = range(number * num_pages, (number + 1) * num_pages)
            node.pages.grant(number, pages)
            await node.write(number, pages, draw.choice(list(Urgency)), peer)
            node.assert_written(pages)

        async def fetch() -> None:
            assert await node.fetch(fetched[:5], peer) == list(range(5))

        async with asyncio.TaskGroup() as tasks:
            for number in range(num_transfers):
                tasks.create_task(write(number))
                tasks.create_task(fetch())
                for proxy in failing:
                    proxy.slow(draw.choice([700, 5000, 1 << 16]), 0.0)
                for _ in range(draw.randrange(12)):
                    await asyncio.sleep(0)
                if draw.random() < 0.3:
                    for link in draw.choice(failing).links:
                        link.reset()
        assert broken(node)
        for page in fetched[:5]:
            assert node.sender_memory.page(page) == node.receiver_memory.page(page)
        assert peer.closed_reason is None
        assert peer.throughput.pending_bytes == 0
        await until(lambda: not any(grant.writers for grant in node.pages.grants.values()))
        await until(lambda: node.pages.num_leases == 0)


def reset_near(link: Link) -> None:
    """Only the sender hears of it."""
    link.is_open = False
    loop = asyncio.get_running_loop()
    loop.remove_reader(link.near)
    loop.remove_writer(link.near)
    link.near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.near.close()


async def test_a_lane_that_comes_later_abandons_the_lost_ones_too(tmp_path: Path) -> None:
    """The first to be told is stalled; what comes again over the later one must not be refused."""
    async with fabric(tmp_path, LARGE, 8) as node:
        a, b = node.proxy(), node.proxy()
        a.plans.append(Plan(stall_up_at=600_000))
        peer = await node.peer(2)
        lane_a = next(lane for lane in peer.lanes if lane.path.address == a.endpoint)
        node.pages.grant(1, range(8))
        b.black_hole(up=True, down=False)
        write = asyncio.create_task(node.write(1, range(8), peer=peer))
        await until(lambda: a.links[0].num_up >= 600_000)
        await until(lambda: node.pages.num_begun)
        reset_near(a.links[0])  # the receiver's end knows nothing of it
        await until(lambda: lane_a not in peer.lanes and len(peer.lanes) == 2)
        b.heal()
        await write
        node.assert_written(range(8))
        a.reset()
        for link in a.links:
            link.far.close()
