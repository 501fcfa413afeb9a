"""Layer-wise prefill: loads and stores of KVCache beside the computation (Mooncake, section 5.2).

Before a layer is computed, its load is awaited and the load of the next layer is launched; afterwards the
layer's store is launched. Stores are awaited only at the prompt's end. Where the device has memory only for a
window of layers, a layer also waits for the store of the layer whose memory it takes.

Owns: the threads of loads and stores, the state that a pass shares with them. Does not know: prompts,
messages.
"""

import asyncio
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from workers.engine.batch import Chunk
from workers.kvcache.copies import MOST_STAGED, LayerCopies, Mark, StagedLayer

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PromptBlock:
    """A block of a prompt, in a device page and in a pool page.

    Layers are stored in the pool in order: all layers before `next_layer` are stored, or being stored.
    """

    device_page: int
    pool_page: int
    next_layer: int
    first_stored: int = 0
    stored: "array[int] | None" = None
    """The kept checksums (xxh3-64) of layers from `first_stored` on; None if none are kept.

    With a layer window, layers are stored to free their device memory, and loaded again for the next pass.
    The checksums are in an array, because there are thousands of blocks.
    """

    def keep_checksum(self, layer: int, checksum: int) -> None:
        """Keep the xxh3-64 of a layer that has just been stored. Layers must come in order."""
        if self.stored is None:
            self.first_stored, self.stored = layer, array("Q")
        assert layer == self.first_stored + len(self.stored), "layers are stored in order, each once"
        self.stored.append(checksum)

    def stored_checksum(self, layer: int) -> int | None:
        """Return the xxh3-64 of `layer` that `keep_checksum` has kept; None if there is no such checksum.

        Then the pool's page table has the checksum.
        """
        position = layer - self.first_stored
        if self.stored is None or not 0 <= position < len(self.stored):
            return None
        return self.stored[position]


@dataclass(slots=True, eq=False)
class PassPart:
    """One prompt's part of a forward pass. Device thread, transfer threads and event loop share it.

    `await_pool(layer)` blocks the load thread until the layer of all `loads` is in the pool, and returns
    False if the layer will not arrive. `on_stored(layer, blocks, checksums)` is called on the store thread. A
    dropped part is still computed if its pass has parts that are not dropped; its results are ignored.
    """

    chunk: Chunk
    loads: Sequence[PromptBlock]
    stores: Sequence[PromptBlock]
    await_pool: Callable[[int], bool]
    on_stored: Callable[[int, Sequence[PromptBlock], list[int]], None]
    damaged_pages: list[int] = field(default_factory=list)
    """Pool pages that loads have found damaged."""
    storing: deque[Future[None]] = field(default_factory=deque)
    is_dropped: bool = False
    load_wait_s: float = 0.0
    """Seconds for which the whole pass has waited for loads, including the loads of other parts."""


class LayerTransfers:
    """The loads and stores of all passes: loads on one thread, and at the same time stores on another thread.

    Without `overlap` a load or store is complete when its launch returns. `window` is the
    `DeviceKVCache.window`: None, or at least 2.
    """

    def __init__(self, copies: LayerCopies, *, overlap: bool, window: int | None = None) -> None:
        assert window is None or window >= 2, "a layer is loaded while the one before it is computed"
        self._copies, self._window = copies, window
        self._last_stores: dict[int, Future[None]] = {}
        """The latest store of each place in the layer window, by the place's index.

        This store must end before another layer is loaded to the place.
        """
        self._staged = threading.Semaphore(MOST_STAGED)
        """Limit of the parts of passes that are in pinned memory. At the limit, the computation waits."""
        self._loading: Executor = ThreadPoolExecutor(1, "kvcache-load") if overlap else _AtOnce()
        self._storing: Executor = ThreadPoolExecutor(1, "kvcache-store") if overlap else _AtOnce()

    def launch_load(self, layer: int, parts: Sequence[PassPart]) -> "Future[list[Mark]] | None":
        """Begin to load `layer`; to be called on the device thread.

        Returns None if there is nothing to do: no blocks to load, and no store to wait for.
        """
        loading = [part for part in parts if part.loads and not part.is_dropped]
        last_store = self._last_stores.get(layer % self._window) if self._window is not None else None
        if not loading and last_store is None:
            return None
        return self._loading.submit(self._load, layer, loading, self._copies.mark(), last_store)

    def wait_loaded(self, loading: "Future[list[Mark]] | None", parts: Sequence[PassPart]) -> None:
        """Block the device thread until the layer is loaded and its memory is free.

        Returns earlier if all parts were dropped.
        """
        if loading is not None:
            began_s = time.perf_counter()
            for mark in loading.result():
                self._copies.wait(mark)
            for part in parts:
                part.load_wait_s += time.perf_counter() - began_s

    def launch_store(self, layer: int, parts: Sequence[PassPart]) -> None:
        """Begin to store `layer`, which has been computed; to be called on the device thread."""
        storing = [
            (part, [block for block in part.stores if block.next_layer == layer])
            for part in parts
            if part.stores and not part.is_dropped
        ]
        every = [block for _, blocks in storing for block in blocks]
        if not every:
            return
        staged = self._copies.stage(layer, every, self._copies.mark())
        begin = 0
        for part, blocks in storing:
            if blocks:
                for block in blocks:
                    block.next_layer = layer + 1
                of_part = None if staged is None else staged.part(begin, begin + len(blocks))
                begin += len(blocks)
                self._submit_store(layer, part, blocks, of_part)

    def _submit_store(
        self, layer: int, part: PassPart, blocks: Sequence[PromptBlock], staged: StagedLayer | None
    ) -> None:
        if staged is not None:
            self._staged.acquire()
        storing = self._storing.submit(self._store, layer, part, blocks, staged)
        part.storing.append(storing)
        if self._window is not None:
            self._last_stores[layer % self._window] = storing

    async def stores_end(self) -> None:
        """Wait for the end of all stores that have been launched."""
        await asyncio.wrap_future(self._storing.submit(lambda: None))

    def close(self) -> None:
        """End the threads after the last pass. Waits for all launched loads and stores."""
        self._loading.shutdown()
        self._storing.shutdown()

    def _load(
        self, layer: int, parts: Sequence[PassPart], free: Mark, last_store: Future[None] | None
    ) -> list[Mark]:
        if last_store is not None:
            wait([last_store])  # the prompt of the store reports a failure
        marks = []
        for part in parts:
            if not part.await_pool(layer):
                part.is_dropped = True
                continue
            loaded = self._copies.load(layer, part.loads, free)
            marks.append(loaded.mark)
            if loaded.damaged:
                part.damaged_pages += loaded.damaged
                part.is_dropped = True
        return marks

    def _store(
        self, layer: int, part: PassPart, blocks: Sequence[PromptBlock], staged: StagedLayer | None
    ) -> None:
        try:
            checksums = self._copies.store(layer, blocks, staged)
        finally:
            if staged is not None:
                self._staged.release()
        if self._window is not None:
            for block, checksum in zip(blocks, checksums, strict=True):
                block.keep_checksum(layer, checksum)
        part.on_stored(layer, blocks, checksums)


class _AtOnce(Executor):
    """An executor that runs each call before `submit` returns."""

    def submit(self, call: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(call(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - the caller of `result` gets it, as from a thread
            done.set_exception(error)
        return done
