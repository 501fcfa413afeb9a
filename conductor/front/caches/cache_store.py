"""The store of context caches that outlives a process: a file of this host, or etcd.

A cache is stored before its client is told of it. It stays until it is deleted or its time to live has
passed, even if the process ends. Times are seconds since 1970, as the event loop's clock does not outlive the
process.

Owns: the stored facts of a cache. Does not know: where they are stored (`cache_file`, `cache_keys`).
"""

from typing import NamedTuple, Protocol

from mooncake.messages.blocks import BlockKey


class StoredCache(NamedTuple):
    """One context cache, as it is stored.

    `owner` is the digest of its API key; empty if clients have no keys. `chat_prefix` is the `ChatPrefix` in
    JSON; None if the cache was made of tokens or a text. `root_key` is the parent of the first block's key.
    """

    id: str
    fingerprint: str
    name: str | None
    owner: str
    key_name: str
    token_ids: list[int]
    chat_prefix: bytes | None
    cache_salt: str | None
    root_key: BlockKey
    created_at: float
    expires_at: float


class CacheStore(Protocol):
    """The stored context caches of a cluster.

    `put`, `extend` and `remove` are carried out in the order of their calls. They return when the change is
    stored, and raise NotStoredError if the change cannot be stored.
    """

    async def load(self, fingerprint: str) -> list[StoredCache]:
        """Return this model's unexpired caches, oldest first. Raises ConfigError if they cannot be read."""

    async def put(self, cache: StoredCache) -> None:
        """Add a cache."""

    async def extend(self, cache: StoredCache) -> None:
        """Store the new `expires_at` of a cache."""

    async def remove(self, cache_id: str) -> None:
        """Remove a cache. Idempotent."""
