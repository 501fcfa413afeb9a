"""Context caches in etcd, where the next leader finds them.

A cache has two keys in etcd: one for its content, the other for its end, the time at which it expires. The
content has up to some 1.5 MiB and never changes; clients may change the end often. The two keys are separate
because etcd keeps former values of keys: each new end would store the content again. When a cache has
expired, its keys are removed.

Owns: these keys and their values; which caches may have another end in etcd than clients were told. Does not
know: who may see a cache, where its blocks are, etcd's calls (`mooncake.leadership.state_keys`).
"""

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import Mapping

import msgspec

from conductor.front.caches.cache_store import StoredCache
from mooncake.errors import NotStoredError
from mooncake.leadership.state_keys import MAX_KEYS, StateKeys

_CONTENTS, _ENDS = "context_caches", "context_cache_ends"
_CONTENTS_AT_ONCE, _ENDS_AT_ONCE = 4, 1000
"""The most keys in one answer of etcd, for contents and for ends.

Contents are few because each may have 1.5 MiB.
"""
_NEVER = 0.0
"""The end of a cache that is to be removed: it was deleted, or its client was never told of it."""
_FASTEST = 1
TIDY_S = 1.0
"""Seconds between two searches for caches that have ended, or whose end in etcd is in doubt."""
log = logging.getLogger(__name__)


class CacheKeys:
    """The `CacheStore` of a cluster with etcd, which keeps its context caches there.

    While `run` runs, caches that have ended are removed from etcd, and changes that etcd has not answered
    are repeated.
    """

    def __init__(self, keys: StateKeys) -> None:
        self._keys = keys
        self._ends: dict[str, float] = {}
        """The ends that clients were told, by id, of all caches that etcd may have."""
        self._doubtful: set[str] = set()
        """Ids of caches whose end in etcd is in doubt, because etcd has not answered a change of it."""

    async def load(self, fingerprint: str) -> list[StoredCache]:
        """Return the caches of this model that have not expired, oldest first. Waits until etcd answers.

        If an owner has two caches of one name, only the newer one is returned; `tidy_up` removes the older
        one from etcd. The client was never told of the older one; otherwise the newer one would have been
        refused, because its name was taken. Raises ConfigError if etcd refuses to answer.
        """
        contents = await self._keys.read(_CONTENTS, _CONTENTS_AT_ONCE)
        ends = await self._keys.read(_ENDS, _ENDS_AT_ONCE)
        self._ends, stored = await asyncio.to_thread(_understood, contents, ends)
        now, by_name = time.time(), dict[tuple[str, str], StoredCache]()
        for cache in sorted(stored, key=lambda cache: cache.created_at):
            if cache.fingerprint == fingerprint and cache.expires_at > now:
                name = cache.owner, cache.name or cache.id
                if (earlier := by_name.pop(name, None)) is not None:
                    self._ends[earlier.id] = _NEVER
                by_name[name] = cache
        return list(by_name.values())

    async def put(self, cache: StoredCache) -> None:
        """Add a cache."""
        async with self._keys.turn():
            await self._put(cache)

    async def extend(self, cache: StoredCache) -> None:
        """Store the new time at which a cache expires."""
        async with self._keys.turn():
            if self._ends.get(cache.id, _NEVER) > time.time():
                await self._set_end(cache.id, cache.expires_at)
            else:  # the cache has ended before this change's turn, and may have been removed
                await self._put(cache)

    async def remove(self, cache_id: str) -> None:
        """Remove a cache. Idempotent."""
        async with self._keys.turn():
            if cache_id in self._ends:
                await self._set_end(cache_id, _NEVER)

    async def run(self) -> None:
        """Tidy up every `TIDY_S` seconds, until cancelled."""
        while True:
            await asyncio.sleep(TIDY_S)
            with contextlib.suppress(NotStoredError):  # the next call tries again
                await self.tidy_up()

    async def tidy_up(self) -> None:
        """Remove ended caches from etcd, and set each end in doubt to the end that clients were told.

        One call handles only as many caches as fit into one change of etcd. Raises NotStoredError.
        """
        async with self._keys.turn():
            now, most = time.time(), MAX_KEYS // 3
            over = [cache_id for cache_id, end in self._ends.items() if end <= now][:most]
            doubtful = list(self._doubtful.difference(over))[:most]
            if over or doubtful:
                changes: dict[str, bytes | None] = {
                    _key(folder, cache_id): None for cache_id in over for folder in (_CONTENTS, _ENDS)
                }
                changes |= {
                    _key(_ENDS, cache_id): _encoded_end(self._ends[cache_id]) for cache_id in doubtful
                }
                await self._keys.change(changes)
                self._doubtful.difference_update(over, doubtful)
                for cache_id in over:
                    del self._ends[cache_id]

    async def _put(self, cache: StoredCache) -> None:
        content = await asyncio.to_thread(_encoded, cache)  # takes 50 ms for a long cache
        self._ends.setdefault(cache.id, _NEVER)
        await self._set_end(cache.id, cache.expires_at, {_key(_CONTENTS, cache.id): content})

    async def _set_end(self, cache_id: str, end: float, beside: Mapping[str, bytes] | None = None) -> None:
        self._doubtful.add(cache_id)
        await self._keys.change({_key(_ENDS, cache_id): _encoded_end(end), **(beside or {})})
        self._doubtful.remove(cache_id)
        self._ends[cache_id] = end


def _key(folder: str, cache_id: str) -> str:
    return f"{folder}/{cache_id}"


def _encoded(cache: StoredCache) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(cache), _FASTEST)


def _encoded_end(end: float) -> bytes:
    return msgspec.json.encode(end)


def _understood(
    contents: Mapping[str, bytes], encoded_ends: Mapping[str, bytes]
) -> tuple[dict[str, float], list[StoredCache]]:
    """Return the ends of all caches, by id, and the caches that this release can decode."""
    ends, caches = dict[str, float](), []
    for cache_id, encoded in encoded_ends.items():
        try:
            ends[cache_id] = msgspec.json.decode(encoded, type=float)
            cache = msgspec.msgpack.decode(zlib.decompress(contents[cache_id]), type=StoredCache)
            caches.append(cache._replace(expires_at=ends[cache_id]))
        except (KeyError, zlib.error, msgspec.MsgspecError) as error:
            log.warning("a context cache in etcd is none of this release: %s", error)
    return ends, caches
