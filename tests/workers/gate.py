"""Copies between device and pool that stop where a test wants them to."""

import asyncio
import threading
from collections.abc import Sequence

from kvstore.segment import Segment
from tests.kvstore.nodes import DEADLINE_S
from workers.copies import BlockCopy, Copies, Loaded, Mark, copies_for
from workers.engine.kvcache import DeviceKVCache


class Gate:
    """Copies that stop before the load or store of one layer until they are let through."""

    def __init__(self, *, load: int | None = None, store: int | None = None) -> None:
        self._load, self._store = load, store
        self._reached, self._open = threading.Event(), threading.Event()
        self.stored_layers: list[int] = []
        self.num_marks = 0

    def make(self, kv: DeviceKVCache, segment: Segment) -> Copies:
        gate, real = self, copies_for(kv, segment)

        class Gated:
            def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> Loaded:
                gate._pass(layer == gate._load)
                return real.load(layer, blocks, free)

            def store(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> list[int]:
                gate._pass(layer == gate._store)
                gate.stored_layers.append(layer)
                return real.store(layer, blocks, computed)

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
        """It stops again what comes next."""
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()
