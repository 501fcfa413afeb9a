"""Context caches (Mooncake, section 3): beginnings of prompts that clients have stored, by name, for a while.

A cache belongs to the API key that has made it; nobody else can use, see or delete it. What it has saved is
counted where prompts are: of those that begin with its tokens, as much as the pool turned out to hold.

Owns: the caches, their names, ends and quotas, what they have saved. Does not know: where blocks are, HTTP.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from conductor.front.prompt import ChatPrefix
from conductor.front.tools import ToolFields
from mooncake.api_keys import ApiKey
from mooncake.blocks import BlockKey
from mooncake.costs import Costs, prefill_quantities
from mooncake.errors import RequestError
from mooncake.front_messages import KeepContext

NO_KEY = "(none)"
"""stands for the name of the key where there are none; no key can have it"""


@dataclass(slots=True)
class Savings:
    """Totals. `prefill_s`: what the tokens' prefill was predicted to take."""

    num_prompts: int = 0
    num_tokens: int = 0
    prefill_s: float = 0.0

    def add(self, num_tokens: int, costs: Costs | None) -> None:
        """A prompt found so many tokens. `costs` are those of prefill, None if nothing is known of them."""
        self.num_prompts += 1
        self.num_tokens += num_tokens
        if costs is not None:
            num_new, num_pairs = prefill_quantities(num_tokens, 0)
            self.prefill_s += num_new * costs.first_s + num_pairs * costs.second_s


@dataclass(slots=True, eq=False)
class ContextCache:
    """One cache. `keys` name the full blocks of `token_ids`, behind the root of `cache_salt`."""

    id: str
    name: str | None
    owner: str
    """the digest of its API key"""
    prefix: ChatPrefix | None
    """the messages and tools that were given; None: they were tokens or a text"""
    token_ids: list[int]
    keys: list[BlockKey]
    cache_salt: str | None
    created_s: float
    expires_s: float | None = None
    """None: it is being made"""
    saved: Savings = field(default_factory=Savings)
    saved_by_key: Savings = field(default_factory=Savings)

    def check_salt(self, cache_salt: str | None) -> None:
        """Raises RequestError if a request wants another one."""
        if cache_salt not in (None, self.cache_salt):
            raise RequestError(
                "the context cache was made with another cache_salt; leave cache_salt out, or use its own",
                param="cache_salt",
                code="invalid_value",
            )

    def chat_prefix(self, tools: Sequence[ToolFields]) -> ChatPrefix:
        """What a conversation that also brings `tools` goes on behind. Raises RequestError."""
        if self.prefix is None:
            raise RequestError(
                "this context cache was made from a prompt, and no conversation begins with that; use it in"
                " /v1/completions, or make one from messages",
                param="context_cache",
                code="invalid_value",
            )
        if tools:
            raise RequestError(
                "tools are at the beginning of a prompt, so they come with its context cache",
                param="tools",
                code="invalid_value",
            )
        return self.prefix


class CacheUse:
    """A prompt that begins with a cache's tokens, as far as `num_shared_tokens`."""

    def __init__(self, cache: ContextCache, prompts: Sequence[Sequence[int]]) -> None:
        self._cache = cache
        self._num_shared = [_num_common(cache.token_ids, prompt) for prompt in prompts]

    def count(self, prompt_index: int, num_cached_tokens: int, costs: Costs | None) -> None:
        """The pool held so many tokens of a prompt."""
        num_saved = min(num_cached_tokens, self._num_shared[prompt_index])
        self._cache.saved.add(num_saved, costs)
        self._cache.saved_by_key.add(num_saved, costs)


def _num_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first ones are equal."""
    if tokens == others[: len(tokens)]:
        return len(tokens)
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(others))


class ContextCaches:
    """All caches of a front. Times are of one clock that the caller has."""

    def __init__(self, default_quota: int) -> None:
        """`default_quota`: tokens that a key may have in caches if its entry says nothing."""
        self._default_quota = default_quota
        self._caches: dict[str, ContextCache] = {}
        self._by_key: dict[str, Savings] = {}

    def add(
        self,
        key: ApiKey | None,
        name: str | None,
        prefix: ChatPrefix | None,
        token_ids: list[int],
        keys: list[BlockKey],
        cache_salt: str | None,
        now_s: float,
    ) -> ContextCache:
        """A new cache, which is being made.

        Raises RequestError for a name that is taken, or above the quota.
        """
        if name is not None and any(cache.name == name for cache in self.of(key, now_s)):
            raise RequestError(
                f"there is a context cache {name!r} already; delete it, or choose another name",
                status=409,
                param="name",
                code="context_cache_exists",
            )
        quota, num_used = self.quota_of(key), sum(len(cache.token_ids) for cache in self.of(key, now_s))
        if num_used + len(token_ids) > quota:
            raise RequestError(
                f"the context caches of this API key would have {num_used + len(token_ids)} tokens, and they"
                f" may have {quota}; delete others, or let them expire",
                status=403,
                code="context_cache_quota_exceeded",
            )
        cache = ContextCache(
            id=f"cache-{secrets.token_hex(16)}",
            name=name,
            owner=_owner(key),
            prefix=prefix,
            token_ids=token_ids,
            keys=keys,
            cache_salt=cache_salt,
            created_s=now_s,
            saved_by_key=self._by_key.setdefault(NO_KEY if key is None else key.name, Savings()),
        )
        self._caches[cache.id] = cache
        return cache

    def find(self, key: ApiKey | None, name: str, now_s: float, param: str | None = None) -> ContextCache:
        """The cache with this id or name, of this key. Raises RequestError, naming `param`."""
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
        """All caches of this key, oldest first. On any thread."""
        owner = _owner(key)
        return [cache for cache in self._living(now_s) if cache.owner == owner]

    def kept(self, now_s: float) -> list[KeepContext]:
        """All that have been made, as the Conductor is told of them."""
        return [
            KeepContext(cache.id, cache.keys, cache.expires_s - now_s)
            for cache in self._living(now_s)
            if cache.expires_s is not None
        ]

    def remove(self, cache: ContextCache) -> None:
        """Nobody finds it any more. Idempotent."""
        self._caches.pop(cache.id, None)

    def quota_of(self, key: ApiKey | None) -> int:
        """In tokens."""
        given = None if key is None else key.max_context_cache_tokens
        return self._default_quota if given is None else given

    def by_key(self, now_s: float) -> Iterator[tuple[str, list[ContextCache], Savings]]:
        """Of every key that has made a cache: its name, its caches, what they and earlier ones have saved."""
        living = self._living(now_s)
        for name, saved in self._by_key.items():
            yield name, [cache for cache in living if cache.saved_by_key is saved], saved

    def _living(self, now_s: float) -> list[ContextCache]:
        caches = list(self._caches.values())  # at once: other threads add and remove
        for cache in caches:
            if cache.expires_s is not None and cache.expires_s <= now_s:
                self.remove(cache)
        return [cache for cache in caches if cache.expires_s is None or now_s < cache.expires_s]


def _owner(key: ApiKey | None) -> str:
    return "" if key is None else key.sha256
