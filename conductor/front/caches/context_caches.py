"""Context caches (Mooncake, section 3): beginnings of prompts that clients have stored, by name, for a while.

A cache belongs to the API key that has made it; no other key can use, see or delete it. The savings of a
cache are the tokens of the cache that prompts have found in the pool, since the process started.

Owns: the caches' names, times to live, quotas and savings. Does not know: where blocks are, HTTP, how caches
are stored (`cache_store`).
"""

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from conductor.front.caches.beginning import Beginning
from conductor.front.caches.cache_store import CacheStore, StoredCache
from mooncake.errors import NotStoredError, RequestError
from mooncake.messages.blocks import BlockKey, block_keys
from mooncake.messages.costs import Costs, prefill_quantities
from mooncake.messages.fronts import KeepContext
from mooncake.security.api_keys import ApiKey

MAX_CACHES = 256
"""The most context caches of one API key. They are limited, as each request of the key searches them all."""
NO_KEY = "(none)"
"""The name that is shown where clients have no keys. No key can have this name."""


@dataclass(slots=True)
class Savings:
    """Totals of savings by context caches.

    `prefill_s` are the predicted prefill seconds of the saved tokens.
    """

    num_prompts: int = 0
    num_tokens: int = 0
    prefill_s: float = 0.0

    def add(self, num_tokens: int, costs: Costs | None) -> None:
        """Count a prompt that found `num_tokens` tokens of a context cache in the pool.

        `costs` are the costs of prefill; None if they are unknown.
        """
        self.num_prompts += 1
        self.num_tokens += num_tokens
        if costs is not None:
            num_new, num_pairs = prefill_quantities(num_tokens, 0)
            self.prefill_s += num_new * costs.first_s + num_pairs * costs.second_s


@dataclass(slots=True, eq=False)
class ContextCache:
    """One context cache.

    `keys` are the block keys of its full blocks. `root_key` depends on the cache's salt; it is the parent of
    the first of `keys`.
    """

    id: str
    name: str | None
    owner: str
    """The digest of the cache's API key; empty if clients have no keys."""
    key_name: str
    beginning: Beginning
    root_key: BlockKey
    keys: list[BlockKey]
    created_at: float
    """The time at which the cache was added, in seconds since 1970."""
    expires_s: float | None = None
    """The time of the caller's clock at which the cache ends; None while the cache is being made."""
    num_extending: int = 0
    """The number of times to live that are being stored. While there are any, the cache does not end."""
    is_being_deleted: bool = False
    """Whether the cache's deletion is being stored.

    No request finds the cache any more, but its name is still taken and its tokens still count, as the
    deletion may fail.
    """
    saved: Savings = field(default_factory=Savings)
    saved_by_key: Savings = field(default_factory=Savings)
    """The savings of all caches of the API key, also of caches that have ended."""

    @property
    def num_tokens(self) -> int:
        """The tokens of the cache, which count against the quota of its key."""
        return len(self.beginning.token_ids)

    def has_ended(self, now_s: float) -> bool:
        """Return whether the cache's time to live has passed, and no extension is being stored."""
        return self.expires_s is not None and self.expires_s <= now_s and not self.num_extending


class CacheUse:
    """The use of a cache by the prompts of one HTTP request.

    `num_shared` has the length in tokens of each prompt's common prefix with the cache.
    """

    def __init__(self, cache: ContextCache, num_shared: Sequence[int]) -> None:
        self._cache, self._num_shared = cache, num_shared

    def count(self, prompt_index: int, num_cached_tokens: int, costs: Costs | None) -> None:
        """Count the savings of a prompt; the pool held `num_cached_tokens` tokens of the prompt."""
        num_saved = min(num_cached_tokens, self._num_shared[prompt_index])
        self._cache.saved.add(num_saved, costs)
        self._cache.saved_by_key.add(num_saved, costs)


class ContextCaches:
    """All caches of a front.

    Times are of the caller's clock, except `created_at` and `expires_at`, which are seconds since 1970.
    """

    def __init__(
        self,
        default_quota: int,
        store: CacheStore,
        stored: Sequence[StoredCache],
        fingerprint: str,
        block_size: int,
        now_s: float,
    ) -> None:
        """Begin with the caches that were stored before.

        Args:
            default_quota: Tokens that a key may have in caches, unless its entry has a quota.
            store: The store of the caches. It may have caches of other models too.
            stored: The caches of this model in the store.
            fingerprint: The model's fingerprint.
            block_size: Tokens of a block.
            now_s: The present time of the caller's clock.
        """
        self._default_quota = default_quota
        self._store, self._fingerprint = store, fingerprint
        self.num_store_failures = 0
        """The number of changes that were refused because they could not be stored."""
        self._caches: dict[str, dict[str, ContextCache]] = {}
        """Caches by owner and id."""
        self._by_key: dict[str, Savings] = {}
        since_1970_s = time.time() - now_s
        for cache in stored:
            self._add(_restored(cache, block_size, cache.expires_at - since_1970_s))

    def add(
        self,
        key: ApiKey | None,
        name: str | None,
        beginning: Beginning,
        root_key: BlockKey,
        keys: list[BlockKey],
        now_s: float,
    ) -> ContextCache:
        """Add a new cache, which is not stored yet and whose blocks are not computed yet.

        Raises RequestError for a name that is taken, and for too many caches or tokens.
        """
        own = self._living(_owner(key), now_s)
        if len(own) >= MAX_CACHES:
            raise RequestError(
                f"this API key has {len(own)} context caches, and may have no more; delete others",
                status=403,
                code="context_cache_quota_exceeded",
            )
        if name is not None and any(cache.name == name for cache in own):
            raise RequestError(
                f"there is a context cache {name!r} already; delete it, or choose another name",
                status=409,
                param="name",
                code="context_cache_exists",
            )
        quota, num_used = self.quota_of(key), sum(cache.num_tokens for cache in own)
        if (num_wanted := num_used + len(beginning.token_ids)) > quota:
            raise RequestError(
                f"the context caches of this API key would have {num_wanted} tokens, and they"
                f" may have {quota}; delete others, or let them expire",
                status=403,
                code="context_cache_quota_exceeded",
            )
        cache = ContextCache(
            id=f"cache-{secrets.token_hex(16)}",
            name=name,
            owner=_owner(key),
            key_name=NO_KEY if key is None else key.name,
            beginning=beginning,
            root_key=root_key,
            keys=keys,
            created_at=time.time(),
        )
        self._add(cache)
        return cache

    async def keep(self, cache: ContextCache, ttl_s: float, now_s: float) -> None:
        """Store a cache whose blocks are computed, or the new time to live of a cache that is stored already.

        Raises RequestError if the change cannot be stored.
        """
        stored = _stored(cache, self._fingerprint, time.time() + ttl_s)
        cache.num_extending += 1
        try:
            with self._refusing_what_is_not_stored():
                await (self._store.put if cache.expires_s is None else self._store.extend)(stored)
            cache.expires_s = now_s + ttl_s
        finally:
            cache.num_extending -= 1

    async def delete(self, cache: ContextCache) -> None:
        """Delete a cache, which no request finds from now on.

        If the deletion cannot be stored, the cache stays, and this raises RequestError.
        """
        cache.is_being_deleted = True
        try:
            with self._refusing_what_is_not_stored():
                await self._store.remove(cache.id)
        except BaseException:
            cache.is_being_deleted = False
            raise
        self.remove(cache)

    @contextlib.contextmanager
    def _refusing_what_is_not_stored(self) -> Iterator[None]:
        try:
            yield
        except NotStoredError as error:
            self.num_store_failures += 1
            raise RequestError(
                f"the server cannot store context caches now: {error}; try again later",
                status=507,
                code="context_cache_not_stored",
            ) from None

    def _add(self, cache: ContextCache) -> None:
        cache.saved_by_key = self._by_key.setdefault(cache.key_name, Savings())
        self._caches.setdefault(cache.owner, {})[cache.id] = cache

    def find(self, key: ApiKey | None, name: str, now_s: float, param: str | None = None) -> ContextCache:
        """Return the key's cache with this id or name. Raises RequestError that names the field `param`."""
        for cache in self.of(key, now_s):
            if name in (cache.id, cache.name):
                return cache
        raise RequestError(
            f"there is no context cache {name[:80]!r}: it has expired, or was never made with this API key",
            status=404,
            param=param,
            code="context_cache_not_found",
        )

    def of(self, key: ApiKey | None, now_s: float) -> list[ContextCache]:
        """Return all caches of this key, oldest first, except caches that are being deleted."""
        return [cache for cache in self._living(_owner(key), now_s) if not cache.is_being_deleted]

    def kept(self, now_s: float) -> list[KeepContext]:
        """Return all stored caches, as messages to the Conductor."""
        return [
            KeepContext(cache.id, cache.keys, cache.expires_s - now_s)
            for owner in list(self._caches)
            for cache in self._living(owner, now_s)
            if cache.expires_s is not None
        ]

    def remove(self, cache: ContextCache) -> None:
        """Forget a cache that is not in the store, or has expired. Idempotent."""
        self._caches.get(cache.owner, {}).pop(cache.id, None)

    def quota_of(self, key: ApiKey | None) -> int:
        """Return the number of tokens that a key may have in caches."""
        given = None if key is None else key.max_context_cache_tokens
        return self._default_quota if given is None else given

    def by_key(self, now_s: float) -> Iterator[tuple[str, list[ContextCache], Savings]]:
        """Yield the name of each key that has made a cache, the key's caches, and the savings of all of them.

        The savings include those of caches that have ended.
        """
        living: dict[int, list[ContextCache]] = {}
        for owner in list(self._caches):
            for cache in self._living(owner, now_s):
                living.setdefault(id(cache.saved_by_key), []).append(cache)
        for name, saved in self._by_key.items():
            yield name, living.get(id(saved), []), saved

    def _living(self, owner: str, now_s: float) -> list[ContextCache]:
        caches = list(self._caches.get(owner, {}).values())
        for cache in caches:
            if cache.has_ended(now_s):
                self.remove(cache)
        return [cache for cache in caches if not cache.has_ended(now_s)]


def _owner(key: ApiKey | None) -> str:
    return "" if key is None else key.sha256


def _stored(cache: ContextCache, fingerprint: str, expires_at: float) -> StoredCache:
    return StoredCache(
        id=cache.id,
        fingerprint=fingerprint,
        name=cache.name,
        owner=cache.owner,
        key_name=cache.key_name,
        token_ids=cache.beginning.token_ids,
        chat_prefix=cache.beginning.chat_prefix_json,
        cache_salt=cache.beginning.cache_salt,
        root_key=cache.root_key,
        created_at=cache.created_at,
        expires_at=expires_at,
    )


def _restored(stored: StoredCache, block_size: int, expires_s: float) -> ContextCache:
    return ContextCache(
        id=stored.id,
        name=stored.name,
        owner=stored.owner,
        key_name=stored.key_name,
        beginning=Beginning(stored.token_ids, stored.chat_prefix, stored.cache_salt),
        root_key=stored.root_key,
        keys=block_keys(stored.token_ids, block_size, stored.root_key),
        created_at=stored.created_at,
        expires_s=expires_s,
    )
