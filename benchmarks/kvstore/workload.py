"""The workload that every store gets: blocks of one size, visited in turn, timed call by call.

Needs only numpy: the peer's driver runs it in another virtual environment.

Owns: the blocks and the clock. Does not know: which store it measures.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

WORKING_SET_BYTES = 128 << 20
"""Bytes of the sources, of the destinations, and of a store: each is several times an L3 cache."""
LINE_BYTES = 64
"""Bytes of a line of a cache."""
_FILL_BYTES = 2 << 20  # in one call; a system call takes up to 1024 pieces

Op = Literal["put", "get", "exists", "lease"]
Bytes = npt.NDArray[np.uint8]


class Store(Protocol):
    """The interface of a measured store. Blocks are named by their index. Every call raises unless all of its
    work is done."""

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        """Become an empty store for blocks of this size. Both arrays are `(num_blocks, block_bytes)`."""

    def remove(self, indices: Sequence[int]) -> None: ...

    def put(self, indices: Sequence[int]) -> None: ...

    def get(self, indices: Sequence[int]) -> None: ...


class Ring:
    """Blocks in turn."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._next = 0

    def time(
        self,
        call: Callable[[Sequence[int]], object],
        depth: int,
        budget_s: float,
        before: Callable[[Sequence[int]], object] = lambda indices: None,
    ) -> list[float]:
        """Return the seconds of each call of `depth` blocks: as many calls as begin within the budget, at
        least one.

        `before` is called before each of them and is not timed, but does use up the budget.
        """
        times_s: list[float] = []
        for indices in self.turns(depth, budget_s, times_s, before):
            call(indices)
        return times_s

    def turns(
        self,
        depth: int,
        budget_s: float,
        times_s: list[float],
        before: Callable[[Sequence[int]], object] = lambda indices: None,
    ) -> Iterator[list[int]]:
        """Time calls that are awaited, as `time` does: each lasts until the next one is asked for."""
        deadline_s = time.perf_counter() + budget_s
        while not times_s or time.perf_counter() < deadline_s:
            indices = [(self._next + i) % self.num_blocks for i in range(depth)]
            self._next = (self._next + depth) % self.num_blocks
            before(indices)
            started_s = time.perf_counter()
            yield indices
            times_s.append(time.perf_counter() - started_s)


class KeyStore(Protocol):
    """The interface of a store that only answers whether a block is there."""

    def exists(self, indices: Sequence[int]) -> None: ...


class Lookups:
    """A key store under work."""

    def __init__(self, store: KeyStore, num_blocks: int) -> None:
        self._store = store
        self._ring = Ring(num_blocks)

    def time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        """Return the seconds of each call, as `Ring.time` does. `op` is "exists"."""
        assert op == "exists"
        return self._ring.time(self._store.exists, depth, budget_s)


class Memory:
    """The caller's blocks. A benchmark's stores share one, a peer's driver has its own."""

    SIZE_BYTES = 2 * WORKING_SET_BYTES

    def __init__(self, buffer: Bytes | None = None, offset: int | None = None) -> None:
        """Place blocks in `buffer` of SIZE_BYTES, the sources first, or in new memory.

        There destinations begin `offset` bytes behind the start of a cache's line (default: as it comes).
        """
        if buffer is None:
            buffer = np.empty(self.SIZE_BYTES + 2 * LINE_BYTES, np.uint8)
            start = 0 if offset is None else -buffer.ctypes.data % LINE_BYTES + offset
            buffer = buffer[start : start + self.SIZE_BYTES]
        self.sources, self.destinations = buffer[:WORKING_SET_BYTES], buffer[WORKING_SET_BYTES:]
        self.sources[:] = np.random.default_rng(0).integers(0, 256, WORKING_SET_BYTES, np.uint8)
        self.destinations[:] = 0


class Workload:
    """One store under work. `open` first."""

    def __init__(self, store: Store, memory: Memory) -> None:
        self._store = store
        self._memory = memory

    def open(self, block_bytes: int) -> None:
        """Put and get every block of this size once, and compare them."""
        sources, destinations = self._memory.sources, self._memory.destinations
        self._store.open(sources.reshape(-1, block_bytes), destinations.reshape(-1, block_bytes))
        self._ring = Ring(len(sources) // block_bytes)
        destinations[:] = 0
        depth = max(1, _FILL_BYTES // block_bytes)
        for call in (self._store.put, self._store.get):
            for start in range(0, self._ring.num_blocks, depth):
                call(range(start, min(start + depth, self._ring.num_blocks)))
        if not np.array_equal(sources, destinations):
            raise RuntimeError(f"blocks of {block_bytes} bytes came back changed")

    def time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        """Return the seconds of each call, as `Ring.time` does."""
        call = getattr(self._store, op)
        if op == "put":
            return self._ring.time(call, depth, budget_s, self._store.remove)
        return self._ring.time(call, depth, budget_s)
