"""What a peer can reach through grants: by memory windows, and by registrations of single ranges.

Soft-RoCE checks whose window it is and what may be done in it, but not its range: that is tested with
registrations only.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

import pytest

from messenger.rdma import windows
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaError
from messenger.rdma.windows import Access
from messenger.transport.exposures import Range
from messenger.transport.transports import Remedy
from tests.rdma.guest.nodes import MIB, Node, is_idle, joined, node, two_nodes
from tests.rdma.guest.peer import peer_process

PAGE = 64 * 1024


class Way(Enum):
    """How ranges are opened."""

    WINDOWS = True
    REGISTRATIONS = False

    @contextmanager
    def two_nodes(self, size_bytes: int = MIB) -> Iterator[tuple[Node, Node, Endpoint, Endpoint]]:
        """As in `nodes`, with memory on rxe1 that is closed but for grants."""
        with two_nodes(size_bytes, is_open=False) as (here, there, endpoint, other):
            there.adapter.has_windows = self.value
            yield here, there, endpoint, other


both_ways = pytest.mark.parametrize("way", Way)


@both_ways
async def test_granted_range_can_be_written(way: Way) -> None:
    with way.two_nodes() as (here, there, endpoint, other):
        here.fill_randomly(1)
        grant = await windows.open_windows(other, there.memory, [Range(PAGE, PAGE), Range(5 * PAGE + 7, 100)])
        first, second = grant.remote_keys
        assert len({first, second, there.memory.remote_key}) == 3
        await endpoint.write([(0, there.memory.address + PAGE, PAGE)], first)
        await endpoint.write([(0, there.memory.address + 5 * PAGE + 7, 100)], second)
        assert there.digest(PAGE, PAGE) == here.digest(0, PAGE)
        assert there.digest(5 * PAGE + 7, 100) == here.digest(0, 100)


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(PAGE - 1, 10), (2 * PAGE - 9, 10), (0, 10), (PAGE - 1, PAGE + 2), (PAGE + 1, PAGE)],
)
async def test_range_outside_the_window_is_refused(offset: int, num_bytes: int) -> None:
    with Way.REGISTRATIONS.two_nodes() as (here, there, endpoint, other):
        here.fill_randomly(1)
        before = there.digest(0, MIB)
        grant = await windows.open_windows(other, there.memory, [Range(PAGE, PAGE)])
        with pytest.raises(RdmaError, match="refused access") as caught:
            await endpoint.write([(0, there.memory.address + offset, num_bytes)], grant.remote_keys[0])
        assert caught.value.remedy is Remedy.GIVE_UP
        assert there.digest(0, MIB) == before


@both_ways
async def test_writers_window_cannot_be_read_and_readers_not_written(way: Way) -> None:
    with way.two_nodes() as (_here, there, endpoint, other):
        grant = await windows.open_windows(other, there.memory, [Range(0, PAGE)], Access.WRITE)
        with pytest.raises(RdmaError, match="refused access"):
            await endpoint.read([(0, there.memory.address, PAGE)], grant.remote_keys[0])
    with way.two_nodes() as (_here, there, endpoint, other):
        grant = await windows.open_windows(other, there.memory, [Range(0, PAGE)], Access.READ)
        await endpoint.read([(0, there.memory.address, PAGE)], grant.remote_keys[0])
        with pytest.raises(RdmaError, match="refused access"):
            await endpoint.write([(0, there.memory.address, PAGE)], grant.remote_keys[0])


async def test_key_of_a_window_is_good_for_one_peer_only() -> None:
    with Way.WINDOWS.two_nodes() as (here, there, endpoint, other):
        grant = await windows.open_windows(other, there.memory, [Range(0, PAGE)])
        with joined(here, there) as (stranger, _its_other), pytest.raises(RdmaError, match="refused access"):
            await stranger.write([(0, there.memory.address, PAGE)], grant.remote_keys[0])
        await endpoint.write([(0, there.memory.address, PAGE)], grant.remote_keys[0])


async def test_memory_that_is_not_open_is_reached_by_grants_only() -> None:
    with two_nodes(is_open=False) as (_here, there, endpoint, other):
        grant = await windows.open_windows(other, there.memory, [Range(0, PAGE)])
        await endpoint.write([(0, there.memory.address, PAGE)], grant.remote_keys[0])
        with pytest.raises(RdmaError, match="refused access"):
            await endpoint.write([(0, there.memory.address, PAGE)], there.memory.remote_key)


async def test_device_is_told_the_range_of_a_window() -> None:
    with Way.WINDOWS.two_nodes() as (_here, there, _endpoint, other):
        beyond = replace(there.memory, size_bytes=2 * MIB)
        with pytest.raises(RdmaError):
            await windows.open_windows(other, beyond, [Range(MIB - PAGE, PAGE + 1)])
    with Way.WINDOWS.two_nodes() as (_here, there, _endpoint, other):
        before = replace(there.memory, address=there.memory.address - 1)
        with pytest.raises(RdmaError):
            await windows.open_windows(other, before, [Range(0, PAGE)])


@both_ways
async def test_revoked_key_is_refused_and_the_others_are_not(way: Way) -> None:
    with way.two_nodes() as (_here, there, endpoint, other):
        revoked = await windows.open_windows(other, there.memory, [Range(0, PAGE), Range(2 * PAGE, PAGE)])
        kept = await windows.open_windows(other, there.memory, [Range(PAGE, PAGE)])
        windows.close_windows(other, revoked)
        await endpoint.write([(0, there.memory.address + PAGE, PAGE)], kept.remote_keys[0])
        with pytest.raises(RdmaError, match="refused access"):
            await endpoint.write([(0, there.memory.address, PAGE)], revoked.remote_keys[0])
        windows.close_windows(other, revoked)  # again: nothing happens


@both_ways
async def test_nothing_lands_after_a_grant_is_revoked_while_the_peer_writes(way: Way) -> None:
    num_bytes = 8 * MIB
    with node("rxe0", num_bytes, is_open=False) as here:
        here.adapter.has_windows = way.value
        async with peer_process(num_bytes) as peer:
            endpoint = here.endpoint()
            await peer.connect(endpoint)
            grant = await windows.open_windows(endpoint, here.memory, [Range(0, num_bytes)])
            await peer.ask("start_writing", here.memory.address, num_bytes, grant.remote_keys[0])
            while not here.bytes[-1]:  # until a first round has come; the peer goes on
                await asyncio.sleep(0)
            windows.close_windows(endpoint, grant)
            then = here.digest(0, num_bytes)
            assert "refused access" in await peer.ask("failure")  # it has tried
            assert here.digest(0, num_bytes) == then
            endpoint.close()


@both_ways
async def test_endpoint_with_open_windows_is_in_use_and_closes_with_them(way: Way) -> None:
    with way.two_nodes() as (_here, there, _endpoint, other):
        grant = await windows.open_windows(other, there.memory, [Range(0, PAGE)] * 100)
        assert len(set(grant.remote_keys)) == 100
        assert not is_idle(other)
        other.close()
        windows.close_windows(other, grant)
        assert is_idle(other)


@pytest.mark.parametrize("num_rounds", [2, pytest.param(10, marks=pytest.mark.soak)])
@both_ways
async def test_hundreds_of_windows_come_and_go(way: Way, num_rounds: int) -> None:
    with way.two_nodes() as (here, there, endpoint, other):
        for seed in range(num_rounds):
            here.fill_randomly(seed)
            ranges = [Range(n * 1024, 1024) for n in range(100)]
            grant = await windows.open_windows(other, there.memory, ranges)
            slices = [(each.offset, there.memory.address + each.offset, 1024) for each in ranges]
            await endpoint.write(slices, grant.remote_keys)
            assert there.digest(0, 100 * 1024) == here.digest(0, 100 * 1024)
            windows.close_windows(other, grant)
        assert is_idle(other)


@pytest.mark.parametrize("wrong", [Range(-1, 10), Range(0, 0), Range(MIB - 5, 10), Range(1 << 62, 1 << 62)])
async def test_window_outside_the_memory_is_an_error(wrong: Range) -> None:
    with two_nodes() as (_here, there, _endpoint, other):
        with pytest.raises(RdmaError, match="not within"):
            await windows.open_windows(other, there.memory, [Range(0, 10), wrong])
        assert is_idle(other)
        assert other.failure is None


@both_ways
async def test_grant_on_a_broken_endpoint_is_an_error(way: Way) -> None:
    with way.two_nodes() as (_here, there, _endpoint, other):
        other.close()
        with pytest.raises(RdmaError, match="closed"):
            await windows.open_windows(other, there.memory, [Range(0, PAGE)])


async def test_cancelled_grant_leaves_no_window_open() -> None:
    with Way.WINDOWS.two_nodes() as (_here, there, _endpoint, other):
        granting = asyncio.create_task(windows.open_windows(other, there.memory, [Range(0, PAGE)] * 50))
        await asyncio.sleep(0)
        assert not is_idle(other)
        granting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await granting
        assert is_idle(other)
