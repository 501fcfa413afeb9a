"""Copies of whole blocks between device and pool, made while iterations run.

Sequences that join the batch, are sealed or are preempted need such copies. No iteration writes the pages
that are copied, and no iteration reads a page that is being loaded. So copies and iterations do not wait for
each other.

Owns: a thread for loads and one for stores. Does not know: the sequences of the blocks.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.execution.jobs import wait_to_end
from workers.kvcache.copies import LayerCopies, Mark

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block in a device page and in a pool page of one rank."""

    device_page: int
    pool_page: int

    def stored_checksum(self, layer: int) -> int | None:
        """Return None, because only committed blocks are loaded here, and the pool has their checksums."""
        return None


class BlockTransfers:
    """The copies of whole blocks between device and pool.

    A cancelled call returns when its copy has ended; `load` and `store` then copy no further layer. While
    transfers are `paused`, calls wait.
    """

    def __init__(self, copies: LayerCopies, kv: DeviceKVCache) -> None:
        self._copies = copies
        self._kv = kv
        self._quiet = copies.mark()  # earlier computations with the pages have been waited for
        self._loading = ThreadPoolExecutor(1, "kvcache-join")
        self._storing = ThreadPoolExecutor(1, "kvcache-seal")
        self._num_running = 0
        self._may_run, self._none_runs = asyncio.Event(), asyncio.Event()
        self._may_run.set()
        self._none_runs.set()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Make a context in which no copy runs. Entry waits for running copies."""
        self._may_run.clear()
        try:
            await self._none_runs.wait()
            yield
        finally:
            self._may_run.set()

    async def load(self, blocks: Sequence[BlockPair]) -> list[int]:
        """Copy blocks from the pool to the device. Returns the pool pages whose checksums are wrong."""

        def work(is_given_up: threading.Event) -> list[int]:
            damaged: set[int] = set()
            newest: Mark = None
            try:
                for layer in self._kv.layers:
                    if is_given_up.is_set():
                        break
                    loaded = self._copies.load(layer, blocks, self._quiet)
                    damaged.update(loaded.damaged)
                    if newest is not None:  # one behind: the device takes a layer while the next is copied
                        newest.synchronize()
                    newest = loaded.mark
            finally:  # also after an error, because the caller may then free the pages
                if newest is not None:
                    newest.synchronize()
            return sorted(damaged)

        return await self._on(self._loading, work) if blocks else []

    async def store(self, blocks: Sequence[BlockPair]) -> list[list[int]]:
        """Copy blocks from the device to the pool. Returns the xxh3-64 checksums `[block][layer]`."""

        def work(is_given_up: threading.Event) -> list[list[int]]:
            by_layer = []
            staged = self._copies.stage(self._kv.layers.start, blocks, self._quiet)
            for layer in self._kv.layers:
                if is_given_up.is_set():
                    break
                this, staged = staged, None
                if layer + 1 in self._kv.layers:  # one ahead, as in `load`
                    staged = self._copies.stage(layer + 1, blocks, self._quiet)
                by_layer.append(self._copies.store(layer, blocks, this))
            return [list(checksums) for checksums in zip(*by_layer, strict=True)]

        return await self._on(self._storing, work) if blocks else []

    async def save(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of device pages in host memory, one tensor for each layer."""

        def work(is_given_up: threading.Event) -> list[torch.Tensor]:
            index = torch.tensor(pages, dtype=torch.int64, device=self._kv.device)
            layers = self._kv.layers
            return [self._kv.gather(layer, index).cpu() for layer in layers]

        return await self._on(self._storing, work)

    async def restore(self, pages: Sequence[int], saved: Sequence[torch.Tensor]) -> None:
        """Copy saved pages from host memory to the device pages `pages`."""

        def work(is_given_up: threading.Event) -> None:
            index = torch.tensor(pages, dtype=torch.int64, device=self._kv.device)
            for layer, blocks in zip(self._kv.layers, saved, strict=True):
                self._kv.scatter(layer, index, blocks.to(self._kv.device))
            if self._kv.device.type == "cuda":
                torch.cuda.current_stream(self._kv.device).synchronize()

        await self._on(self._loading, work)

    def close(self) -> None:
        """Refuse further calls. A running copy may end later."""
        self._loading.shutdown(wait=False)
        self._storing.shutdown(wait=False)

    async def _on(self, thread: ThreadPoolExecutor, work: Callable[[threading.Event], T]) -> T:
        given_up = threading.Event()
        while not self._may_run.is_set():
            await self._may_run.wait()
        self._num_running += 1
        self._none_runs.clear()
        try:
            ended = asyncio.get_running_loop().run_in_executor(thread, work, given_up)
            return await wait_to_end(ended, on_cancel=given_up.set)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._none_runs.set()
