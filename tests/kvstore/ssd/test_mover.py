"""Blocks on their way between DRAM and SSD: none is lost, none is served damaged, no page is left behind."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from kvstore.pool.pages import PageState
from kvstore.ssd import disk as disk_module
from kvstore.ssd import mover as mover_module
from mooncake.errors import PoolFullError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier
from tests.kvstore.tiers import LAYOUT, FakeSlab, Running, block_of, checksums_of, key_of, running, until

KEYS = [key_of(number) for number in range(1, 400)]
TIMEOUT_S = 0.05
RETRY_S = 0.005


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(disk_module, "_LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(mover_module, "_RETRY_S", RETRY_S)


async def demoted(test: Running, *keys: BlockKey) -> None:
    """Stores `keys` and pushes them out of DRAM."""
    await test.put(*keys)
    await pushed_out(test, *keys)


async def pushed_out(test: Running, *keys: BlockKey) -> None:
    """Whoever takes all pages for a moment pushes everything out."""
    reservation = await test.reserve([], test.pool.table.num_pages)
    test.pool.release(reservation.reservation_id)
    assert test.pool.locate(keys) == [Tier.SSD] * len(keys)


# -- watermarks ---------------------------------------------------------------------------------------


async def test_pages_are_freed_before_anybody_has_to_wait_for_one() -> None:
    async with running(20, FakeSlab(200), low_watermark=4, high_watermark=8) as r:
        for number, key in enumerate(KEYS[:100]):
            await until(lambda: r.pool.allocator.num_free >= 4)
            reservation = r.pool.reserve(1, [key], 0)  # at once
            r.pool.release(reservation.reservation_id)
            await r.put(key)
            assert all(map(r.has, KEYS[: number + 1]))
        await until(lambda: r.pool.allocator.num_free >= 4)
        assert r.pool.allocator.num_free <= 8 + 1


async def test_room_is_made_from_the_low_watermark_up_to_the_high_one_and_no_further() -> None:
    async with running(20, FakeSlab(200), low_watermark=4, high_watermark=8) as r:
        for key in KEYS[:16]:
            await r.put(key)
        await settled(r)
        assert r.pool.allocator.num_free == 4
        assert r.ssd is not None
        assert r.ssd.counters.num_demotions == 0
        await r.put(KEYS[16])
        await until(lambda: r.pool.allocator.num_free == 8)
        await settled(r)
        assert (r.pool.allocator.num_free, r.ssd.counters.num_demotions) == (8, 5)
        assert r.pool.locate(KEYS[:6]) == [Tier.SSD] * 5 + [Tier.DRAM]


async def test_without_ssd_blocks_are_evicted_up_to_the_high_watermark() -> None:
    async with running(20, low_watermark=4, high_watermark=8) as r:
        for key in KEYS[:17]:
            await r.put(key)
        await until(lambda: r.pool.allocator.num_free == 8)
        assert r.pool.locate(KEYS[:6]) == [None] * 5 + [Tier.DRAM]


async def settled(r: Running) -> None:
    """Gives everybody his turn, until nothing is on its way."""
    await until(r.is_settled)
    for _ in range(20):
        await asyncio.sleep(0)
    await until(r.is_settled)


# -- back-pressure ------------------------------------------------------------------------------------


async def test_writers_that_are_faster_than_the_disk_wait_and_lose_nothing() -> None:
    slab = FakeSlab(200)
    slab.delay_s = 0.001
    async with running(8, slab, depth=2) as r:

        async def write(keys: list[BlockKey]) -> None:
            for key in keys:
                await r.put(key)
                assert r.has(key)

        await asyncio.gather(*(write(KEYS[first:120:4]) for first in range(4)))
        assert all(map(r.has, KEYS[:120]))
        for key in KEYS[:120]:
            assert await r.get(key) == block_of(key)
        assert slab.num_writes >= 112


async def test_what_is_not_found_any_more_was_evicted_by_the_ssd_tier() -> None:
    async with running(8, FakeSlab(30)) as r:
        for key in KEYS[:100]:
            await r.put(key)
        await settled(r)
        assert r.ssd is not None
        num_found = sum(map(r.has, KEYS[:100]))
        assert num_found == 100 - r.ssd.num_evictions
        assert num_found >= 30
        assert all(map(r.has, KEYS[75:100])), "the coldest have gone first"


async def test_reservation_that_is_larger_than_the_high_watermark_gets_its_pages() -> None:
    async with running(20, FakeSlab(200), low_watermark=1, high_watermark=2) as r:
        for key in KEYS[:20]:
            await r.put(key)
        reservations = await asyncio.gather(r.reserve(KEYS[30:40], 5), r.reserve([], 5))
        assert [len(reservation.blocks) for reservation in reservations] == [15, 5]
        assert all(map(r.has, KEYS[:20]))
        for reservation in reservations:
            r.pool.release(reservation.reservation_id)


async def test_request_that_cannot_be_served_costs_no_cached_block() -> None:
    async with running(10, low_watermark=1, high_watermark=1) as r:
        await r.put(*KEYS[:4])
        leased = r.pool.reserve(1, [], 5)
        with pytest.raises(PoolFullError):
            r.pool.reserve(1, [], 6)
        await r.put(KEYS[8])  # others go on
        for _ in range(20):
            await asyncio.sleep(0)
        assert r.pool.locate(KEYS[:3]) == [Tier.DRAM] * 3
        r.pool.release(leased.reservation_id)


async def test_block_that_is_used_while_it_is_demoted_stays_and_need_not_be_written_again() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        for key in KEYS[:4]:
            await r.put(key)
        slab.hang()
        waiting = asyncio.create_task(r.reserve([], 1))
        await until(lambda: slab.num_writes == 1)
        reader = r.pool.lease(1, KEYS[:1], 1e9)
        slab.go_on()
        reservation = await waiting
        assert r.pool.locate(KEYS[:4]) == [Tier.DRAM, Tier.SSD, Tier.DRAM, Tier.DRAM]
        r.pool.end_lease(reader.lease_id)
        r.pool.release(reservation.reservation_id)
        num_writes = slab.num_writes
        await pushed_out(r, KEYS[0])
        assert slab.num_writes == num_writes + 2


async def test_blocks_that_were_demoted_for_room_which_came_otherwise_stay_in_dram_too() -> None:
    slab = FakeSlab(40)
    async with running(20, slab, low_watermark=4, high_watermark=8) as r:
        slab.hang()
        for key in KEYS[:17]:
            await r.put(key)
        await until(lambda: slab.num_writes == 4)
        for key in KEYS[10:15]:
            r.mover.remove(key)
        slab.go_on()
        await settled(r)
        assert r.pool.allocator.num_free == 8
        assert r.pool.locate(KEYS[:4]) == [Tier.DRAM] * 4
        assert r.ssd is not None
        assert all(map(r.ssd.holds, KEYS[:4]))


# -- disks that fail ----------------------------------------------------------------------------------


async def test_while_the_disk_is_suspended_blocks_are_evicted_and_after_it_they_are_demoted_again() -> None:
    slab = FakeSlab(200)
    async with running(8, slab, timeout_s=TIMEOUT_S) as r:
        assert r.ssd is not None
        slab.hang()
        for key in KEYS[:50]:
            await r.put(key)
        assert not r.ssd.is_accepting
        assert sum(map(r.has, KEYS[:50])) == 8
        slab.go_on()
        await until(lambda: r.ssd is not None and r.ssd.is_accepting)
        for key in KEYS[50:100]:
            await r.put(key)
        assert all(map(r.has, KEYS[50:100]))


@pytest.mark.parametrize("high_watermark", [0, 4])
async def test_with_one_of_two_disks_hanging_writers_go_on_through_the_other_and_lose_nothing(
    high_watermark: int,
) -> None:
    bad, good = FakeSlab(200, "bad"), FakeSlab(200, "good")
    async with running(
        24,
        bad,
        good,
        depth=2,
        low_watermark=high_watermark,
        high_watermark=high_watermark,
        timeout_s=0.1,
        promotion_timeout_s=2.0,
    ) as r:
        bad.hang()
        for key in KEYS[:100]:
            await r.put(key)
        assert bad.num_writes <= 4
        assert all(map(r.has, KEYS[:100]))
        for key in KEYS[:100]:
            assert await r.get(key) == block_of(key)
        bad.go_on()
        assert r.ssd is not None
        await until(lambda: r.ssd is not None and r.ssd.disks[0].is_healthy)
        assert all(map(r.has, KEYS[:100]))


async def test_disk_that_fails_every_write_makes_no_request_fail() -> None:
    slab = FakeSlab(200)
    async with running(8, slab) as r:
        slab.fail()
        for key in KEYS[:60]:
            await r.put(key)
            assert await r.get(key) == block_of(key)
        assert r.ssd is not None
        assert r.ssd.counters.num_write_errors >= 1


async def test_block_that_is_damaged_on_ssd_is_not_found_any_more() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await demoted(r, KEYS[0], KEYS[1])
        assert r.ssd is not None
        slab.damage(r.ssd.disks[0].allocator.index[KEYS[0]])
        assert await r.get(KEYS[0]) is None
        assert not r.has(KEYS[0])
        assert await r.get(KEYS[1]) == block_of(KEYS[1])


# -- promotion ----------------------------------------------------------------------------------------


async def test_block_that_two_want_at_once_is_read_once() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await demoted(r, KEYS[0])
        slab.hang()
        readers = [asyncio.create_task(r.get(KEYS[0])) for _ in range(3)]
        await until(lambda: slab.num_reads)
        readers.append(asyncio.create_task(r.get(KEYS[0], patiently=False)))
        slab.go_on()
        assert await asyncio.gather(*readers) == [block_of(KEYS[0])] * 4
        assert (slab.num_reads, r.mover.num_promotions) == (1, 1)
        assert r.pool.hits.num_hits == {Tier.SSD: 1, Tier.DRAM: 3}
        assert r.pool.locate(KEYS[:1]) == [Tier.DRAM]


async def test_key_that_is_named_twice_is_promoted_once() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await demoted(r, KEYS[0])
        async with r.mover.keep_promoted([KEYS[0], KEYS[0]], patiently=True):
            assert r.read(KEYS[0]) == block_of(KEYS[0])
        assert slab.num_reads == 1


async def test_prefetched_block_is_there_before_anybody_waits_for_it() -> None:
    async with running(4, FakeSlab(20)) as r:
        await demoted(r, KEYS[0])
        r.mover.prefetch([KEYS[0], KEYS[0], KEYS[1]])
        await until(lambda: r.pool.find(KEYS[0]) is not None)
        assert r.read(KEYS[0]) == block_of(KEYS[0])


@pytest.mark.parametrize("num_others", [0, 1])
async def test_promotion_that_nobody_waits_for_any_more_keeps_its_page_until_it_has_ended(
    num_others: int,
) -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await demoted(r, KEYS[0])
        slab.hang()
        first = asyncio.create_task(r.get(KEYS[0]))
        others = [asyncio.create_task(r.get(KEYS[0])) for _ in range(num_others)]
        await until(lambda: slab.num_reads)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert r.pool.table.count()[PageState.RESERVED] == 1, "a thread writes to it"
        with pytest.raises(PoolFullError):
            r.pool.reserve(1, [], 4)
        slab.go_on()
        assert await asyncio.gather(*others) == [block_of(KEYS[0])] * num_others
        await until(r.is_settled)
        assert r.read(KEYS[0]) == block_of(KEYS[0])


async def test_promotion_that_takes_too_long_is_not_waited_for() -> None:
    slab = FakeSlab(20)
    async with running(4, slab, timeout_s=TIMEOUT_S, promotion_timeout_s=TIMEOUT_S) as r:
        await demoted(r, KEYS[0])
        slab.hang()
        assert await r.get(KEYS[0]) is None
        assert r.pool.table.count()[PageState.RESERVED] == 1, "a thread writes to it"
        # The request computes the block itself; whoever comes later with it is too late.
        await r.put(KEYS[0])
        slab.go_on()
        await until(r.is_settled)
        assert r.read(KEYS[0]) == block_of(KEYS[0])
        assert r.pool.table.count()[PageState.RESERVED] == 0


async def test_blocks_of_a_request_do_not_push_each_other_out() -> None:
    """What is left in DRAM of an old prompt is the coldest there is."""
    async with running(8, FakeSlab(40)) as r:
        prompt = KEYS[:6]
        await demoted(r, *prompt)
        for key in prompt[:3]:
            assert await r.get(key) is not None
        for key in KEYS[10:15]:
            await r.put(key)
        assert r.pool.locate(prompt) == [Tier.DRAM] * 3 + [Tier.SSD] * 3
        assert r.pool.allocator.num_free == 0
        async with r.mover.keep_promoted(prompt, patiently=False):
            assert r.pool.locate(prompt) == [Tier.DRAM] * 6


async def test_more_blocks_than_there_are_pages_are_promoted_as_far_as_they_fit() -> None:
    async with running(4, FakeSlab(40)) as r:
        await demoted(r, *KEYS[:3])
        await demoted(r, *KEYS[3:6])
        async with r.mover.keep_promoted(KEYS[:6], patiently=False):
            assert [r.read(key) for key in KEYS[:4]] == [block_of(key) for key in KEYS[:4]]
        assert all(map(r.has, KEYS[:6]))


async def test_two_that_want_more_than_half_of_the_pages_each_both_get_them() -> None:
    async with running(4, FakeSlab(40)) as r:
        await demoted(r, *KEYS[:3])
        await demoted(r, *KEYS[3:6])

        async def read(keys: list[BlockKey]) -> None:
            async with r.mover.keep_promoted(keys, patiently=True):
                assert [r.read(key) for key in keys] == [block_of(key) for key in keys]
                for _ in range(5):
                    await asyncio.sleep(0)

        await asyncio.gather(*(read(keys) for keys in (KEYS[:3], KEYS[3:6]) * 3))


async def test_two_that_collect_pages_as_they_become_free_do_not_wait_for_each_other() -> None:
    async with running(2, FakeSlab(40)) as r:
        for key in KEYS[:4]:
            await demoted(r, key)
        first, second = r.pool.reserve(1, [], 1), r.pool.reserve(1, [], 1)

        async def read(keys: list[BlockKey]) -> None:
            async with r.mover.keep_promoted(keys, patiently=True):
                assert [r.read(key) for key in keys] == [block_of(key) for key in keys]

        async def let_go_and_read() -> None:
            """He is there before whoever waits for what he lets go of."""
            r.pool.release(second.reservation_id)
            await read(KEYS[2:4])

        one = asyncio.create_task(read(KEYS[:2]))
        r.pool.release(first.reservation_id)
        await until(lambda: r.mover.num_promotions == 1)
        await asyncio.gather(one, let_go_and_read())


# -- removal ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def demoting(r: Running, slab: FakeSlab) -> AsyncIterator[int]:
    """Within it the block of KEYS[0], in the page that it yields, is being written to `slab`."""
    await r.put(KEYS[0])
    page = r.pool.find(KEYS[0])
    assert page is not None
    slab.hang()
    waiting = asyncio.create_task(r.reserve([], r.pool.table.num_pages))
    await until(lambda: slab.num_writes == 1)
    yield page
    slab.go_on()
    r.pool.release((await waiting).reservation_id)


async def test_block_that_is_removed_while_it_is_demoted_is_nowhere_after() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        async with demoting(r, slab) as page:
            assert r.mover.remove(KEYS[0])
            assert not r.mover.remove(KEYS[0])
            assert r.pool.table.state(page) is PageState.QUARANTINED, "a thread reads it"
        assert not r.has(KEYS[0])
        assert r.ssd is not None
        assert r.ssd.num_blocks == 0


async def test_block_that_is_removed_and_stored_again_while_it_is_demoted_stays() -> None:
    slab = FakeSlab(20)
    async with running(2, slab) as r:
        async with demoting(r, slab):
            r.mover.remove(KEYS[0])
            await r.put(KEYS[0])
        assert await r.get(KEYS[0]) == block_of(KEYS[0])


async def test_block_that_is_removed_before_its_demotion_has_begun_is_never_on_disk() -> None:
    """Else a crash right then would bring it back."""
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await r.put(KEYS[0])
        with pytest.raises(PoolFullError):
            r.pool.reserve(1, [], 4)
        r.mover.make_room()  # decides to demote it
        assert r.mover.remove(KEYS[0])
        await settled(r)
        assert not slab.num_writes


async def test_block_that_is_replaced_before_its_demotion_has_begun_is_not_mixed_up_with_the_new_one() -> (
    None
):
    async with running(4, FakeSlab(20)) as r:
        await r.put(KEYS[0])
        with pytest.raises(PoolFullError):
            r.pool.reserve(1, [], 4)
        r.mover.make_room()  # decides to demote it
        r.mover.remove(KEYS[0])
        reservation = r.pool.reserve(1, [KEYS[0]], 0)
        block, other = reservation.blocks[0], block_of(KEYS[1])
        r.store.segment.page_view(block.page)[:] = other
        r.pool.record_arrival(block, range(LAYOUT.num_layers), checksums_of(KEYS[1]))
        r.pool.release(reservation.reservation_id)
        await settled(r)
        await pushed_out(r, KEYS[0])
        assert await r.get(KEYS[0]) == other


async def test_block_that_turns_out_damaged_while_it_is_demoted_is_not_kept() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        async with demoting(r, slab) as page:
            r.pool.drop(page)
        assert not r.has(KEYS[0])


async def test_block_that_is_removed_while_it_is_promoted_is_nowhere_after() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await demoted(r, KEYS[0])
        slab.hang()
        reader = asyncio.create_task(r.get(KEYS[0]))
        await until(lambda: slab.num_reads)
        assert r.mover.remove(KEYS[0])
        assert not r.has(KEYS[0])
        slab.go_on()
        assert await reader is None
        await until(r.is_settled)
        assert not r.has(KEYS[0])
        assert r.pool.allocator.num_free == 4


async def test_block_that_is_removed_and_comes_again_while_it_is_promoted_is_served() -> None:
    slab = FakeSlab(20)
    async with running(4, slab) as r:
        await demoted(r, KEYS[0])
        slab.hang()
        reader = asyncio.create_task(r.get(KEYS[0]))
        await until(lambda: slab.num_reads)
        r.mover.remove(KEYS[0])
        await r.put(KEYS[0])
        slab.go_on()
        assert await reader == block_of(KEYS[0])
        assert await r.get(KEYS[0]) == block_of(KEYS[0])


# -- no work for nothing ------------------------------------------------------------------------------


async def rounds(r: Running, num_turns: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the mover looks for room while everybody gets so many turns."""
    num_rounds, make_room = 0, r.mover.make_room

    def count() -> None:
        nonlocal num_rounds
        num_rounds += 1
        make_room()

    monkeypatch.setattr(r.mover, "make_room", count)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    return num_rounds


async def test_pool_full_of_leased_pages_does_not_keep_the_processor_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(8, FakeSlab(40), low_watermark=2, high_watermark=4) as r:
        await demoted(r, *KEYS[20:22])
        await r.put(*KEYS[:4])
        leased = await r.reserve(KEYS[:4], 4)
        waiting = [asyncio.create_task(work) for work in (r.reserve([], 3), r.get(KEYS[20]))]
        assert await rounds(r, 500, monkeypatch) < 10
        r.pool.release(leased.reservation_id)
        reservation, block = await asyncio.gather(*waiting)
        assert block == block_of(KEYS[20])
        r.pool.release(reservation.reservation_id)


async def test_block_that_no_disk_takes_now_does_not_keep_the_processor_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slab = FakeSlab(2)
    async with running(8, slab) as r:
        await demoted(r, *KEYS[:2])
        slab.hang()
        readers = [asyncio.create_task(r.get(key)) for key in KEYS[:2]]
        await until(lambda: slab.num_reads == 2)
        await r.put(*KEYS[2:8])
        writer = asyncio.create_task(r.put(KEYS[8]))
        started_s = r.store.now_s()
        num_rounds = await rounds(r, 1000, monkeypatch)
        assert num_rounds < 10 + 3 * (r.store.now_s() - started_s) / RETRY_S
        assert not writer.done()
        slab.go_on()
        await writer
        assert await asyncio.gather(*readers) == [block_of(key) for key in KEYS[:2]]


# -- everything at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_disks_do_a_block_is_served_intact_or_not_at_all(seed: int) -> None:
    draw = random.Random(seed)
    slabs = [FakeSlab(24, "first"), FakeSlab(24, "second")][: draw.choice([1, 2])]

    async def client(r: Running, keys: list[BlockKey]) -> None:
        stored: set[BlockKey] = set()
        for _ in range(60):
            key = draw.choice(keys)
            match draw.randrange(10):
                case 0 | 1 | 2 | 3:
                    await r.put(key)
                    stored.add(key)
                case 4 | 5 | 6 | 7:
                    reading = asyncio.create_task(r.get(key, patiently=draw.random() < 0.5))
                    if draw.random() < 0.1:
                        await asyncio.sleep(0)
                        reading.cancel()
                    (result,) = await asyncio.gather(reading, return_exceptions=True)
                    if not isinstance(result, asyncio.CancelledError):
                        assert result is None or (key in stored and result == block_of(key))
                case 8:
                    r.mover.remove(key)
                    stored.discard(key)
                case _:
                    r.mover.prefetch(draw.sample(keys, 5))
            assert r.pool.check_integrity() is None

    async def disturb() -> None:
        while True:
            slab = draw.choice(slabs)
            match draw.randrange(4):
                case 0:
                    slab.fail()
                    await asyncio.sleep(0.005)
                    slab.recover()
                case 1:
                    slab.hang()
                    await asyncio.sleep(0.03)
                    slab.go_on()
                case 2:
                    slab.damage(draw.randrange(slab.num_slots))
            await asyncio.sleep(0.005)

    async with running(
        10, *slabs, low_watermark=1, high_watermark=3, depth=2, timeout_s=0.02, promotion_timeout_s=0.02
    ) as r:
        disturbing = asyncio.create_task(disturb())
        await asyncio.gather(*(client(r, KEYS[first : first + 15]) for first in range(0, 60, 15)))
        disturbing.cancel()
        for slab in slabs:
            slab.recover()
            slab.go_on()
