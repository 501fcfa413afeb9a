"""Context caches in a real etcd: what the next leader finds of them, and who may change them."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from conductor.front.caches.cache_keys import CacheKeys
from mooncake.config.cluster_section import ClusterConfig
from mooncake.errors import NotStoredError
from mooncake.leadership.etcd import Etcd
from mooncake.leadership.state_keys import StateKeys
from mooncake.leadership.terms import conductor_key
from tests.conductor.front.caches.stored import MODEL, cache
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.cluster
LIFE = 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


@asynccontextmanager
async def leading(server: EtcdServer, life: int = LIFE) -> AsyncIterator[tuple[CacheKeys, StateKeys, Etcd]]:
    cluster = ClusterConfig(etcd_endpoints=[server.url])
    async with asyncio.timeout(DEADLINE_S), Etcd(cluster) as etcd:
        await etcd.grant(life, 600)
        await etcd.create(conductor_key(cluster, life), b"", life)
        keys = StateKeys(etcd, cluster, life)
        yield CacheKeys(keys), keys, etcd


async def test_the_next_leader_has_them_as_they_were_put(server: EtcdServer) -> None:
    one, two, three = cache(1), cache(2), cache(3)
    unnamed = [cache(number, name=None) for number in (5, 6)]
    large = cache(4, token_ids=random.Random(1).choices(range(50_000), k=200_000))
    async with leading(server) as (caches, _, _etcd):
        assert await caches.load(MODEL) == []
        for each in (two, one, three, large, *unnamed, cache(7, fingerprint="other"), cache(8, ttl_s=-1.0)):
            await caches.put(each)
        await caches.remove(three.id)
        await caches.remove("none")
        await caches.extend(one._replace(expires_at=one.expires_at + 5))
    async with leading(server, LIFE + 1) as (caches, _, _etcd):
        assert await caches.load(MODEL) == [one._replace(expires_at=one.expires_at + 5), two, large, *unnamed]
        assert [stored.id for stored in await caches.load("other")] == ["cache-7"]


async def test_changes_are_made_in_the_order_in_which_they_were_asked_for(server: EtcdServer) -> None:
    async with leading(server) as (caches, _, _etcd):
        await asyncio.gather(caches.put(cache(1)), caches.remove("cache-1"), caches.put(cache(1, ttl_s=50)))
        [stored] = await caches.load(MODEL)
        assert stored.expires_at < cache(1, ttl_s=51).expires_at


async def test_who_leads_no_more_changes_nothing(server: EtcdServer) -> None:
    """It has not heard of that yet."""
    async with leading(server) as (former, _, etcd), leading(server, LIFE + 1) as (caches, _, _etcd):
        await former.put(cache(1))
        await etcd.revoke(LIFE)
        for change in (former.put(cache(2)), former.extend(cache(1, ttl_s=9)), former.remove("cache-1")):
            with pytest.raises(NotStoredError, match="does not lead"):
                await change
        [stored] = await caches.load(MODEL)
        assert (stored.id, stored.expires_at > cache(1, ttl_s=60).expires_at) == ("cache-1", True)


async def test_what_etcd_does_not_take_is_refused(server: EtcdServer) -> None:
    too_large = cache(1, token_ids=random.Random(1).choices(range(1 << 32), k=1_000_000))
    async with leading(server) as (caches, keys, _):
        with pytest.raises(NotStoredError, match="etcd does not take it"):
            await caches.put(too_large)
        await caches.put(cache(2))
        server.kill()
        with pytest.raises(NotStoredError, match="etcd does not take it"):
            await caches.remove("cache-2")
        loading = asyncio.create_task(caches.load(MODEL))
        server.start()
        assert [stored.id for stored in await loading] == ["cache-2"]
        await keys.put("context_caches/cache-3", b"of another release")
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-2"]


async def test_of_two_with_one_name_the_later_counts(server: EtcdServer) -> None:
    """The client was not told of the first, as the answer of etcd was lost."""
    async with leading(server) as (caches, _, _etcd):
        await caches.put(cache(2, name="book"))
        await caches.put(cache(1, name="book"))
        await caches.put(cache(3, name="book", owner="p" * 64))
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-2", "cache-3"]


async def test_a_key_ends_with_the_time_to_live(server: EtcdServer) -> None:
    async with leading(server) as (caches, keys, _):
        await caches.put(cache(1, ttl_s=1.0))
        await caches.put(cache(2))
        while len(await keys.read("context_caches")) > 1:
            await asyncio.sleep(0.02)
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-2"]
