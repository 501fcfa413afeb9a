"""Stores: complete blocks are copied to the pool beside the computation, which never waits for a store.

A complete block does not change as long as its request has its pages. So a thread copies the blocks of some
steps together, while their requests run. A finished request keeps its pages for a moment, until its blocks
are copied. If that would take too long, or if too many pages would be kept, the blocks are not stored, and a
later request computes them. After a failure of the pool (full, silent or gone) nothing is stored for a while.

Owns: blocks that wait to be stored, pages that are kept for them. Does not know: which blocks are complete.
"""

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.client.client import KVCachePool
from kvstore.connectors.vllm.plans import PlacedBlock, StorePlan
from kvstore.connectors.vllm.worker.pages import EnginePages
from messenger.wire.checksums import Addresses, Digests
from mooncake.errors import MooncakeError
from mooncake.messages.blocks import BlockKey

log = logging.getLogger(__name__)

_COLLECT_S = 0.05
"""Seconds for which a block waits for further blocks, unless its request has finished.

A call for each step would take too much time.
"""
_BATCH_BYTES = 16 << 20
"""The most bytes of the blocks in one call."""
_KEEP_S = 2.0
"""The most seconds for which a finished request keeps its pages."""
_KEPT_SHARE = 0.25
"""The largest share of the engine's pages that finished requests keep. A single request may keep more."""
_ROOM_S = 0.5
"""Seconds for which a store waits for room in the pool."""
_PAUSE_S = 1.0
"""Seconds without stores after a store that failed."""


class _GivenUpError(Exception):
    """The error that ends a call to the pool when pages of its blocks must not be read any more."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A block that waits to be stored."""

    request_id: str
    block: PlacedBlock
    since_s: float


@dataclass(frozen=True, slots=True)
class _Kept:
    """The pages of a finished request, and the deadline until which they may be kept."""

    num_pages: int
    due_s: float


class WorkerStores:
    """The stores of one worker. The engine calls all public methods, and none of them waits for the pool."""

    def __init__(self, pool: KVCachePool, pages: EnginePages) -> None:
        self._pool, self._pages = pool, pages
        self._changed = threading.Condition()
        """Condition variable that protects all following attributes, up to `_reading`."""
        self._queue: deque[_Waiting] = deque()
        self._batch: list[_Waiting] = []
        """Blocks of the call in progress."""
        self._given_up: set[str] = set()
        """Requests of the call in progress whose pages must not be read any more."""
        self._num_blocks: Counter[str] = Counter()
        """Number of blocks of each request in the queue and the batch, without given up blocks."""
        self._kept: dict[str, _Kept] = {}
        """Finished requests that keep pages, the oldest first."""
        self._incomplete: set[str] = set()
        """Running requests with a block that was not stored.

        Their later blocks are dropped too, because a later request can use a block only together with all
        blocks before it.
        """
        self._resume_s = 0.0
        self._is_closed = False
        self._reading = threading.Lock()
        """Lock that is held while the engine's pages are read."""
        threading.Thread(target=self._serve, name="mooncake-store", daemon=True).start()

    def add(self, stores: Iterable[StorePlan]) -> None:
        """Queue complete blocks to be stored, or drop them while stores are paused after a failure."""
        now_s = time.monotonic()
        with self._changed:
            for store in stores:
                if now_s < self._resume_s:
                    self._incomplete.add(store.request_id)
                if store.request_id not in self._incomplete:
                    self._num_blocks[store.request_id] += len(store.blocks)
                    self._queue += (_Waiting(store.request_id, block, now_s) for block in store.blocks)
            self._changed.notify()

    def finish(self, num_pages: Mapping[str, int]) -> None:
        """Record that requests have finished. `num_pages` has the number of pages of each, by request id.

        A request keeps its pages until `take_ended` returns the request.
        """
        due_s = time.monotonic() + _KEEP_S
        with self._changed:
            for request_id, num in num_pages.items():
                self._kept[request_id] = _Kept(num, due_s)
                self._incomplete.discard(request_id)
            self._changed.notify()

    def take_ended(self, *, needs_pages: bool) -> set[str]:
        """Return the finished requests that need their pages no longer.

        `needs_pages`: give up the stores of all finished requests, so that all of them are returned.
        """
        if not self._kept:
            return set()
        self.give_up(set(self._kept) if needs_pages else self._too_many())
        with self._changed:
            ended = {request_id for request_id in self._kept if not self._num_blocks[request_id]}
            for request_id in ended:
                del self._kept[request_id], self._num_blocks[request_id]
        return ended

    def _too_many(self) -> set[str]:
        """Return the oldest finished requests that have kept pages for too long, or keep too many pages."""
        now_s = time.monotonic()
        num_pages = sum(kept.num_pages for kept in self._kept.values())
        most = _KEPT_SHARE * self._pages.num_pages
        late: set[str] = set()
        for request_id, kept in self._kept.items():
            is_last = len(late) + 1 == len(self._kept)
            if now_s <= kept.due_s and (num_pages <= most or is_last):
                break
            late.add(request_id)
            num_pages -= kept.num_pages
        return late

    def give_up(self, request_ids: set[str]) -> None:
        """Drop the stores of these requests, and wait until their pages are no longer read."""
        with self._changed:
            num_dropped = sum(self._num_blocks.pop(request_id, 0) for request_id in request_ids)
            self._incomplete -= request_ids
            if not num_dropped:
                return
            self._queue = deque(each for each in self._queue if each.request_id not in request_ids)
            self._given_up |= request_ids & {each.request_id for each in self._batch}
        with self._reading:
            pass  # a copy that has begun takes milliseconds
        log.info("%d blocks were not stored: their pages are needed", num_dropped)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        with self._reading:
            pass

    # -- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while batch := self._next_batch():
            blocks = [each.block for each in batch]
            try:
                self._pool.put_layers(
                    [block.key for block in blocks], functools.partial(self._copy, blocks), _ROOM_S
                )
            except _GivenUpError:
                self._end_batch(is_stored=False)
            except MooncakeError as error:
                self._fail(error)
            else:
                self._end_batch(is_stored=True)

    def _copy(
        self, blocks: list[PlacedBlock], layers: range, positions: Sequence[int], targets: Addresses
    ) -> Digests:
        with self._reading:
            if self._given_up or self._is_closed:
                raise _GivenUpError
            return self._pages.gather(layers, [blocks[position] for position in positions], targets)

    def _next_batch(self) -> list[_Waiting]:
        """Wait for enough blocks for a call, and return them: blocks with distinct keys.

        Returns an empty list after `close`.
        """
        most = max(1, _BATCH_BYTES // self._pages.layout.block_bytes)
        with self._changed:
            while not self._is_closed and (wait_s := self._time_to_collect_s(most)) != 0:
                self._changed.wait(wait_s)
            keys: set[BlockKey] = set()
            while self._queue and len(self._batch) < most and not self._is_closed:
                if (key := self._queue[0].block.key) in keys:
                    break  # another request has computed the same
                keys.add(key)
                self._batch.append(self._queue.popleft())
            return self._batch

    def _time_to_collect_s(self, most: int) -> float | None:
        """Return the seconds to wait for more blocks; None if no block waits."""
        if not self._queue:
            return None
        if len(self._queue) >= most or any(self._num_blocks[request_id] for request_id in self._kept):
            return 0
        return max(0, self._queue[0].since_s + _COLLECT_S - time.monotonic())

    def _end_batch(self, *, is_stored: bool) -> None:
        """End the call. Blocks that were not stored are retried, except given up blocks."""
        with self._changed:
            rest = [each for each in self._batch if each.request_id not in self._given_up]
            self._batch, self._given_up = [], set()
            if is_stored:
                self._num_blocks.subtract(each.request_id for each in rest)
            else:
                self._queue.extendleft(reversed(rest))

    def _fail(self, error: MooncakeError) -> None:
        """Drop all waiting blocks, and all blocks that come in the next `_PAUSE_S` seconds."""
        with self._changed:
            log.info("%d blocks were not stored: %s", self._num_blocks.total(), error)
            self._incomplete |= {name for name, num in self._num_blocks.items() if num} - self._kept.keys()
            self._queue.clear()
            self._num_blocks.clear()
            self._batch, self._given_up = [], set()
            self._resume_s = time.monotonic() + _PAUSE_S
