"""What those who look at a pool are told, when disks do what they should not."""

from pathlib import Path

import pytest

from kvstore.server.listing import pool_stats, verify_block
from mooncake.config.sections import KVCacheConfig
from mooncake.messages.pools import Tier
from tests.kvstore.tiers import FakeSlab, Running, key_of, running

KEY, OTHER = key_of(1), key_of(2)


async def on_ssd(r: Running) -> None:
    """Stores `KEY` and pushes it out to the disk."""
    await r.put(KEY)
    await r.put(OTHER)
    assert r.pool.find(KEY) is None
    assert r.ssd is not None
    assert r.ssd.holds(KEY)


async def test_block_on_disk_is_verified_without_counting_as_used() -> None:
    async with running(1, FakeSlab(4)) as r:
        await on_ssd(r)
        assert r.ssd is not None
        table = r.ssd.disks[0].allocator.table
        slot = r.ssd.disks[0].allocator.index[KEY]
        num_uses = int(table.num_uses[slot])
        assert await verify_block(r.store, KEY) is True
        assert int(table.num_uses[slot]) == num_uses


async def test_damaged_block_on_disk_is_damaged_and_dropped() -> None:
    slab = FakeSlab(4)
    async with running(1, slab) as r:
        await on_ssd(r)
        assert r.ssd is not None
        slab.damage(r.ssd.disks[0].allocator.index[KEY])
        assert await verify_block(r.store, KEY) is False
        assert not r.has(KEY)
        assert await verify_block(r.store, KEY) is None


async def test_block_on_a_suspended_disk_is_not_taken_for_damaged() -> None:
    async with running(1, FakeSlab(4)) as r:
        await on_ssd(r)
        assert r.ssd is not None
        r.ssd.disks[0].suspend("a test wants it")
        assert await verify_block(r.store, KEY) is None
        assert r.ssd.counters.num_checksum_failures == 0
        assert KEY in r.ssd.disks[0].allocator.index


@pytest.mark.parametrize(
    ("on_disks", "expected"),
    [([], True), ([True, True], True), ([True, None], None), ([None, False], False)],
)
async def test_every_copy_counts(
    monkeypatch: pytest.MonkeyPatch, on_disks: list[bool | None], expected: bool | None
) -> None:
    async with running(2, FakeSlab(4), FakeSlab(4, "other")) as r:
        await r.put(KEY)

        async def copies(key: bytes) -> list[bool | None]:
            assert key == KEY
            return on_disks

        monkeypatch.setattr(r.ssd, "verify", copies)
        assert await verify_block(r.store, KEY) is expected


@pytest.mark.parametrize("num_opened", [0, 1, 2])
async def test_tier_without_one_of_its_disks_is_not_healthy(num_opened: int) -> None:
    async with running(1, *[FakeSlab(4, name) for name in ["a", "b"][:num_opened]]) as r:
        r.store.config = KVCacheConfig(ssd_dirs=[Path("/a"), Path("/b")])
        stats = pool_stats(r.store, check_integrity=False)
        assert stats.tiers[Tier.SSD].is_healthy is (num_opened == 2)
        assert stats.tiers[Tier.SSD].num_slots == 4 * num_opened
