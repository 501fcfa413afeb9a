"""Loads: verified blocks of the pool are copied to the engine's pages, while other requests are computed.

A request is not computed before all blocks of its load are in their pages. Until then no other request can
find these pages. Blocks that cannot be loaded are reported, and computed. A load that takes too long is given
up and writes no page after that, as the engine may give the pages to other requests.

Owns: loads in progress, their deadline. Does not know: requests, how blocks are found.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvstore.client.client import KVCachePool
from kvstore.connectors.vllm.plans import LoadPlan, PlacedBlock, pages_of
from kvstore.connectors.vllm.worker.pages import EnginePages
from mooncake.errors import MooncakeError

_NUM_THREADS = 2
_GROUP_BYTES = 32 << 20
"""The most bytes of layers that one call copies, unless a single layer of all blocks is more.

Between two calls a load waits for Python's interpreter lock, which the engine's loop keeps busy.
"""
_GRACE_S = 5.0
_SLOW_BYTES_PER_S = 50e6
"""Bytes a second below which a load is given up."""


class _Running:
    """A load in progress.

    `num_loaded`: leading blocks that are in their pages; None until the load has ended.
    """

    def __init__(self, load: LoadPlan, deadline_s: float) -> None:
        self.load, self.deadline_s = load, deadline_s
        self.num_loaded: int | None = None
        self.is_given_up = False
        self.writing = threading.Lock()

    def give_up(self) -> None:
        """Stop the load, and wait until it writes no page any more."""
        with self.writing:
            self.is_given_up = True
        self.num_loaded = 0

    @property
    def missing_pages(self) -> set[int]:
        return pages_of(self.load.blocks[self.num_loaded :])


class WorkerLoads:
    """The loads of one worker. The engine's thread calls `begin` and `take_finished`."""

    def __init__(self, pool: KVCachePool, pages: EnginePages) -> None:
        self._pool, self._pages = pool, pages
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "mooncake-load")
        self._running: list[_Running] = []

    def begin(self, load: LoadPlan) -> None:
        num_bytes = len(load.blocks) * self._pages.layout.block_bytes
        running = _Running(load, time.monotonic() + _GRACE_S + num_bytes / _SLOW_BYTES_PER_S)
        self._running.append(running)
        self._threads.submit(self._run, running)

    def take_finished(self) -> tuple[set[str], set[int]]:
        """Return the requests whose loads have ended since the last call, and the pages left unfilled.

        The call gives up loads whose deadline has passed.
        """
        now_s = time.monotonic()
        for running in self._running:
            if running.num_loaded is None and now_s > running.deadline_s:
                running.give_up()
        ended = [running for running in self._running if running.num_loaded is not None]
        self._running = [running for running in self._running if running not in ended]  # more may end now
        return (
            {running.load.request_id for running in ended},
            set().union(*(running.missing_pages for running in ended)),
        )

    def close(self) -> None:
        for running in self._running:
            running.give_up()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, running: _Running) -> None:
        num_loaded = 0
        try:
            num_loaded = self._load(running)
        except MooncakeError:
            pass  # the client has logged the reason; the blocks are computed
        finally:
            if not running.is_given_up:
                running.num_loaded = num_loaded

    def _load(self, running: _Running) -> int:
        """Load the leading blocks that are stored, and return their number; 0 if the load is given up."""
        blocks = running.load.blocks
        layout = self._pages.layout
        for layers in _groups(len(blocks), layout.layer_bytes, layout.num_layers):
            staged = np.empty((len(blocks), len(layers), layout.layer_bytes), np.uint8)
            buffers = [staged[number].reshape(-1).data for number in range(len(blocks))]
            is_there = self._pool.get([block.key for block in blocks], buffers, layers)
            if not all(is_there):
                blocks = blocks[: is_there.index(False)]  # blocks after a missing one are of no use
            if not blocks or not self._write(running, layers, blocks, staged[: len(blocks)]):
                return 0
        return len(blocks)

    def _write(
        self,
        running: _Running,
        layers: range,
        blocks: list[PlacedBlock],
        staged: "np.ndarray[Any, np.dtype[np.uint8]]",
    ) -> bool:
        with running.writing:
            if running.is_given_up:
                return False
            self._pages.scatter(layers, blocks, staged)
        return True


def _groups(num_blocks: int, layer_bytes: int, num_layers: int) -> list[range]:
    stride = max(1, _GROUP_BYTES // (num_blocks * layer_bytes))
    return [range(start, min(start + stride, num_layers)) for start in range(0, num_layers, stride)]
