"""The workload that every store gets: blocks of one size, visited in turn, timed call by call.

The module needs only numpy, as the peer's driver runs it in another virtual environment.

Owns: the blocks and the clock. Does not know: which store is measured.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

WORKING_SET_BYTES = 128 << 20
"""The bytes of all sources, of all destinations, and of a store: several times an L3 cache."""
LINE_BYTES = 64
"""The bytes of a cache line."""
_FILL_BYTES = 2 << 20  # in one call; a system call takes up to 1024 pieces

Op = Literal["put", "get", "exists", "lease"]
Bytes = npt.NDArray[np.uint8]


class Store(Protocol):
    """The interface of a measured store. Blocks are named by their index.

    Every call raises an error if it could not do all of its work.
    """

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        """Become an empty store for blocks of one size. Both arrays are `(num_blocks, block_bytes)`."""

    def remove(self, indices: Sequence[int]) -> None: ...

    def put(self, indices: Sequence[int]) -> None: ...

    def get(self, indices: Sequence[int]) -> None: ...


class Ring:
    """The blocks, visited in turn."""

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
        """Return the seconds of each call. Calls begin until the budget is used up; at least one is made.

        A call has `depth` blocks. `before` is called before each call. Its time is not part of the call's
        time, but of the budget.
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
        """Yield the blocks of each call, and append each call's seconds to `times_s`.

        This is like `time`, but for calls that are awaited: a call lasts until the caller asks for the next
        blocks.
        """
        deadline_s = time.perf_counter() + budget_s
        while not times_s or time.perf_counter() < deadline_s:
            indices = [(self._next + i) % self.num_blocks for i in range(depth)]
            self._next = (self._next + depth) % self.num_blocks
            before(indices)
            started_s = time.perf_counter()
            yield indices
            times_s.append(time.perf_counter() - started_s)


class KeyStore(Protocol):
    """The interface of a store that can only tell whether a block is there."""

    def exists(self, indices: Sequence[int]) -> None: ...


class Lookups:
    """A key store whose look-ups are timed."""

    def __init__(self, store: KeyStore, num_blocks: int) -> None:
        self._store = store
        self._ring = Ring(num_blocks)

    def time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        """Return the seconds of each call, like `Ring.time`. `op` must be "exists"."""
        assert op == "exists"
        return self._ring.time(self._store.exists, depth, budget_s)


class Memory:
    """The caller's blocks. All stores of a benchmark share one memory; a peer's driver has its own."""

    SIZE_BYTES = 2 * WORKING_SET_BYTES

    def __init__(self, buffer: Bytes | None = None, offset: int | None = None) -> None:
        """Place the blocks in `buffer` of SIZE_BYTES, sources first, or in new memory.

        In new memory the destinations begin `offset` bytes behind the start of a cache line; None for any
        offset.
        """
        if buffer is None:
            buffer = np.empty(self.SIZE_BYTES + 2 * LINE_BYTES, np.uint8)
            start = 0 if offset is None else -buffer.ctypes.data % LINE_BYTES + offset
            buffer = buffer[start : start + self.SIZE_BYTES]
        self.sources, self.destinations = buffer[:WORKING_SET_BYTES], buffer[WORKING_SET_BYTES:]
        self.sources[:] = np.random.default_rng(0).integers(0, 256, WORKING_SET_BYTES, np.uint8)
        self.destinations[:] = 0


class Workload:
    """One store whose calls are timed. `open` must be called first."""

    def __init__(self, store: Store, memory: Memory) -> None:
        self._store = store
        self._memory = memory

    def open(self, block_bytes: int) -> None:
        """Put and get every block of this size once, and check that the bytes are equal."""
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
        """Return the seconds of each call, like `Ring.time`."""
        call = getattr(self._store, op)
        if op == "put":
            return self._ring.time(call, depth, budget_s, self._store.remove)
        return self._ring.time(call, depth, budget_s)
