"""Writes and reads between two processes, and what ends them."""

import asyncio
import time

import pytest

from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaError
from messenger.transport.transports import Remedy
from messenger.wire.rdma_info import EndpointInfo, LinkLayer
from tests.rdma.guest.nodes import MIB, is_idle, joined, node, scattered, two_nodes
from tests.rdma.guest.peer import peer_process

DEAD_PEER_S = 2.0
LARGE_BYTES = 64 * MIB


async def test_written_bytes_are_in_the_peers_memory_and_nothing_beside_them_changed() -> None:
    with node("rxe0") as here:
        here.fill_randomly(1)
        async with peer_process(MIB) as peer:
            endpoint = here.endpoint()
            place = await peer.connect(endpoint)
            zeros = await peer.ask("digest", 0, 1000)
            await endpoint.write([(5000, place.address + 1000, 70_001)], place.remote_key)
            assert await peer.ask("digest", 1000, 70_001) == here.digest(5000, 70_001)
            assert await peer.ask("digest", 0, 1000) == zeros
            assert await peer.ask("digest", 71_001, 1000) == zeros
            endpoint.close()


@pytest.mark.parametrize("size_mib", [16, pytest.param(64, marks=pytest.mark.soak)])
async def test_large_memory_in_slices_arrives_and_comes_back(size_mib: int) -> None:
    size_bytes = size_mib * MIB
    with node("rxe0", size_bytes) as here:
        here.fill_randomly(2)
        before = here.digest(0, size_bytes)
        async with peer_process(size_bytes) as peer:
            endpoint = here.endpoint()
            place = await peer.connect(endpoint)
            slices = scattered(place.address, 1024, size_bytes // 1024, seed=3)
            await endpoint.write(slices, place.remote_key)
            for offset, address, num_bytes in slices[::97].tolist():
                there = await peer.ask("digest", address - place.address, num_bytes)
                assert there == here.digest(offset, num_bytes)
            here.bytes[:] = 0
            await endpoint.read(slices, place.remote_key)
            assert here.digest(0, size_bytes) == before
            endpoint.close()


async def test_many_transfers_at_once_do_not_mix() -> None:
    num_transfers, num_bytes = 200, 40_000
    with two_nodes(2 * num_transfers * num_bytes) as (here, there, endpoint, _other):
        here.fill_randomly(4)
        there.fill_randomly(5)
        half = num_transfers * num_bytes
        expected_here, expected_there = there.digest(half, half), here.digest(0, half)
        base, key = there.memory.address, there.memory.remote_key
        async with asyncio.TaskGroup() as tasks:
            for n in range(num_transfers):
                start = n * num_bytes
                pieces = [(start, base + start, 17), (start + 17, base + start + 17, num_bytes - 17)]
                tasks.create_task(endpoint.write(pieces, key))
                tasks.create_task(endpoint.read([(half + start, base + half + start, num_bytes)], key))
        assert there.digest(0, half) == expected_there
        assert here.digest(half, half) == expected_here
        assert is_idle(endpoint)


async def test_small_transfer_does_not_wait_for_the_large_one_before_it() -> None:
    with two_nodes(LARGE_BYTES) as (_here, there, endpoint, _other):
        large = asyncio.create_task(
            endpoint.write([(0, there.memory.address, LARGE_BYTES)], there.memory.remote_key)
        )
        small = asyncio.create_task(endpoint.write([(0, there.memory.address, 100)], there.memory.remote_key))
        done, _pending = await asyncio.wait({large, small}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {small}
        await large


async def test_killed_peer_is_reported_in_time_to_every_call() -> None:
    with node("rxe0", LARGE_BYTES) as here:
        async with peer_process(LARGE_BYTES) as peer:
            endpoint = here.endpoint()
            place = await peer.connect(endpoint)
            slices = scattered(place.address, 64, MIB, seed=6)
            calls = [asyncio.create_task(endpoint.write(slices, place.remote_key)) for _ in range(3)]
            calls += [asyncio.create_task(endpoint.read(slices, place.remote_key)) for _ in range(3)]
            await endpoint.write([(0, place.address, 100)], place.remote_key)  # under way, by now
            assert not any(call.done() for call in calls)
            peer.kill()
            killed_s = time.monotonic()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - killed_s < DEAD_PEER_S
            assert [type(outcome) for outcome in outcomes] == [RdmaError] * len(calls)
            assert endpoint.failure is not None
            assert endpoint.failure.remedy is Remedy.OTHER_PATH


async def test_peer_that_died_while_nothing_was_sent_is_reported_in_time() -> None:
    with node("rxe0") as here:
        async with peer_process(MIB) as peer:
            endpoint = here.endpoint()
            place = await peer.connect(endpoint)
            peer.kill()
            started_s = time.monotonic()
            with pytest.raises(RdmaError) as caught:
                await endpoint.read([(0, place.address, 100)], place.remote_key)
            assert time.monotonic() - started_s < DEAD_PEER_S
            assert caught.value.remedy is Remedy.OTHER_PATH


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_wrong_key_is_refused_for_good(direction: str) -> None:
    with two_nodes() as (_here, there, endpoint, _other):
        before = there.digest(0, MIB)
        with pytest.raises(RdmaError, match="refused access") as caught:
            await getattr(endpoint, direction)(
                [(0, there.memory.address, 100)], there.memory.remote_key ^ 0x5500
            )
        assert caught.value.remedy is Remedy.GIVE_UP
        assert there.digest(0, MIB) == before


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_range_outside_the_peers_memory_is_refused_for_good(direction: str) -> None:
    with two_nodes() as (_here, there, endpoint, _other):
        with pytest.raises(RdmaError, match="refused access") as caught:
            await getattr(endpoint, direction)(
                [(0, there.memory.address + MIB - 50, 100)], there.memory.remote_key
            )
        assert caught.value.remedy is Remedy.GIVE_UP


async def test_wrong_local_range_is_refused_and_breaks_nothing() -> None:
    with two_nodes() as (_here, there, endpoint, _other):
        with pytest.raises(RdmaError, match="expected a range within") as caught:
            await endpoint.write([(MIB - 50, there.memory.address, 100)], there.memory.remote_key)
        assert caught.value.remedy is Remedy.GIVE_UP
        await endpoint.write([(MIB - 50, there.memory.address, 50)], there.memory.remote_key)


async def test_one_refused_call_ends_all_calls_and_later_ones() -> None:
    with two_nodes(16 * MIB) as (_here, there, endpoint, _other):
        base, key = there.memory.address, there.memory.remote_key
        good = [asyncio.create_task(endpoint.write([(0, base, 16 * MIB)], key)) for _ in range(4)]
        bad = asyncio.create_task(endpoint.write([(0, base, 100)], key ^ 0x5500))
        outcomes = await asyncio.gather(bad, *good, return_exceptions=True)
        remedies = [outcome.remedy for outcome in outcomes if isinstance(outcome, RdmaError)]
        assert remedies == [Remedy.GIVE_UP] + [Remedy.RETRY] * 4
        with pytest.raises(RdmaError, match="refused access") as caught:
            await endpoint.write([(0, base, 100)], key)
        assert caught.value.remedy is Remedy.RETRY


async def test_new_pair_works_after_the_old_one_broke() -> None:
    with node("rxe0") as here:
        here.fill_randomly(7)
        async with peer_process(MIB) as peer:
            broken = here.endpoint()
            place = await peer.connect(broken)
            with pytest.raises(RdmaError):
                await broken.write([(0, place.address, 100)], place.remote_key ^ 0x5500)
            endpoint = here.endpoint()
            place = await peer.connect(endpoint)
            await endpoint.write([(0, place.address, MIB)], place.remote_key)
            assert await peer.ask("digest", 0, MIB) == here.digest(0, MIB)
            endpoint.close()


async def test_nothing_lands_after_revoke_while_the_peer_writes() -> None:
    num_bytes = 8 * MIB
    with node("rxe0", num_bytes) as here:
        async with peer_process(num_bytes) as peer:
            endpoint = here.endpoint()
            await peer.connect(endpoint)
            await peer.ask("start_writing", here.memory.address, num_bytes, here.memory.remote_key)
            while not here.bytes[-1]:  # until a first round has come; the peer goes on
                await asyncio.sleep(0)
            endpoint.revoke()
            then = here.digest(0, num_bytes)
            assert "RDMA" in await peer.ask("failure")  # it has tried to the end
            assert here.digest(0, num_bytes) == then


async def test_cancelled_read_leaves_its_memory_alone() -> None:
    with two_nodes(LARGE_BYTES) as (here, there, endpoint, _other):
        there.fill_randomly(8)
        read = asyncio.create_task(
            endpoint.read([(0, there.memory.address, LARGE_BYTES)], there.memory.remote_key)
        )
        while not here.bytes[0] and not here.bytes[1]:
            await asyncio.sleep(0)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        here.bytes[:] = 0
        zeros = here.digest(0, LARGE_BYTES)
        await endpoint.write([(0, there.memory.address, MIB)], there.memory.remote_key)  # after it, in order
        assert here.digest(0, LARGE_BYTES) == zeros
        assert is_idle(endpoint)


async def test_transfer_of_nothing_is_done_at_once() -> None:
    with two_nodes() as (_here, there, endpoint, _other):
        await endpoint.write([], there.memory.remote_key)
        await endpoint.write([(10, there.memory.address, 0)], there.memory.remote_key)
        assert is_idle(endpoint)


BAD_GID = "0000:0000:0000:0000:0000:ffff:0a4d"


@pytest.mark.parametrize(
    "changes",
    [
        {"gid": BAD_GID},
        {"gid": "zzzz" + BAD_GID + ":0002"},
        {"qp_num": -1},
        {"qp_num": 1 << 40},
        {"mtu_bytes": 1500},
        {"psn": -5},
        {"max_reads_in": 1 << 20, "qp_num": 1 << 33},
        {"link_layer": LinkLayer.INFINIBAND},
        {"max_reads_in": 0},
        {"max_reads_in": -1},
        {"max_message_bytes": 0},
    ],
)
async def test_senseless_address_is_an_error(changes: dict[str, object]) -> None:
    with node("rxe0") as here, node("rxe1") as there:
        endpoint, other = here.endpoint(), there.endpoint()
        good = other.local_info()
        fields = {name: getattr(good, name) for name in good.__struct_fields__}
        with pytest.raises(RdmaError):
            endpoint.connect(EndpointInfo(**(fields | changes)))
        assert endpoint.failure is not None
        other.close()


async def test_closing_ends_calls_under_way() -> None:
    with two_nodes(LARGE_BYTES) as (_here, there, endpoint, _other):
        call = asyncio.create_task(
            endpoint.write([(0, there.memory.address, LARGE_BYTES)], there.memory.remote_key)
        )
        await endpoint.write([(0, there.memory.address, 100)], there.memory.remote_key)
        assert not call.done()
        endpoint.close()
        with pytest.raises(RdmaError) as caught:
            await call
        assert caught.value.remedy is Remedy.RETRY


async def test_both_sides_write_to_each_other() -> None:
    with node("rxe0", 4 * MIB) as here, node("rxe1", 4 * MIB) as there:
        here.fill_randomly(9)
        there.fill_randomly(10)

        def half(there_address: int, start: int) -> list[tuple[int, int, int]]:
            return [(start, there_address + start, 2 * MIB)]

        with joined(here, there) as (ours, theirs):
            await asyncio.gather(
                ours.write(half(there.memory.address, 0), there.memory.remote_key),
                theirs.write(half(here.memory.address, 2 * MIB), here.memory.remote_key),
            )
        assert here.digest(0, 4 * MIB) == there.digest(0, 4 * MIB)


async def test_closed_endpoint_refuses_everything() -> None:
    with node("rxe0") as here, node("rxe1") as there:
        endpoint, other = Endpoint(here.adapter, here.memory, "nobody"), there.endpoint()
        endpoint.close()
        endpoint.close()
        assert endpoint.local_info().qp_num
        with pytest.raises(RdmaError, match="closed"):
            endpoint.connect(other.local_info())
        with pytest.raises(RdmaError, match="closed"):
            await endpoint.write([(0, 0, 1)], 1)
        other.close()
