"""Context caches while what stores them is slow, or fails in the end."""

import asyncio

import pytest

from conductor.front.caches.beginning import Beginning
from conductor.front.caches.cache_store import StoredCache
from conductor.front.caches.context_caches import ContextCache, ContextCaches
from mooncake.errors import NotStoredError, RequestError


class SlowStore:
    """Changes end when `go_on` is called, all with the same outcome."""

    def __init__(self) -> None:
        self._outcome = asyncio.get_running_loop().create_future()

    def go_on(self, error: NotStoredError | None = None) -> None:
        outcome, self._outcome = self._outcome, asyncio.get_running_loop().create_future()
        outcome.set_result(error)

    async def load(self, _fingerprint: str) -> list[StoredCache]:
        return []

    async def put(self, _cache: StoredCache) -> None:
        await self._change()

    async def extend(self, _cache: StoredCache) -> None:
        await self._change()

    async def remove(self, _cache_id: str) -> None:
        await self._change()

    async def _change(self) -> None:
        error = await self._outcome
        if error is not None:
            raise error


@pytest.fixture
async def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
async def caches(store: SlowStore) -> ContextCaches:
    return ContextCaches(100, store, [], "model", 16, now_s=0.0)


def made(caches: ContextCaches, now_s: float = 0.0) -> ContextCache:
    return caches.add(None, "book", Beginning([1, 2], None, None), b"root", [], now_s)


async def kept(caches: ContextCaches, store: SlowStore, ttl_s: float) -> ContextCache:
    cache = made(caches)
    keeping = asyncio.create_task(caches.keep(cache, ttl_s, 0.0))
    await asyncio.sleep(0)
    store.go_on()
    await keeping
    return cache


async def test_a_cache_that_is_being_deleted_is_found_by_nobody_and_has_its_name(
    caches: ContextCaches, store: SlowStore
) -> None:
    """It would be there beside another one of its name, if deleting failed."""
    cache = await kept(caches, store, 10.0)
    for error in (NotStoredError("full"), None):
        deleting = asyncio.create_task(caches.delete(cache))
        await asyncio.sleep(0)
        assert caches.of(None, 1.0) == []
        with pytest.raises(RequestError, match="there is a context cache 'book' already"):
            made(caches, 1.0)
        store.go_on(error)
        if error is not None:
            with pytest.raises(RequestError, match="full"):
                await deleting
            assert caches.find(None, "book", 1.0) is cache
    await deleting
    made(caches, 1.0)


async def test_a_cache_that_could_not_be_made_is_not_there_after_all(
    caches: ContextCaches, store: SlowStore
) -> None:
    """Its client was told so while another one was deleting it, which failed."""
    cache = made(caches)
    deleting = asyncio.create_task(caches.delete(cache))
    await asyncio.sleep(0)
    caches.remove(cache)
    store.go_on(NotStoredError("full"))
    with pytest.raises(RequestError):
        await deleting
    assert caches.of(None, 1.0) == []
    made(caches, 1.0)


async def test_a_cache_does_not_end_while_it_is_being_extended(
    caches: ContextCaches, store: SlowStore
) -> None:
    cache = await kept(caches, store, 10.0)
    for error, now_s in ((None, 9.0), (NotStoredError("full"), 100.0)):
        extending = asyncio.create_task(caches.keep(cache, 100.0, now_s))
        await asyncio.sleep(0)
        assert caches.of(None, now_s + 99.0) == [cache]
        store.go_on(error)
        if error is None:
            await extending
    with pytest.raises(RequestError, match="full"):
        await extending
    assert caches.of(None, 108.0) == [cache]
    assert caches.of(None, 109.0) == []
