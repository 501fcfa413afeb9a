"""LMCache's second tier in the KVCache pool: a plugin for its `L2AdapterInterface` (version 0.5.6).

LMCache names and fills its objects itself. A block of the pool is one unchanged object of LMCache. So LMCache
needs pools of its own: they refuse our workers and vLLM's connector, and all other pools refuse LMCache.

Owns: the translation of LMCache's calls to calls of the client, their threads. Does not know: LMCache's first
tier, pools.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.client.client import KVCachePool
from kvstore.client.connections import PoolURL
from kvstore.client.leases import Lease
from mooncake.errors import ConfigError, MismatchError, MooncakeError
from mooncake.messages.blocks import KEY_BYTES, BlockKey, KVLayout

FINGERPRINT = hashlib.sha256(b"objects of LMCache").hexdigest()[:32]
"""The fingerprint of LMCache's pools, the same for any model, as LMCache's keys name the model."""
_KNOWN = ("pool", "key_file")
_NUM_THREADS = 4
_TIMEOUT_S = 2.0
"""Seconds within which a pool must answer."""
_LOCK_S = 60.0
"""Seconds after which a block that LMCache has not unlocked may be evicted."""
log = logging.getLogger(__name__)


class MooncakeServeL2Adapter(L2AdapterInterface):
    """The second level (L2) of LMCache's storage, in one or more pools of mooncake-serve.

    LMCache makes the adapter with the `adapter_params` of its configuration, and calls the adapter's methods
    from any thread.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Make an adapter. Its pools may start later than the adapter, and may end and come back.

        Args:
            params: `pool`, one address or a list of addresses; for addresses on other hosts also `key_file`.
            l1_memory_desc: LMCache's description of its own memory, which is not used.

        Raises ConfigError for an unknown parameter, and for a missing or invalid `pool`.
        """
        super().__init__()
        self._pools = _Pools(params)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "mooncake-lmcache")
        self._lock = threading.Lock()
        self._num_tasks = 0
        self._stored, self._looked_up, self._loaded = (create_event_notifier() for _ in range(3))
        self._store_results: dict[int, L2StoreResult] = {}
        self._bitmaps: dict[int, Bitmap] = {}
        """Results of lookups and loads."""
        self._held: dict[BlockKey, list[_SharedLease]] = {}
        """The leases of each locked block."""

    def get_store_event_fd(self) -> int:
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._looked_up.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.fileno())

    # -- tasks ------------------------------------------------------------------------------------

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to store objects, and return the task's id. An object already stored is not written again."""
        return self._begin(lambda task: self._store(task, keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            results, self._store_results = self._store_results, {}
        return results

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begin to look objects up, and return the task's id.

        Found objects in pools on this host are kept until `submit_unlock`, at most `_LOCK_S` seconds. Objects
        in other pools are not kept.
        """
        return self._begin(lambda task: self._look_up(task, keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._pop(task_id)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to read objects into the caller's memory, and return the task's id.

        Missing or damaged objects are left out.
        """
        return self._begin(lambda task: self._load(task, keys, objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._pop(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        self._threads.submit(self._unlock, [block_key(key) for key in keys])

    def delete(self, keys: Sequence[Any]) -> None:
        pool = self._pools.connected(None)
        if pool is None:
            return
        try:
            pool.remove([block_key(key) for key in keys])
        except MooncakeError as error:
            log.warning("%d objects of LMCache are not deleted: %s", len(keys), error)
        else:
            self._notify_keys_deleted(list(keys), [pool.layout.block_bytes] * len(keys))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._pools.close()
        for notifier in (self._stored, self._looked_up, self._loaded):
            notifier.close()

    def report_status(self) -> dict[str, object]:
        return {"is_healthy": self._pools.connected(None) is not None, "type": type(self).__name__}

    # -- in threads -------------------------------------------------------------------------------

    def _store(self, task: int, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        blocks = [memoryview(one.byte_array).cast("B") for one in objects]
        num_bytes = sum(map(len, blocks))
        is_stored = False
        try:
            pool = self._pools.connected(len(blocks[0]) if blocks else None)
            if pool is not None:
                pool.put([block_key(key) for key in keys], blocks, timeout_s=_TIMEOUT_S)
                is_stored = True
        except MooncakeError as error:
            log.warning("%d objects of LMCache are not stored: %s", len(keys), error)
        finally:
            with self._lock:
                self._store_results[task] = L2StoreResult(is_stored, num_bytes if is_stored else 0)
            self._stored.notify()
        if is_stored:
            self._notify_keys_stored(list(keys), list(map(len, blocks)))

    def _look_up(self, task: int, keys: Sequence[Any], layouts: Mapping[int, Any]) -> None:
        found: list[bool] = []
        try:
            pool = self._pools.connected(_object_bytes(layouts))
            if pool is not None:
                found = self._lease(pool, [block_key(key) for key in keys])
        except MooncakeError as error:
            log.warning("LMCache finds nothing in the KVCache pool: %s", error)
        finally:
            self._answer(task, keys, found, self._looked_up)

    def _lease(self, pool: KVCachePool, keys: list[BlockKey]) -> list[bool]:
        """Lease the blocks that pools on this host have. Returns for each block whether any pool has it."""
        if self._pools.has_local:
            shared = _SharedLease(pool.lease(keys, _LOCK_S))
            leased = [key for key, block in zip(keys, shared.lease.blocks, strict=True) if block is not None]
            shared.num_keys = len(leased)
            if not leased:
                shared.lease.end()
            with self._lock:
                for key in leased:
                    self._held.setdefault(key, []).append(shared)
        # Blocks that are not leased may be in pools on other hosts.
        return [tier is not None for tier in pool.exists(keys)]

    def _unlock(self, keys: list[BlockKey]) -> None:
        ended = []
        with self._lock:
            for key in keys:
                leases = self._held.get(key)
                if not leases:
                    continue
                shared = leases.pop(0)
                if not leases:
                    del self._held[key]
                shared.num_keys -= 1
                if not shared.num_keys:
                    ended.append(shared.lease)
        for lease in ended:
            lease.end()

    def _load(self, task: int, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        loaded: list[bool] = []
        try:
            buffers = [memoryview(one.byte_array).cast("B") for one in objects]
            pool = self._pools.connected(len(buffers[0]) if buffers else None)
            if pool is not None:
                loaded = pool.get([block_key(key) for key in keys], buffers)
        except MooncakeError as error:
            log.warning("%d objects of LMCache are not loaded: %s", len(keys), error)
        finally:
            self._answer(task, keys, loaded, self._loaded)
        self._notify_keys_accessed([key for key, is_loaded in zip(keys, loaded, strict=False) if is_loaded])

    # ---------------------------------------------------------------------------------------------

    def _begin(self, work: Callable[[int], None]) -> int:
        with self._lock:
            self._num_tasks += 1
            task = self._num_tasks
        self._threads.submit(work, task)
        return task

    def _answer(self, task: int, keys: Sequence[Any], is_there: Sequence[bool], notifier: Any) -> None:
        bitmap = Bitmap(len(keys))
        for position, is_set in enumerate(is_there):
            if is_set:
                bitmap.set(position)
        with self._lock:
            self._bitmaps[task] = bitmap
        notifier.notify()

    def _pop(self, task: int) -> Bitmap | None:
        with self._lock:
            return self._bitmaps.pop(task, None)


class _SharedLease:
    """A lease of several blocks, which is ended when the last of these blocks is unlocked."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.num_keys = 0


class _Pools:
    """The client of the pools, which is made when a pool first answers."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        """Check the parameters. Raises ConfigError, which names the wrong parameter."""
        for key in params:
            if key not in _KNOWN:
                raise ConfigError(f"adapter_params: unknown key {key}; known keys are {', '.join(_KNOWN)}")
        pool = params.get("pool")
        self._addresses: list[str] = [pool] if isinstance(pool, str) else pool or []
        if not self._addresses:
            raise ConfigError("adapter_params: pool is missing: unix:/path/of.sock or tcp://host:port")
        self.has_local = any(PoolURL.parse(address).tcp is None for address in self._addresses)
        self._key_file = params.get("key_file")
        self._lock = threading.Lock()
        self._client: KVCachePool | None = None

    def connected(self, object_bytes: int | None) -> KVCachePool | None:
        """Return the client of the pools, which is connected by the first call with `object_bytes`.

        `object_bytes`: the size of LMCache's objects; None while it is unknown. Then the result is None if
        there is no client yet. Raises MooncakeError if no pool answers, or if the pools have other blocks.
        """
        with self._lock:
            if self._client is None and object_bytes is not None:
                self._client = KVCachePool.connect(
                    *self._addresses,
                    fingerprint=FINGERPRINT,
                    layout=_layout(object_bytes),
                    timeout_s=_TIMEOUT_S,
                    key_file=self._key_file,
                )
            return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def block_key(key: Any) -> BlockKey:
    """Return the block key of an object, which covers every field of LMCache's key."""
    fields = (key.model_name, str(key.kv_rank), str(key.object_group_id), key.cache_salt)
    named = "\0".join(fields).encode() + b"\0" + key.chunk_hash
    return hashlib.sha256(named).digest()[:KEY_BYTES]


def _layout(object_bytes: int) -> KVLayout:
    """Return a layout whose blocks have `object_bytes` bytes.

    Raises MismatchError unless `object_bytes` is a multiple of 4.
    """
    if object_bytes % 4:
        raise MismatchError("object size", "a multiple of 4 bytes", object_bytes, "use another chunk size")
    return KVLayout(1, 1, object_bytes // 4, 1, "bfloat16")


def _object_bytes(layouts: Mapping[int, Any]) -> int | None:
    """Return the bytes of LMCache's objects; None if there are no layouts."""
    desc = next(iter(layouts.values()), None)
    if desc is None:
        return None
    return sum(
        prod(map(int, shape)) * int(dtype.itemsize)
        for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True)
    )
