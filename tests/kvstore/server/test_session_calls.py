"""Sessions in this process, on disks that do what a test says."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from kvstore.protocol.answers import (
    CallFailed,
    Count,
    Fetched,
    Leased,
    Located,
    Reservation,
    Verified,
)
from kvstore.protocol.calls import (
    AwaitSpace,
    Commit,
    DropIdle,
    FetchBlocks,
    LeaseBlocks,
    Lookup,
    OpenGrant,
    PinBlocks,
    Prefetch,
    Release,
    ReservePages,
    StopFetch,
    ToPool,
    VerifyBlocks,
)
from kvstore.server import listing
from kvstore.server.client_session import ClientSession
from kvstore.server.listing import pool_stats, verify_block
from messenger.wire.checksums import layer_checksums
from mooncake.errors import PoolError, PoolFullError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import MessengerAddress, PoolShard, Tier
from tests.kvstore.nodes import DEADLINE_S
from tests.kvstore.server.sessions import BAD_KEYS, Answers, on_ssd_only, session
from tests.kvstore.tiers import ADDRESS, FakeSlab, block_of, checksums_of, key_of, running, until
from tests.kvstore.tiers import LAYOUT as TIERS_LAYOUT


async def test_blocks_on_ssd_are_leased_reserved_and_pinned_as_those_in_dram() -> None:
    async with running(8, FakeSlab(20)) as r, session(r) as (user, answers):
        keys = [key_of(number) for number in range(1, 7)]
        await on_ssd_only(r, *keys)
        user.handle(Lookup(1, keys))
        assert await answers.to(1) == Located(1, b"\x02" * 6)
        user.handle(LeaseBlocks(2, keys[:2], 60.0))
        lease = await answers.to(2)
        assert isinstance(lease, Leased)
        for key, page in zip(keys, lease.pages, strict=False):
            assert page is not None
            assert r.store.segment.page_view(page) == block_of(key)
        user.handle(PinBlocks(3, keys[2:4], 60.0, True))
        assert await answers.to(3) == Count(3, 2)
        user.handle(ReservePages(4, keys[4:], 2))
        reservation = await answers.to(4)
        assert isinstance(reservation, Reservation)
        assert [block.sealed for block in reservation.blocks] == [True, True, False, False]
        assert r.pool.pins.remove(keys) == 2


async def test_reservation_promotes_no_block_behind_one_that_nobody_has() -> None:
    slab = FakeSlab(20)
    async with running(8, slab) as r, session(r) as (user, answers):
        keys = [key_of(number) for number in range(1, 5)]
        await on_ssd_only(r, keys[0], keys[3])
        user.handle(ReservePages(1, keys, 0))
        reservation = await answers.to(1)
        assert isinstance(reservation, Reservation)
        assert [block.sealed for block in reservation.blocks] == [True, False, False, False]
        assert slab.num_reads == 1


SOURCES = [PoolShard(ADDRESS, TIERS_LAYOUT)]


@contextlib.asynccontextmanager
async def fetching() -> AsyncIterator[tuple[ClientSession, Answers, Reservation, asyncio.Event]]:
    """A session that has just read a call (2) to fetch two blocks, from where nobody answers, and what is set
    when that has been tried."""
    is_connecting = asyncio.Event()

    async def peer(address: MessengerAddress) -> None:
        is_connecting.set()
        await asyncio.Event().wait()

    async with running(8) as r, session(r) as (user, answers):
        r.store.peers = SimpleNamespace(all=[], peer=peer)  # type: ignore[assignment]
        user.handle(ReservePages(1, [key_of(1), key_of(2)], 0))
        reservation = await answers.to(1)
        assert isinstance(reservation, Reservation)
        user.handle(FetchBlocks(2, reservation.reservation_id, SOURCES, [0, 1]))
        yield user, answers, reservation, is_connecting


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("end", [StopFetch, lambda reservation_id: Release(3, reservation_id)])
async def test_fetch_is_ended_by_what_comes_right_behind_it(
    has_begun: bool, end: Callable[[int], StopFetch | Release]
) -> None:
    async with fetching() as (user, answers, reservation, is_connecting):
        if has_begun:
            await asyncio.wait_for(is_connecting.wait(), DEADLINE_S)
        user.handle(end(reservation.reservation_id))
        pages = [block.page for block in reservation.blocks]
        assert await answers.to(2) == Fetched(2, [0, 0], pages)


async def test_what_is_used_or_pinned_stays_when_idle_blocks_are_dropped() -> None:
    async with running(8, FakeSlab(20)) as r, session(r) as (user, answers):
        on_ssd, idle, pinned, softly_pinned, used, other = (key_of(number) for number in range(1, 7))
        await on_ssd_only(r, on_ssd)
        await r.put(idle, pinned, softly_pinned, used, other)
        r.pool.pins.add([pinned], hard=True, deadline_s=1e9)
        r.pool.pins.add([softly_pinned], hard=False, deadline_s=1e9)
        user.handle(LeaseBlocks(1, [used], 5.0))
        await answers.to(1)
        user.handle(DropIdle([on_ssd, idle, pinned, softly_pinned, used, key_of(7)]))
        keys = [on_ssd, idle, pinned, softly_pinned, used, other]
        assert r.pool.locate(keys) == [None, None, *[Tier.DRAM] * 4]
        assert r.pool.pins.remove([pinned, softly_pinned]) == 2


async def test_what_comes_right_behind_a_fetch_finds_its_pages_taken() -> None:
    async with fetching() as (user, answers, reservation, _):
        user.handle(OpenGrant(3, reservation.reservation_id))
        user.handle(FetchBlocks(4, reservation.reservation_id, SOURCES, [0]))
        for call_id, reason in ((3, "cannot be granted"), (4, "is being fetched already")):
            refused = await answers.to(call_id)
            assert isinstance(refused, CallFailed)
            assert reason in refused.message
        with pytest.raises(PoolError, match="is not the user's to write"):
            user.handle(Commit(reservation.reservation_id, 0, 1, [reservation.blocks[0].page], bytes(8)))


@pytest.mark.parametrize("keys", BAD_KEYS)
async def test_what_is_no_key_fails_also_where_there_is_ssd(keys: list[BlockKey]) -> None:
    async with running(8, FakeSlab(20)) as r, session(r) as (user, answers):
        await on_ssd_only(r, key_of(1))
        mixed = [key_of(1), *keys]
        calls = (ReservePages(1, mixed, 0), LeaseBlocks(2, mixed, 5.0), PinBlocks(3, mixed, 5.0, True))
        for number, call in enumerate(calls, 1):
            user.handle(call)
            assert isinstance(await answers.to(number), CallFailed)
        with pytest.raises(PoolError):
            user.handle(Prefetch(mixed))
        assert r.is_settled()


@pytest.mark.parametrize(
    "call",
    [
        LeaseBlocks(1, [key_of(1)], 60.0),
        ReservePages(1, [key_of(1)], 1),
        PinBlocks(1, [key_of(1)], 60.0, True),
        VerifyBlocks(1, [key_of(1)]),
    ],
    ids=lambda call: type(call).__name__,
)
async def test_who_goes_while_a_disk_works_for_him_leaves_nothing_behind(call: ToPool) -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await on_ssd_only(r, key_of(1))
        slab.hang()
        async with session(r) as (user, answers):
            user.handle(call)
            await until(lambda: slab.num_reads)
        assert answers.all == {}
        slab.go_on()
        await until(r.is_settled)
        assert (len(r.pool.leases), len(r.pool.pins)) == (0, 0)
        assert await r.get(key_of(1)) == block_of(key_of(1))


async def test_verifying_reports_and_drops_the_damaged_copy_of_each_tier() -> None:
    slab = FakeSlab(20)
    async with running(8, slab) as r, session(r) as (user, answers):
        intact, bad_on_ssd, bad_in_dram, absent = (key_of(number) for number in range(1, 5))
        await on_ssd_only(r, intact, bad_on_ssd)
        assert await r.get(intact) == block_of(intact)
        assert await r.get(bad_on_ssd) == block_of(bad_on_ssd)
        await r.put(bad_in_dram)
        assert r.ssd is not None
        slab.damage(r.ssd.disks[0].allocator.index[bad_on_ssd])
        page = r.pool.find(bad_in_dram)
        assert page is not None
        r.store.segment.page_view(page)[0] ^= 1
        user.handle(VerifyBlocks(1, [intact, bad_on_ssd, bad_in_dram, absent, bad_in_dram]))
        answer = await answers.to(1)
        assert isinstance(answer, Verified)
        assert (answer.num_intact, answer.damaged) == (1, [bad_on_ssd, bad_in_dram])
        assert await r.get(bad_on_ssd) == block_of(bad_on_ssd), "of that one DRAM has another copy"
        assert not r.ssd.holds(bad_on_ssd)
        assert not r.has(bad_in_dram)
        stats = pool_stats(r.store, check_integrity=True)
        assert [tier.num_checksum_failures for tier in stats.tiers.values()] == [1, 1]


async def test_block_that_is_being_verified_keeps_its_page_even_when_nobody_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def slowly(layers: memoryview, layer_bytes: int) -> bytes:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)
        return layer_checksums(layers, layer_bytes)

    monkeypatch.setattr(listing, "layer_checksums", slowly)
    async with running(1) as r:
        await r.put(key_of(1))
        async with session(r) as (user, answers):
            user.handle(VerifyBlocks(1, [key_of(1)]))
            await until(has_begun.is_set)
        assert answers.all == {}
        with pytest.raises(PoolFullError):
            r.pool.reserve(1, [], 1)
        may_end.set()
        await until(r.is_settled)
        assert r.read(key_of(1)) == block_of(key_of(1))


async def test_block_that_comes_to_a_page_after_a_damaged_one_was_found_there_is_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(1) as r:
        await r.put(key_of(1))
        page = r.pool.find(key_of(1))
        assert page is not None
        r.store.segment.page_view(page)[0] ^= 1
        remove_hold = r.pool.holds.remove

        def remove_and_replace(page: int, *, used: bool = True) -> None:
            remove_hold(page, used=used)
            monkeypatch.undo()
            reservation = r.pool.reserve(1, [key_of(2)], 0)
            r.pool.record_arrival(reservation.blocks[0], range(3), checksums_of(key_of(2)))
            r.pool.release(reservation.reservation_id)

        monkeypatch.setattr(r.pool.holds, "remove", remove_and_replace)
        assert await verify_block(r.store, key_of(1)) is False
        assert r.pool.find(key_of(2)) == page


async def test_page_that_a_damaged_block_was_to_come_to_is_the_requests_own() -> None:
    """Nobody else might ever free a page, so the request would wait for ever."""
    slab = FakeSlab(20)
    async with running(2, slab) as r, session(r) as (user, answers):
        await on_ssd_only(r, key_of(1))
        assert r.ssd is not None
        slab.damage(r.ssd.disks[0].allocator.index[key_of(1)])
        other = await r.reserve([], 1)
        user.handle(ReservePages(1, [key_of(1)], 0))
        reservation = await answers.to(1)
        assert isinstance(reservation, Reservation)
        assert not reservation.blocks[0].sealed
        r.pool.release(other.reservation_id)


async def test_users_who_wait_for_a_full_pool_do_not_keep_each_other_busy() -> None:
    """Each tries again when room has changed; that he could not be served is no such change."""
    slab = FakeSlab(40)
    async with running(8, slab) as r, contextlib.AsyncExitStack() as stack:
        users = [await stack.enter_async_context(session(r, owner)) for owner in (5, 6, 7)]
        await on_ssd_only(r, *(key_of(number) for number in range(1, 7)))
        leased = await r.reserve([], 6)
        tries = 0

        async def wait(number: int) -> None:
            nonlocal tries
            user, answers = users[number]
            keys = [key_of(2 * number + 1), key_of(2 * number + 2)]
            call_id = 1
            while True:
                tries += 1
                user.handle(ReservePages(call_id, keys, 4))
                answer = await answers.to(call_id)
                if not isinstance(answer, CallFailed):
                    break
                user.handle(AwaitSpace(call_id + 1, answer.space_epoch))
                await answers.to(call_id + 1)
                call_id += 2
            assert isinstance(answer, Reservation)
            user.handle(Release(call_id + 1, answer.reservation_id))

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await until(lambda: tries >= 3)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert (tries, slab.num_reads) == (3, 0), "nothing is read for a request that cannot be served"
        r.pool.release(leased.reservation_id)
        await asyncio.gather(*waiting)
