"""Copies between device and pool, and iterations of a batch, that stop where a test wants them to."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

from kvstore.pool.segment import Segment
from tests.kvstore.nodes import DEADLINE_S
from workers.engine.batch import Batch
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.execution.draws import Drawn, Draws
from workers.execution.executor import Executor
from workers.kvcache.copies import BlockCopy, LayerCopies, LoadedLayer, Mark, StagedLayer, copies_for


class Gate:
    """Copies that stop before the load or store of one layer, until the test lets them go on."""

    def __init__(self, *, load: int | None = None, store: int | None = None) -> None:
        self._load, self._store = load, store
        self._reached, self._open = threading.Event(), threading.Event()
        self.stored_layers: list[int] = []
        self.num_marks = 0

    def make(self, kv: DeviceKVCache, segment: Segment) -> LayerCopies:
        gate, real = self, copies_for(kv, segment)

        class Gated:
            def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
                gate._pass(layer == gate._load)
                return real.load(layer, blocks, free)

            def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> StagedLayer | None:
                return real.stage(layer, blocks, computed)

            def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
                gate._pass(layer == gate._store)
                gate.stored_layers.append(layer)
                return real.store(layer, blocks, staged)

            def mark(self) -> Mark:
                gate.num_marks += 1
                return real.mark()

            def wait(self, mark: Mark) -> None:
                real.wait(mark)

        return Gated()

    def _pass(self, is_closed: bool) -> None:
        if is_closed:
            self._reached.set()
            assert self._open.wait(DEADLINE_S)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, DEADLINE_S)

    def close(self) -> None:
        """Make the gate stop the next copy again."""
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


class Brake:
    """A brake that stops the iterations of a batch, so that none ends before the work of other processes."""

    def __init__(self, executor: Executor) -> None:
        self._decode, self._is_off, self._holds = executor.decode, threading.Event(), threading.Event()
        self._is_off.set()
        executor.decode = self._decode_when_off  # type: ignore[method-assign]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Make a context in which no iteration begins. One may be in flight."""
        self._holds.clear()
        self._is_off.clear()
        try:
            yield
        finally:
            self._is_off.set()

    async def holds(self) -> None:
        """Wait until an iteration is held up, and none before it runs."""
        assert await asyncio.to_thread(self._holds.wait, DEADLINE_S)

    def _decode_when_off(self, batch: Batch, draws: Draws) -> Drawn:
        if not self._is_off.is_set():
            self._holds.set()
        assert self._is_off.wait(DEADLINE_S)
        return self._decode(batch, draws)
