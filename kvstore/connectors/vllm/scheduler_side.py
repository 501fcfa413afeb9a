"""The scheduler's side: which blocks of a request are in the pool, and what each step loads and stores.

This side reads the id, tokens, salt, adapter and number of computed tokens of vLLM's requests. Searches run
in threads of their own. A search also promotes blocks from SSD, and leases the found blocks until they are
loaded. The scheduler asks again until the search has ended.

Owns: the keys of running requests, searches, leases. Does not know: vLLM's classes, pages' bytes.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvstore.client.client import KVCachePool
from kvstore.client.leases import Lease
from kvstore.connectors.vllm.link import PoolLink
from kvstore.connectors.vllm.plans import LoadPlan, StepPlan, StorePlan, place_blocks
from mooncake.errors import MooncakeError
from mooncake.messages.blocks import KEY_BYTES, BlockKey, client_salt, extended_keys, root_key

log = logging.getLogger(__name__)

ROOT_KEY = "root_key"
"""The name in `kv_transfer_params` under which a request gives its root key, in hexadecimal digits.

The root key is the parent of the first block's key.
"""
_NUM_SEARCHES = 8
"""The most searches that run at the same time."""
_AT_ONCE_S = 0.02
"""Seconds for which the scheduler waits for a search. Most searches take less than a millisecond."""
_LONGEST_SEARCH_S = 3.0
"""Seconds after which a search is given up. The request is computed then."""
_LEASE_S = 30.0
_PAUSE_S = 1.0
"""Seconds without searches after a search that reached no pool."""


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The number of a request's leading blocks in the pool, and their lease."""

    num_blocks: int
    lease: Lease | None

    def end(self) -> None:
        """End the lease. Idempotent."""
        if self.lease is not None:
            self.lease.end()


@dataclass(slots=True)
class _Search:
    """A search for a request's blocks, begun at `begun_s`."""

    begun_s: float
    result: "Future[FoundPrefix]"

    def end(self) -> None:
        """End the search, and the lease that the search has taken.

        If the search is pending, its lease ends as soon as the search has taken it.
        """
        self.result.add_done_callback(_end_found)


@dataclass(slots=True)
class _Tracked:
    """A request whose blocks may be loaded or stored. Invariant: `0 <= num_stored <= len(keys)`."""

    request: Any
    root: BlockKey
    keys: list[BlockKey] = field(default_factory=list)
    num_stored: int = 0
    """Number of leading blocks that the pool has, or will get with a planned step."""
    search: _Search | None = None
    num_local_tokens: int = 0
    """Tokens that the engine's own prefix cache had when the engine asked."""
    loading_pages: set[int] | None = None
    """The pages that are being loaded; None without a load."""
    has_stored: bool = False
    """Whether a store of a block of the request was planned and may be in progress."""
    may_load: bool = True
    """Whether the pool may be searched for the request: False after a load of the request has failed."""


class SchedulerSide:
    """The part of the connector in the scheduler's process. The scheduler calls all of its methods."""

    def __init__(
        self,
        link: PoolLink,
        page_tokens: int,
        *,
        adapter_of: Callable[[Any], str | None],
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        """Prepare the side without requests.

        Args:
            link: The link to the pools.
            page_tokens: The tokens of an engine's page.
            adapter_of: Returns the digest of a request's adapter: empty without an adapter, None for an
                adapter that has no identity.
            loads: Whether blocks of the pool are loaded (kv_role kv_consumer, kv_both).
            stores: Whether computed blocks are stored (kv_role kv_producer, kv_both).
        """
        self._link, self._page_tokens = link, page_tokens
        self._adapter_of, self._loads, self._stores = adapter_of, loads, stores
        self._requests: dict[str, _Tracked] = {}
        self._new_loads: list[LoadPlan] = []
        self._kept: dict[str, int] = {}
        """Number of kept pages of each request that has finished since the last step."""
        self._num_kept = 0
        """Number of finished requests that keep their pages."""
        self._needs_pages = False
        self._threads = ThreadPoolExecutor(_NUM_SEARCHES, "mooncake-search")
        self._resume_s = 0.0
        """Time before which no search begins."""

    # -- finding ----------------------------------------------------------------------------------

    def num_new_matched(self, request: Any, num_local_tokens: int) -> int | None:
        """Return how many tokens after the first `num_local_tokens` can be loaded; None during the search."""
        tracked = self._track(request)
        if tracked is None or not self._loads or not tracked.may_load:
            return 0
        # The last token is computed, for its logits; and only whole pages are taken over.
        most_tokens: int = (request.num_tokens - 1) // self._page_tokens * self._page_tokens
        if most_tokens <= num_local_tokens:
            return 0
        found = self._found(tracked, most_tokens)
        if found is None:
            return None
        tracked.num_stored = max(tracked.num_stored, found.num_blocks)
        tracked.num_local_tokens = num_local_tokens
        num_tokens = min(found.num_blocks * self._block_size, most_tokens)
        return max(0, num_tokens // self._page_tokens * self._page_tokens - num_local_tokens)

    def _found(self, tracked: _Tracked, num_tokens: int) -> FoundPrefix | None:
        """Return the result of a request's search; None while the search goes on.

        If the request has no search, the call begins one.
        """
        now_s = time.monotonic()
        if tracked.search is not None and now_s - tracked.search.begun_s > _LEASE_S / 2:
            self._end_search(tracked)  # its lease may end before the load
        if tracked.search is None:
            pool = self._link.pool
            keys = self._keys(tracked, num_tokens)
            if pool is None or not keys or now_s < self._resume_s:
                return FoundPrefix(0, None)
            tracked.search = _Search(now_s, self._threads.submit(find, pool, keys))
        try:
            return tracked.search.result.result(_AT_ONCE_S if tracked.search.begun_s == now_s else 0)
        except TimeoutError:
            if now_s - tracked.search.begun_s <= _LONGEST_SEARCH_S:
                return None
        except MooncakeError:
            pass  # the client has logged the reason
        self._end_search(tracked)
        self._resume_s = now_s + _PAUSE_S
        return FoundPrefix(0, None)

    # -- steps ------------------------------------------------------------------------------------

    def allocated(self, request: Any, pages: Sequence[int], num_loaded_tokens: int) -> None:
        """Record that a request has pages, into which `num_loaded_tokens` will be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if num_loaded_tokens == 0:
            if tracked.loading_pages is None:
                self._end_search(tracked)
            return
        start = tracked.num_local_tokens
        blocks = place_blocks(
            tracked.keys,
            range(start, start + num_loaded_tokens),
            list(pages),
            block_size=self._block_size,
            page_tokens=self._page_tokens,
        )
        load = LoadPlan(request.request_id, blocks)
        tracked.loading_pages = load.pages
        self._new_loads.append(load)

    def plan(
        self,
        num_scheduled: Mapping[str, int],
        pages_of: Callable[[str], Sequence[int]],
        preempted: Collection[str] = (),
    ) -> StepPlan:
        """Return the plan of a step that computes `num_scheduled` tokens of each request.

        `preempted`: requests that have lost their pages since the last step, and will be computed from their
        first token on.
        """
        plan = StepPlan(
            self._new_loads, preempted=set(preempted), finished=self._kept, needs_pages=self._needs_pages
        )
        self._new_loads, self._kept, self._needs_pages = [], {}, False
        for request_id in preempted:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.num_stored = 0
        if not self._stores or self._link.pool is None:
            return plan
        planned: set[BlockKey] = set()
        for request_id, num_tokens in num_scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            # Tokens that are not known yet (asynchronous scheduling, drafts) make no keys.
            num_known_tokens = min(request.num_computed_tokens + num_tokens, len(request.all_token_ids))
            num_full_blocks = num_known_tokens // self._block_size
            if num_full_blocks <= tracked.num_stored:
                continue
            new_tokens = range(tracked.num_stored * self._block_size, num_full_blocks * self._block_size)
            blocks = place_blocks(
                self._keys(tracked, new_tokens.stop),
                new_tokens,
                list(pages_of(request_id)),
                block_size=self._block_size,
                page_tokens=self._page_tokens,
            )
            tracked.num_stored = num_full_blocks
            tracked.has_stored = True
            plan.stores.append(StorePlan(request_id, [block for block in blocks if block.key not in planned]))
            planned.update(block.key for block in blocks)
        return plan

    def loaded(self, request_ids: Iterable[str], missing_pages: set[int]) -> None:
        """Record that the loads of these requests have ended, and that `missing_pages` were not filled."""
        for request_id in request_ids:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.loading_pages is None:
                continue
            if tracked.loading_pages & missing_pages:
                tracked.may_load, tracked.num_stored = False, 0
            tracked.loading_pages = None
            self._end_search(tracked)

    def finished(self, request_id: str, num_pages: int) -> bool:
        """Forget a finished request with `num_pages` pages.

        Returns whether the request keeps its pages, until its blocks are stored or given up.
        """
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return False
        self._end_search(tracked)
        # A request that is loading has stored nothing; its pages are freed when the load has ended.
        if not tracked.has_stored or tracked.loading_pages is not None:
            return False
        self._kept[request_id] = num_pages
        self._num_kept += 1
        return True

    def stored(self, request_ids: Collection[str]) -> None:
        """Record that finished requests keep their pages no longer."""
        self._num_kept -= len(request_ids)

    def demand_pages(self) -> bool:
        """Return whether finished requests keep pages. If so, the next step frees these pages."""
        self._needs_pages = self._num_kept > 0
        return self._needs_pages

    def close(self) -> None:
        for tracked in self._requests.values():
            self._end_search(tracked)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------------------------------------

    @property
    def _block_size(self) -> int:
        assert self._link.pool is not None
        return self._link.pool.layout.block_size

    def _track(self, request: Any) -> _Tracked | None:
        """Return the state of a request; None if its blocks are not shared."""
        tracked = self._requests.get(request.request_id)
        pool = self._link.pool
        if tracked is not None or pool is None:
            return tracked
        if request.mm_features or request.prompt_embeds is not None:
            return None  # tokens do not say what it computes
        adapter = self._adapter_of(request.lora_request)
        if adapter is None:
            return None
        given = (request.kv_transfer_params or {}).get(ROOT_KEY)
        if given is not None:
            root = _root(given)
        else:
            root = root_key(pool.fingerprint, client_salt(request.cache_salt), adapter)
        if root is None:
            log.warning("%s has no valid %s: its blocks are not shared", request.request_id, ROOT_KEY)
            return None
        tracked = self._requests[request.request_id] = _Tracked(request, root)
        return tracked

    def _keys(self, tracked: _Tracked, num_tokens: int) -> list[BlockKey]:
        """Return the keys of the full blocks of a request's first `num_tokens` tokens.

        If keys of later blocks are known already, they are included.
        """
        if len(tracked.keys) < num_tokens // self._block_size:
            tokens = tracked.request.all_token_ids[:num_tokens]
            tracked.keys = extended_keys(tracked.keys, tokens, self._block_size, tracked.root)
        return tracked.keys

    def _end_search(self, tracked: _Tracked) -> None:
        search, tracked.search = tracked.search, None
        if search is not None:
            search.end()


def _root(given: object) -> BlockKey | None:
    """Return the root key that a request names; None unless `given` is one in hexadecimal digits.

    A root key is a secret of the request's tenant, like `cache_salt`. Any client of vLLM can send anything
    here, and an error in the scheduler would end vLLM's engine.
    """
    try:
        key = bytes.fromhex(str(given))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def find(pool: KVCachePool, keys: Sequence[BlockKey]) -> FoundPrefix:
    """Return the leading blocks that the pool has, promoted to DRAM and leased.

    Raises MooncakeError if no pool answers.
    """
    num_blocks = pool.prefix_len(keys)
    is_local = [address.startswith("unix:") for address in pool.addresses]
    if not num_blocks or not any(is_local):
        return FoundPrefix(num_blocks, None)
    lease = pool.lease(keys[:num_blocks], _LEASE_S)
    if all(is_local):  # a block without a place in DRAM counts as missing; a pool elsewhere might have it
        num_blocks = next((i for i, view in enumerate(lease.blocks) if view is None), num_blocks)
    return FoundPrefix(num_blocks, lease)


def _end_found(result: "Future[FoundPrefix]") -> None:
    if not result.cancelled() and result.exception() is None:
        result.result().end()
