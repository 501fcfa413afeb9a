"""The upkeep of a pool: pages without an owner are noticed, and leases end in time."""

import asyncio
import logging

import pytest

from kvstore.protocol.answers import (
    Count,
    Leased,
)
from kvstore.protocol.calls import (
    LeaseBlocks,
    PinBlocks,
    RemoveBlocks,
)
from kvstore.server import store as store_module
from kvstore.server.listing import pool_stats
from mooncake.messages.kv_events import KVCleared
from mooncake.messages.pools import Tier
from tests.kvstore.server.sessions import on_ssd_only, session
from tests.kvstore.tiers import FakeSlab, key_of, running, until


async def test_page_whose_user_nobody_knows_is_reported_and_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(4) as r:
        await r.put(key_of(1))
        r.store.check()
        assert (r.store.problem, r.store.num_orphaned, caplog.records) == (None, 0, [])
        page = r.pool.find(key_of(1))
        assert page is not None
        r.pool.allocator.add_user([page])
        for _ in range(3):
            r.store.check()
        stats = pool_stats(r.store, check_integrity=True)
        assert stats.num_orphaned == 1
        assert stats.integrity == "a page's users are not its reservations, leases, pins and holds"
        assert [record.message for record in caplog.records] == [
            f"pages are not all accounted for: {stats.integrity}"
        ]
        assert caplog.records[0].levelno == logging.ERROR
        r.pool.allocator.remove_user([page])
        r.store.check()
        assert (r.store.problem, r.store.num_orphaned) == (None, 0)
        r.pool.allocator.add_user([page])
        r.store.check()
        assert len(caplog.records) == 2, "it was right in between"
        r.pool.allocator.remove_user([page])


async def test_orphaned_page_is_noticed_without_anybody_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_TICK_S", 0.001)
    async with running(4) as r:
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(r.store.tend(tasks))
            await asyncio.sleep(0)
            await r.put(key_of(1))
            page = r.pool.find(key_of(1))
            assert page is not None
            r.pool.allocator.add_user([page])
            await until(lambda: r.store.num_orphaned == 1)
            tending.cancel()
        r.pool.allocator.remove_user([page])


async def test_leases_and_pins_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_TICK_S", 0.001)
    async with running(4) as r, session(r) as (user, answers):
        await r.put(key_of(1))
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(r.store.tend(tasks))
            user.handle(LeaseBlocks(1, [key_of(1)], 0.02))
            user.handle(PinBlocks(2, [key_of(1)], 0.02, True))
            assert isinstance(await answers.to(1), Leased)
            assert r.pool.num_used_pages == 1
            await until(lambda: r.pool.num_used_pages == 0)
            assert (len(r.pool.leases), len(r.pool.pins)) == (0, 0)
            tending.cancel()


async def test_problem_on_a_disk_is_reported_too() -> None:
    async with running(4, FakeSlab(8)) as r:
        assert r.ssd is not None
        r.ssd.disks[0].allocator.add_user([0])
        stats = pool_stats(r.store, check_integrity=True)
        assert stats.integrity == "/disk/node.slab: a FREE page is in use"
        r.ssd.disks[0].allocator.remove_user([0])
        r.ssd.disks[0].allocator.num_users[0] = 0


async def test_everything_can_be_removed_at_once() -> None:
    async with running(4, FakeSlab(8)) as r, session(r) as (user, answers):
        keys = [key_of(number) for number in range(1, 7)]
        await on_ssd_only(r, *keys[:3])
        await r.put(*keys[3:])
        r.store.events.seal()
        user.handle(RemoveBlocks(1, None))
        assert await answers.to(1) == Count(1, 6)
        assert not any(map(r.has, keys))
        batch = r.store.events.seal()
        assert batch is not None
        assert batch.events == [KVCleared()]
        assert list(r.store.snapshot()) == [(Tier.DRAM, []), (Tier.SSD, [])]
