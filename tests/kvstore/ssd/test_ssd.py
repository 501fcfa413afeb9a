"""The SSD tier on slabs that fail, hang and rot: what it returns is intact, and no slot is lost."""

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from kvstore.events.batches import EventLog
from kvstore.pool.pages import PageState, PageTable
from kvstore.ssd import disk as disk_module
from kvstore.ssd.disk import Disk
from kvstore.ssd.ssd import Loaded, SsdTier
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import BlockKey
from mooncake.messages.kv_events import KVCleared, KVRemoved, KVStored
from mooncake.messages.pools import Tier
from tests.kvstore.tiers import (
    LAYOUT,
    FakeSlab,
    block_of,
    buffer,
    checksums_of,
    is_settled,
    key_of,
    ssd_tier,
    until,
)

KEYS = [key_of(number) for number in range(1, 20)]
TIMEOUT_S = 0.02
PAUSE_S = 0.01


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_FIRST_PAUSE_S", PAUSE_S)
    monkeypatch.setattr(disk_module, "_LONGEST_PAUSE_S", 2 * PAUSE_S)


@pytest.fixture
def slab() -> Iterator[FakeSlab]:
    slab = FakeSlab(num_slots=4)
    yield slab
    slab.go_on()


@contextlib.asynccontextmanager
async def settled(ssd: SsdTier) -> AsyncIterator[SsdTier]:
    """Closes `ssd` after the test, when no slot may have a user left, and no thread may be at work."""
    try:
        yield ssd
        await until(lambda: is_settled(ssd))
        assert all(disk.allocator.table.count()[PageState.RESERVED] == 0 for disk in ssd.disks)
    finally:
        ssd.close()


async def store(ssd: SsdTier, key: BlockKey, position: int = 0, num_uses: int = 1) -> bool:
    return await ssd.store(key, buffer(block_of(key)), checksums_of(key), position, num_uses)


async def load(ssd: SsdTier, key: BlockKey) -> bytes | None:
    """The block, or None. What comes is intact."""
    page = buffer()
    loaded = await ssd.load(key, page, LAYOUT.layer_bytes)
    if loaded is None:
        return None
    assert loaded.checksums == checksums_of(key)
    return bytes(page[: LAYOUT.block_bytes])


# -- a disk that works --------------------------------------------------------------------------------


async def test_what_was_stored_is_loaded_with_all_that_belongs_to_it(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        assert not ssd.holds(KEYS[0])
        assert await store(ssd, KEYS[0], position=7, num_uses=5)
        assert ssd.holds(KEYS[0])
        assert ssd.position(KEYS[0]) == 7
        page = buffer()
        assert await ssd.load(KEYS[0], page, LAYOUT.layer_bytes) == Loaded(checksums_of(KEYS[0]), num_uses=6)
        assert page[: LAYOUT.block_bytes] == block_of(KEYS[0])
        assert await load(ssd, KEYS[1]) is None
        assert (ssd.counters.num_demotions, ssd.num_blocks) == (1, 1)


async def test_storing_and_loading_never_touch_the_table_in_the_file_on_the_event_loop(
    slab: FakeSlab,
) -> None:
    """It lies on the same disk: whoever writes there hangs with it."""

    class Guarded:
        def __init__(self, table: PageTable) -> None:
            self._table, self._loop_thread = table, threading.get_ident()

        def __getattr__(self, name: str) -> object:
            assert threading.get_ident() != self._loop_thread
            return getattr(self._table, name)

    async with settled(ssd_tier(slab)) as ssd:
        slab.table = Guarded(slab.table)  # type: ignore[assignment]
        for key in KEYS[:6]:
            assert await store(ssd, key)
        assert await load(ssd, KEYS[5]) == block_of(KEYS[5])
        assert await ssd.verify(KEYS[4]) == [True]


async def test_block_that_is_held_is_not_written_again(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        assert await store(ssd, KEYS[0])
        assert await store(ssd, KEYS[0])
        assert (slab.num_writes, ssd.num_blocks) == (1, 1)


async def test_block_counts_as_held_only_when_it_has_been_written(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        slab.hang()
        first = asyncio.create_task(store(ssd, KEYS[0]))
        await until(lambda: slab.num_writes)
        assert not ssd.holds(KEYS[0])
        assert not await store(ssd, KEYS[0]), "somebody else is still writing it, perhaps in vain"
        slab.go_on()
        assert await first
        assert ssd.holds(KEYS[0])
        assert slab.num_writes == 1


@pytest.mark.parametrize(
    ("policy", "first_to_go"),
    [(EvictionPolicy.LRU, 1), (EvictionPolicy.LFU, 2), (EvictionPolicy.LENGTH_AWARE, 3)],
)
async def test_full_disk_evicts_by_its_policy(
    slab: FakeSlab, policy: EvictionPolicy, first_to_go: int
) -> None:
    lost: list[BlockKey] = []

    async with settled(ssd_tier(slab, policy=policy)) as ssd:
        ssd.on_lost = lost.append
        await store(ssd, KEYS[0], num_uses=9)
        await store(ssd, KEYS[1], num_uses=9)
        await store(ssd, KEYS[2], num_uses=2, position=1)
        await store(ssd, KEYS[3], num_uses=2, position=8)
        assert await load(ssd, KEYS[0]) is not None  # used again
        assert await store(ssd, KEYS[4])
        assert lost == [KEYS[first_to_go]]
        assert (ssd.num_blocks, ssd.num_evictions) == (4, 1)
        assert await load(ssd, KEYS[4]) == block_of(KEYS[4])


async def test_block_that_is_being_read_is_not_evicted(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        for key in KEYS[:4]:
            await store(ssd, key)
        slab.hang()
        reading = asyncio.create_task(load(ssd, KEYS[0]))
        await until(lambda: slab.num_reads)
        writing = asyncio.create_task(store(ssd, KEYS[4]))
        await until(lambda: slab.num_writes == 5)
        assert (ssd.holds(KEYS[0]), ssd.holds(KEYS[1])) == (True, False)
        slab.go_on()
        assert await reading == block_of(KEYS[0])
        assert await writing


async def test_disk_whose_slots_are_all_in_use_takes_nothing_now(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        for key in KEYS[:4]:
            await store(ssd, key)
        slab.hang()
        reading = [asyncio.create_task(load(ssd, key)) for key in KEYS[:4]]
        await until(lambda: slab.num_reads == 4)
        assert not await store(ssd, KEYS[4])
        slab.go_on()
        assert await asyncio.gather(*reading) == [block_of(key) for key in KEYS[:4]]
        assert await store(ssd, KEYS[4])


async def test_no_more_than_its_depth_is_asked_of_a_disk_at_once(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab, depth=2)) as ssd:
        for key in KEYS[:4]:
            await store(ssd, key)
        assert None not in await asyncio.gather(*(load(ssd, key) for key in KEYS[:4] * 8))
        assert slab.most_at_once <= 2


async def test_waiting_behind_others_is_not_taken_for_a_disk_that_hangs(slab: FakeSlab) -> None:
    """Many short reads take longer together than one may take."""
    slab.delay_s = 0.1

    async with settled(ssd_tier(slab, depth=1, timeout_s=1.0)) as ssd:
        await store(ssd, KEYS[0])
        assert await asyncio.gather(*(load(ssd, KEYS[0]) for _ in range(15))) == [block_of(KEYS[0])] * 15
        assert ssd.is_accepting


# -- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["data", "checksums", "seal"])
async def test_damaged_block_is_dropped_and_counted_and_never_returned(
    slab: FakeSlab, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        await store(ssd, KEYS[0])
        await store(ssd, KEYS[1])
        slot = ssd.disks[0].allocator.index[KEYS[0]]
        match what:
            case "data":
                slab.damage(slot)
            case "checksums":
                ssd.disks[0].allocator.table._checksums[slot * LAYOUT.num_layers * 8] ^= 1
            case _:
                ssd.disks[0].allocator.table._seal[slot] ^= 1
        assert await load(ssd, KEYS[0]) is None
        assert not ssd.holds(KEYS[0])
        assert (ssd.counters.num_checksum_failures, ssd.counters.num_read_errors) == (1, 0)
        assert ssd.disks[0].is_healthy, "one bad block is no reason to give up a disk"
        assert await load(ssd, KEYS[1]) == block_of(KEYS[1])
        assert await store(ssd, KEYS[0])
        assert await load(ssd, KEYS[0]) == block_of(KEYS[0])
    assert [record.message for record in caplog.records] == [
        "SSD tier: a block in /disk/node.slab is damaged and dropped"
    ]


async def test_what_a_slab_held_before_is_found_and_verified() -> None:
    slab = FakeSlab(num_slots=4)

    async with settled(ssd_tier(slab)) as ssd:
        await store(ssd, KEYS[0], num_uses=3)
        await store(ssd, KEYS[1])
        slab.damage(ssd.disks[0].allocator.index[KEYS[1]])
    async with settled(ssd_tier(slab)) as ssd:
        assert set(ssd.keys()) == set(KEYS[:2])
        assert await load(ssd, KEYS[0]) == block_of(KEYS[0])
        assert await load(ssd, KEYS[1]) is None


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error_code", [errno.EIO, errno.ENOSPC])
async def test_disk_that_cannot_write_is_suspended_and_used_again_later(
    slab: FakeSlab, error_code: int
) -> None:
    changes: list[bool] = []

    async with settled(ssd_tier(slab)) as ssd:
        ssd.on_health = lambda: changes.append(ssd.is_accepting)
        await store(ssd, KEYS[0])
        slab.fail(error_code)
        assert not await store(ssd, KEYS[1])
        assert (ssd.is_accepting, ssd.holds(KEYS[0]), ssd.holds(KEYS[1])) == (False, False, False)
        assert not await store(ssd, KEYS[1])
        assert slab.num_writes == 2, "it is left alone"
        assert ssd.counters.num_write_errors == 1
        slab.recover()
        await until(lambda: ssd.is_accepting)
        assert await load(ssd, KEYS[0]) == block_of(KEYS[0])
        assert await store(ssd, KEYS[1])
        assert changes == [False, True]


async def test_block_that_cannot_be_read_is_dropped_and_counted(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        await store(ssd, KEYS[0])
        slab.fail()
        assert await load(ssd, KEYS[0]) is None
        assert (ssd.counters.num_read_errors, ssd.num_blocks) == (1, 0)
        slab.recover()
        await until(lambda: ssd.is_accepting)
        assert not ssd.holds(KEYS[0])


async def test_suspension_is_logged_once_until_the_disk_works_again(
    slab: FakeSlab, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_again(ssd: SsdTier) -> None:
        await until(lambda: ssd.is_accepting)
        await store(ssd, KEYS[0])
        assert not ssd.is_accepting

    async with settled(ssd_tier(slab)) as ssd:
        slab.fail()
        for _ in range(3):
            await fail_again(ssd)
        slab.recover()
        await until(lambda: ssd.is_accepting)
        await store(ssd, KEYS[0])
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "/disk/node.slab is suspended: " in caplog.text
        assert "it does not want to" in caplog.text
        slab.fail()
        assert await load(ssd, KEYS[0]) is None
        assert len(caplog.records) == 2
        slab.recover()
        await until(lambda: ssd.is_accepting)


# -- disks that hang ----------------------------------------------------------------------------------


async def test_disk_that_hangs_is_suspended_until_it_has_answered(
    slab: FakeSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0
    resume = Disk._resume

    def count(disk: Disk) -> None:
        nonlocal num_tries
        num_tries += 1
        resume(disk)

    monkeypatch.setattr(Disk, "_resume", count)

    async with settled(ssd_tier(slab, timeout_s=TIMEOUT_S)) as ssd:
        await store(ssd, KEYS[0])
        slab.hang()
        writing = asyncio.create_task(store(ssd, KEYS[1]))
        reading = asyncio.create_task(load(ssd, KEYS[0]))
        await until(lambda: not ssd.is_accepting)
        await until(lambda: num_tries > 3)
        assert not ssd.is_accepting
        assert not await store(ssd, KEYS[2])
        assert not writing.done()
        assert not reading.done()
        slab.go_on()
        await until(lambda: ssd.is_accepting)
        assert await writing
        assert await reading == block_of(KEYS[0])
        assert await load(ssd, KEYS[1]) == block_of(KEYS[1])
        assert ssd.counters.num_read_errors == ssd.counters.num_write_errors == 0


async def test_what_waits_for_a_disk_that_hangs_is_given_up_and_no_block_lost(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab, depth=1, timeout_s=TIMEOUT_S)) as ssd:
        await store(ssd, KEYS[0])
        slab.hang()
        first = asyncio.create_task(load(ssd, KEYS[0]))
        await until(lambda: slab.num_reads)
        others = [load(ssd, KEYS[0]), store(ssd, KEYS[1]), load(ssd, KEYS[0])]
        assert await asyncio.gather(*others) == [None, False, None]
        assert not first.done()
        assert (slab.num_reads, slab.num_writes) == (1, 1)
        assert ssd.counters.num_read_errors == ssd.counters.num_write_errors == 0
        slab.go_on()
        assert await first == block_of(KEYS[0])
        await until(lambda: ssd.is_accepting)
        assert await asyncio.gather(load(ssd, KEYS[0]), store(ssd, KEYS[1])) == [block_of(KEYS[0]), True]


async def test_of_two_disks_the_healthy_one_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = FakeSlab(8, "bad"), FakeSlab(8, "good")

    try:
        async with settled(ssd_tier(bad, good, timeout_s=0.1)) as ssd:
            for key in KEYS[:4]:
                assert await store(ssd, key)
            assert bad.num_writes == good.num_writes == 2, "both are used"
            on_bad, on_good = (set(disk.allocator.index) for disk in ssd.disks)
            bad.hang()
            hanging = asyncio.create_task(load(ssd, next(iter(on_bad))))
            await until(lambda: not ssd.disks[0].is_healthy)
            assert ssd.is_accepting
            assert [ssd.holds(key) for key in sorted(on_good)] == [True, True]
            assert [ssd.holds(key) for key in sorted(on_bad)] == [False, False]
            for key in KEYS[4:8]:
                assert await store(ssd, key)
                assert await load(ssd, key) == block_of(key)
            assert bad.num_writes == 2
            bad.go_on()
            await hanging
            await until(lambda: ssd.disks[0].is_healthy)
            assert all(ssd.holds(key) for key in KEYS[:8])
    finally:
        bad.go_on()
    assert ["/bad/" in record.message for record in caplog.records] == [True]


async def test_block_that_two_disks_have_is_one_block_to_everybody() -> None:
    """The one that had it was suspended when it came again."""
    first, second = FakeSlab(8, "first"), FakeSlab(8, "second")
    events, lost = EventLog(8), []

    async with settled(ssd_tier(first, second, events=events)) as ssd:
        ssd.on_lost = lost.append
        await store(ssd, KEYS[0])
        holder, other = sorted(ssd.disks, key=lambda disk: KEYS[0] not in disk.allocator.index)
        holder.suspend("a test wants it so")
        assert await store(ssd, KEYS[0])
        await until(lambda: holder.is_healthy)
        assert KEYS[0] in holder.allocator.index
        assert KEYS[0] in other.allocator.index
        other.drop(other.allocator.index[KEYS[0]])
        assert await load(ssd, KEYS[0]) == block_of(KEYS[0])
        assert lost == [], "one disk still has it"
        assert ssd.forget(KEYS[0])
        assert lost == [KEYS[0]]
    batch = events.seal()
    assert batch is not None
    assert batch.events == [KVCleared(), KVStored(Tier.SSD, [KEYS[0]]), KVRemoved(Tier.SSD, [KEYS[0]])]


async def test_forget_takes_a_block_from_every_disk() -> None:
    first, second = FakeSlab(8, "first"), FakeSlab(8, "second")

    async with settled(ssd_tier(first, second)) as ssd:
        await store(ssd, KEYS[0])
        holder = next(disk for disk in ssd.disks if KEYS[0] in disk.allocator.index)
        holder.suspend("a test wants it so")
        assert await store(ssd, KEYS[0])
        assert ssd.forget(KEYS[0])
        await until(lambda: holder.is_healthy)
        assert not ssd.holds(KEYS[0])
        assert ssd.num_blocks == 0


# -- forgetting ---------------------------------------------------------------------------------------


async def test_block_that_is_forgotten_while_it_is_written_is_not_held_after(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        slab.hang()
        writing = asyncio.create_task(store(ssd, KEYS[0]))
        await until(lambda: slab.num_writes)
        ssd.forget(KEYS[0])
        slab.go_on()
        assert not await writing
        assert not ssd.holds(KEYS[0])
        assert (ssd.num_blocks, ssd.counters.num_demotions) == (0, 0)
        assert await store(ssd, KEYS[0])


async def test_block_that_is_forgotten_while_it_is_read_may_be_read_to_the_end(slab: FakeSlab) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        await store(ssd, KEYS[0])
        slab.hang()
        reading = asyncio.create_task(load(ssd, KEYS[0]))
        await until(lambda: slab.num_reads)
        assert ssd.forget(KEYS[0])
        assert not ssd.forget(KEYS[0])
        # Its slot is nobody's until the reader is through with it.
        others = [asyncio.create_task(store(ssd, key)) for key in KEYS[1:5]]
        await until(lambda: slab.num_writes == 4)
        slab.go_on()
        assert await reading == block_of(KEYS[0])
        assert sorted(await asyncio.gather(*others)) == [False, True, True, True]


async def test_block_that_is_forgotten_and_stored_again_while_its_damaged_copy_is_read_stays(
    slab: FakeSlab,
) -> None:
    async with settled(ssd_tier(slab)) as ssd:
        await store(ssd, KEYS[0])
        slab.damage(ssd.disks[0].allocator.index[KEYS[0]])
        slab.hang()
        reading = asyncio.create_task(load(ssd, KEYS[0]))
        await until(lambda: slab.num_reads)
        ssd.forget(KEYS[0])
        slab.hang_no_more()
        assert await store(ssd, KEYS[0])
        slab.go_on()
        assert await reading is None
        assert await load(ssd, KEYS[0]) == block_of(KEYS[0])


async def test_every_change_is_an_event() -> None:
    slab, events = FakeSlab(num_slots=1), EventLog(8)

    async with settled(ssd_tier(slab, events=events)) as ssd:
        await store(ssd, KEYS[0])
        await store(ssd, KEYS[1])
        ssd.forget(KEYS[1])
        await store(ssd, KEYS[2])
        slab.damage(0)
        await load(ssd, KEYS[2])
    batch = events.seal()
    assert batch is not None
    assert batch.events[1:] == [
        KVStored(Tier.SSD, [KEYS[0]]),
        KVRemoved(Tier.SSD, [KEYS[0]]),
        KVStored(Tier.SSD, [KEYS[1]]),
        KVRemoved(Tier.SSD, [KEYS[1]]),
        KVStored(Tier.SSD, [KEYS[2]]),
        KVRemoved(Tier.SSD, [KEYS[2]]),
    ]


@pytest.mark.parametrize("disk_attribute", ["write", "read"])
async def test_mistake_of_the_program_is_no_failure_of_a_disk(
    slab: FakeSlab, disk_attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistake(*_: object) -> None:
        raise AssertionError("a mistake")

    async with settled(ssd_tier(slab)) as ssd:
        await store(ssd, KEYS[0])
        monkeypatch.setattr(slab, disk_attribute, mistake)
        with pytest.raises(AssertionError, match="a mistake"):
            await (store(ssd, KEYS[1]) if disk_attribute == "write" else load(ssd, KEYS[0]))
        disk: Disk = ssd.disks[0]
        assert disk.is_healthy
