"""Context caches in a real etcd: what the next leader finds of them, and who may change them."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from conductor.front.caches.cache_keys import CacheKeys
from mooncake.config.cluster_section import ClusterConfig
from mooncake.errors import NotStoredError
from mooncake.leadership import etcd as leadership_etcd
from mooncake.leadership import state_keys
from mooncake.leadership.etcd import Etcd, UnreachableError
from mooncake.leadership.state_keys import StateKeys
from mooncake.leadership.terms import conductor_key
from tests.conductor.front.caches.stored import MODEL, cache
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.cluster
LIFE = 1


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine answers may be late."""
    monkeypatch.setattr(leadership_etcd, "ANSWER_TIMEOUT_S", DEADLINE_S)


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
        for foreign in ({"context_caches/cache-3": b"?"}, {"context_cache_ends/cache-3": b"1e10"}):
            async with keys.turn():
                await keys.change(foreign)
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-2"]


async def test_of_two_with_one_name_the_later_counts(server: EtcdServer) -> None:
    """The client was not told of the first, as the answer of etcd was lost."""
    async with leading(server) as (caches, _, _etcd):
        await caches.put(cache(2, name="book"))
        await caches.put(cache(1, name="book"))
        await caches.put(cache(3, name="book", owner="p" * 64))
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-2", "cache-3"]


async def kept(keys: StateKeys) -> tuple[list[str], list[str]]:
    """The ids of all contents, and of all ends."""
    return list(await keys.read("context_caches", 2)), list(await keys.read("context_cache_ends", 9))


async def test_what_has_ended_is_removed(server: EtcdServer) -> None:
    """By another leader too, and if nobody knows its model any more."""
    async with leading(server) as (caches, keys, _):
        for each in (cache(1, ttl_s=0.0), cache(2), cache(3, fingerprint="other", ttl_s=0.0), cache(4)):
            await caches.put(each)
        await caches.tidy_up()
        assert await kept(keys) == (["cache-2", "cache-4"],) * 2
        await caches.put(cache(1, ttl_s=0.0))
        await caches.remove("cache-4")
    async with leading(server, LIFE + 1) as (caches, keys, _):
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-2"]
        await caches.tidy_up()
        assert await kept(keys) == (["cache-2"],) * 2


async def test_a_cache_that_ends_while_its_extension_waits_is_there_whole(server: EtcdServer) -> None:
    async with leading(server) as (caches, _, etcd):
        await caches.put(cache(1, ttl_s=0.0))
        with losing(etcd) as lost, pytest.raises(NotStoredError):
            await caches.tidy_up()
        assert await lost.arrive() == [True]
        await caches.extend(cache(1))
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-1"]


async def test_an_extension_is_small_and_leaves_no_lease(server: EtcdServer) -> None:
    """etcd keeps each version of a key until it is compacted, and a lease until it expires."""
    content = b"/mooncake/context_caches/cache-1"
    async with leading(server) as (caches, _, etcd):
        await caches.put(cache(1))
        for seconds in range(20):
            await caches.extend(cache(1, ttl_s=1000.0 + seconds))
        answer = await etcd._ask("kv/range", {"key": content})
        assert [kv["version"] for kv in answer["kvs"]] == ["1"]
        assert len((await etcd._ask("lease/leases", {}))["leases"]) == 1


class LostAnswers:
    """Changes that etcd takes so late that nobody waits for the answer any more."""

    def __init__(self, etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
        self._change, self._late = etcd.change, list[tuple[Any, ...]]()

        async def lose(*call: Any) -> tuple[bool, int]:
            self._late.append(call)
            raise UnreachableError("silence")

        monkeypatch.setattr(etcd, "change", lose)

    async def arrive(self) -> list[bool]:
        """Carry out what was asked for; return what was indeed."""
        return [(await self._change(*call))[0] for call in self._late]


@contextmanager
def losing(etcd: Etcd) -> Iterator[LostAnswers]:
    with pytest.MonkeyPatch.context() as patch:
        yield LostAnswers(etcd, patch)


@pytest.mark.parametrize("is_carried_out", [True, False])
async def test_what_a_client_was_not_told_is_undone(server: EtcdServer, is_carried_out: bool) -> None:
    one, two = cache(1), cache(2)
    changes: list[Callable[[CacheKeys], Awaitable[None]]] = [
        lambda caches: caches.put(cache(3)),
        lambda caches: caches.extend(one._replace(expires_at=one.expires_at + 99)),
        lambda caches: caches.remove(two.id),
    ]
    async with leading(server) as (caches, keys, etcd):
        await caches.put(one)
        await caches.put(two)
        for change in changes:
            with losing(etcd) as lost, pytest.raises(NotStoredError):
                await change(caches)
            if is_carried_out:
                assert await lost.arrive() == [True]
            await caches.tidy_up()
            assert await lost.arrive() == [False]
            assert await caches.load(MODEL) == [one, two]
        assert await kept(keys) == ([one.id, two.id],) * 2


async def test_while_etcd_is_silent_changes_do_not_wait_one_after_the_other(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_keys, "LATE_S", 0.0)
    async with leading(server) as (caches, _, etcd):
        with losing(etcd) as lost:
            changes = (caches.put(cache(number)) for number in range(9))
            answers = await asyncio.gather(*changes, return_exceptions=True)
            assert {type(answer) for answer in answers} == {NotStoredError}
        assert len(await lost.arrive()) == 1
        await caches.tidy_up()
        await caches.put(cache(3))
        assert [stored.id for stored in await caches.load(MODEL)] == ["cache-3"]


async def test_a_change_that_comes_late_does_not_undo_a_later_one(server: EtcdServer) -> None:
    """Two of one cache, and of two."""
    later = cache(1, ttl_s=9000.0)
    async with leading(server) as (caches, _, etcd):
        await caches.put(cache(1))
        for early in (caches.extend(cache(1, ttl_s=5.0)), caches.remove("cache-1")):
            with losing(etcd) as lost, pytest.raises(NotStoredError):
                await early
            await caches.extend(later)
            assert await lost.arrive() == [False]
            await caches.tidy_up()
            assert await caches.load(MODEL) == [later]


async def test_a_long_cache_does_not_hold_up_the_loop(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time of the loop's thread: time on the clock says nothing on a busy machine."""
    run, longest_s = asyncio.Handle._run, 0.0  # type: ignore[attr-defined]

    def measured(handle: asyncio.Handle) -> None:
        nonlocal longest_s
        begun_s = time.thread_time()
        run(handle)
        longest_s = max(longest_s, time.thread_time() - begun_s)

    token_ids = random.Random(1).choices(range(50_000), k=500_000)
    async with leading(server) as (caches, _, _etcd):
        await asyncio.sleep(0)
        monkeypatch.setattr(asyncio.Handle, "_run", measured)
        await caches.put(cache(1, token_ids=token_ids))
        await caches.extend(cache(1, token_ids=token_ids, ttl_s=10.0))
        await caches.load(MODEL)
        assert longest_s < 0.05
