"""The device tier is in the pool's events for as long as the worker lives that reports it."""

from kvstore.protocol.answers import Located
from kvstore.protocol.calls import DeviceBlocks, Lookup, RemoveBlocks
from mooncake.messages.kv_events import KVEvent, KVRemoved, KVStored
from mooncake.messages.pools import Tier
from tests.kvstore.server.sessions import KEYS, session
from tests.kvstore.tiers import Running, running


def new_events(r: Running) -> list[KVEvent]:
    batch = r.store.events.seal()
    return batch.events if batch is not None else []


def device_keys(r: Running) -> set[bytes]:
    return {key for tier, keys in r.store.snapshot() if tier is Tier.DEVICE for key in keys}


async def test_blocks_are_told_and_cannot_be_had() -> None:
    async with running(4) as r, session(r) as (user, answers):
        new_events(r)
        user.handle(DeviceBlocks(KEYS[:3], is_stored=True))
        user.handle(DeviceBlocks(KEYS[:1], is_stored=False))
        assert new_events(r) == [KVStored(Tier.DEVICE, KEYS[:3]), KVRemoved(Tier.DEVICE, KEYS[:1])]
        assert device_keys(r) == set(KEYS[1:3])
        user.handle(Lookup(1, KEYS[:3]))
        assert await answers.to(1) == Located(1, bytes(3))


async def test_they_go_with_the_worker_and_not_with_others() -> None:
    async with running(4) as r:
        async with session(r) as (worker, _):
            worker.handle(DeviceBlocks(KEYS[:2], is_stored=True))
            async with session(r, owner=6):
                pass
            assert device_keys(r) == set(KEYS[:2])
            new_events(r)
        [removed] = new_events(r)
        assert isinstance(removed, KVRemoved)
        assert set(removed.keys) == set(KEYS[:2])
        assert device_keys(r) == set()


async def test_they_stay_when_the_pool_is_emptied() -> None:
    async with running(4) as r, session(r) as (user, _):
        user.handle(DeviceBlocks(KEYS[:1], is_stored=True))
        user.handle(RemoveBlocks(1, None))
        assert new_events(r)[-1] == KVStored(Tier.DEVICE, KEYS[:1])
