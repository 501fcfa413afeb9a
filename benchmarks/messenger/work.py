"""The workload that every transfer engine gets, timed call by call.

The module needs only numpy, as the peer's driver runs it in another virtual environment.

Owns: which block goes where, which transfers are in flight at the same time. Does not know: which engine is
measured.
"""

import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from benchmarks.kvstore.workload import WORKING_SET_BYTES, Bytes, Memory, Op, Ring, Workload

CONCURRENT_BYTES = 64 << 20
"""The bytes of all transfers that are in flight at the same time."""
LATENCY_BYTES = 1 << 20
BULK_BYTES = 4 << 20
NUM_BULK = 16
"""The bulk transfers in flight. When a latency transfer starts, half of them have just begun."""

Direction = Literal["write", "read"]
Pair = tuple[int, int]
"""A block of the local memory, and a block of the remote memory of the same size."""
T = TypeVar("T")


class Engine(Protocol):
    """The interface of a measured engine.

    The engine is in this process. Another process has WORKING_SET_BYTES of memory to write and read. Every
    pair is one block. Writes take it from `memory.sources`, reads put it into `memory.destinations`. A call
    returns when all of its bytes have arrived. It raises an error if some did not.
    """

    memory: Memory
    """The local memory, which the engine makes.

    Some engines need a buffer of their own, or registered memory.
    """

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's event loop, if it has one. `work` may await the other methods."""

    async def move(
        self, direction: Direction, pairs: Sequence[Pair], block_bytes: int, *, is_latency: bool
    ) -> None:
        """Move blocks as one batch: all of them are in flight at the same time."""

    async def submit(self, direction: Direction, pairs: Sequence[Pair], block_bytes: int) -> Sequence[Any]:
        """Start a batch of bulk transfers, one for each block, and return them.

        At least 64 transfers can be in flight.
        """

    async def wait(self, transfers: Sequence[Any]) -> None:
        """Wait until submitted transfers have ended. Each transfer must be waited for once, in any order."""


class Transfers:
    """One engine whose calls are timed. A put of the workload is a write, a get is a read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._workload = Workload(_Blocks(engine), engine.memory)

    def open(self, block_bytes: int) -> None:
        """Write and read every block of this size once, and check that the bytes are equal."""
        self._workload.open(block_bytes)
        self._block_bytes = block_bytes
        self._pairs = _scattered(block_bytes)
        self._ring = Ring(len(self._pairs))

    def time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        """Return the seconds of each batch of `depth` blocks, like `Ring.time`."""
        return self._engine.run(self._time(op, depth, budget_s))

    async def _time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        direction, times_s = _direction(op), list[float]()
        for indices in self._ring.turns(depth, budget_s, times_s):
            pairs = [self._pairs[i] for i in indices]
            await self._engine.move(direction, pairs, self._block_bytes, is_latency=depth == 1)
        return times_s

    def time_concurrent(self, op: Op, num_transfers: int, budget_s: float) -> list[float]:
        """Return the seconds that CONCURRENT_BYTES take as `num_transfers` transfers that start together."""
        return self._engine.run(self._time_concurrent(op, num_transfers, budget_s))

    async def _time_concurrent(self, op: Op, num_transfers: int, budget_s: float) -> list[float]:
        block_bytes = CONCURRENT_BYTES // num_transfers
        pairs, direction, times_s = _scattered(block_bytes), _direction(op), list[float]()
        for indices in Ring(len(pairs)).turns(num_transfers, budget_s, times_s):
            transfers = await self._engine.submit(direction, [pairs[i] for i in indices], block_bytes)
            await self._engine.wait(transfers)
        return times_s

    def time_latency(self, op: Op, num_bulk: int, budget_s: float) -> tuple[list[float], float]:
        """Time transfers of LATENCY_BYTES, one after the other, beside `num_bulk` transfers of BULK_BYTES.

        Returns the seconds of each latency transfer, and the bytes a second of the bulk transfers.
        """
        return self._engine.run(self._time_latency(op, num_bulk, budget_s))

    async def _time_latency(self, op: Op, num_bulk: int, budget_s: float) -> tuple[list[float], float]:
        # Latency and bulk use separate halves of both memories: two writes to one place would mix bytes.
        half = WORKING_SET_BYTES // 2
        latency_pairs = _scattered(LATENCY_BYTES, half)
        num_skipped = half // BULK_BYTES
        bulk_pairs = [(a + num_skipped, b + num_skipped) for a, b in _scattered(BULK_BYTES, half)]
        direction, bulk, num_finished = _direction(op), deque[Any](), 0
        times_s: list[float] = []
        begun_s = time.perf_counter()
        while not times_s or time.perf_counter() < begun_s + budget_s:
            while bulk and len(bulk) > num_bulk // 2:
                await self._engine.wait([bulk.popleft()])
                num_finished += 1
            fresh = range(num_finished + len(bulk), num_finished + num_bulk)
            bulk += await self._engine.submit(
                direction, [bulk_pairs[n % len(bulk_pairs)] for n in fresh], BULK_BYTES
            )
            pair = latency_pairs[len(times_s) % len(latency_pairs)]
            started_s = time.perf_counter()
            await self._engine.move(direction, [pair], LATENCY_BYTES, is_latency=True)
            times_s.append(time.perf_counter() - started_s)
        num_finished += len(bulk)
        await self._engine.wait(bulk)
        return times_s, num_finished * BULK_BYTES / (time.perf_counter() - begun_s)


class _Blocks:
    """An engine as a store of the workload."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        self._block_bytes = sources.shape[1]
        self._pairs = _scattered(self._block_bytes)

    def remove(self, indices: Sequence[int]) -> None:
        """Do nothing, as the next put overwrites the blocks."""

    def put(self, indices: Sequence[int]) -> None:
        self._move("write", indices)

    def get(self, indices: Sequence[int]) -> None:
        self._move("read", indices)

    def _move(self, direction: Direction, indices: Sequence[int]) -> None:
        pairs = [self._pairs[i] for i in indices]
        self._engine.run(self._engine.move(direction, pairs, self._block_bytes, is_latency=False))


def _direction(op: Op) -> Direction:
    return "write" if op == "put" else "read"


def _scattered(block_bytes: int, size_bytes: int = WORKING_SET_BYTES) -> list[Pair]:
    """Return every local block with its remote block. Neighbours are scattered, as in a paged pool."""
    places = np.random.default_rng(1).permutation(size_bytes // block_bytes)
    return list(enumerate(places.tolist()))
