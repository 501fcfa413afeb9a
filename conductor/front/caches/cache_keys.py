"""Context caches in etcd, where the next leader finds them.

Each has a key of its own, below `context_caches`, that ends by itself with the cache's time to live.

Owns: the keys and their content. Does not know: who may see a cache, where its blocks are, etcd's calls
(`mooncake.leadership.state_keys`).
"""

import asyncio
import logging
import time
import zlib

import msgspec

from conductor.front.caches.cache_store import StoredCache
from mooncake.leadership.state_keys import StateKeys

_FOLDER = "context_caches"
_FASTEST = 1
log = logging.getLogger(__name__)


class CacheKeys:
    """The stored context caches of a cluster, in etcd. A `CacheStore`."""

    def __init__(self, keys: StateKeys) -> None:
        self._keys = keys

    async def load(self, fingerprint: str) -> list[StoredCache]:
        """Return the caches of this model, oldest first; waits until etcd answers.

        Of two with one name, the earlier was never told to its client, and is left out.
        """
        values = await self._keys.read(_FOLDER)
        stored = await asyncio.to_thread(_caches_of, values)
        now, by_name = time.time(), dict[tuple[str, str], StoredCache]()
        for cache in sorted(stored, key=lambda cache: cache.created_at):
            if cache.fingerprint == fingerprint and cache.expires_at > now:
                by_name[cache.owner, cache.name or cache.id] = cache
        return list(by_name.values())

    async def put(self, cache: StoredCache) -> None:
        """Add a cache."""
        content = zlib.compress(msgspec.msgpack.encode(cache), _FASTEST)
        await self._keys.put(f"{_FOLDER}/{cache.id}", content, cache.expires_at - time.time())

    async def extend(self, cache: StoredCache) -> None:
        """Set the end of a cache."""
        await self.put(cache)

    async def remove(self, cache_id: str) -> None:
        """Remove a cache. Idempotent."""
        await self._keys.remove(f"{_FOLDER}/{cache_id}")


def _caches_of(values: list[bytes]) -> list[StoredCache]:
    """Return the caches that this release understands."""
    caches = []
    for value in values:
        try:
            caches.append(msgspec.msgpack.decode(zlib.decompress(value), type=StoredCache))
        except (zlib.error, msgspec.MsgspecError) as error:
            log.warning("a context cache in etcd is none of this release: %s", error)
    return caches
