"""The pool's index alone, in this process.

  python -m benchmarks.kvstore.index NUM_BLOCKS       (memory and time per block, one JSON line)

Owns: how the index is filled and asked. Does not know: bytes of blocks, sockets.
"""

import gc
import json
import os
import time
from collections.abc import Sequence

from benchmarks.tools.arguments import counts
from kvstore.pool.pages import PageTable, table_bytes
from kvstore.pool.pool import Pool
from mooncake.messages.blocks import KEY_BYTES, BlockKey

_NUM_LAYERS = 8
_CHECKSUMS = bytes(8 * _NUM_LAYERS)
_BATCH = 1000


class Index:
    """A pool of `num_blocks` pages. Its blocks are sealed one batch after the other."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = Pool(PageTable.in_memory(num_blocks, _NUM_LAYERS))

    def seal(self, keys: Sequence[BlockKey]) -> None:
        reservation = self._pool.reserve(1, keys, 0)
        for block in reservation.blocks:
            self._pool.record_arrival(block, range(_NUM_LAYERS), _CHECKSUMS)
        self._pool.release(reservation.reservation_id)

    def exists(self, keys: Sequence[BlockKey]) -> None:
        if None in self._pool.locate(keys):
            raise RuntimeError("a block that was sealed is missing")


class IndexKeys:
    """The index as a store that can only tell whether a block is there."""

    def __init__(self, num_blocks: int) -> None:
        self._keys = [os.urandom(KEY_BYTES) for _ in range(num_blocks)]
        self._index = Index(num_blocks)
        self._index.seal(self._keys)

    def exists(self, indices: Sequence[int]) -> None:
        self._index.exists([self._keys[i] for i in indices])


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident bytes of a process."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(num_blocks: int) -> dict[str, float]:
    """Measure the index with this number of blocks.

    Returns the bytes per block in the process and in the segment (the page table), and the blocks sealed a
    second.
    """
    before_bytes = resident_bytes()
    index = Index(num_blocks)
    elapsed_s = 0.0
    for start in range(0, num_blocks, _BATCH):
        keys = [os.urandom(KEY_BYTES) for _ in range(min(_BATCH, num_blocks - start))]
        started_s = time.perf_counter()
        index.seal(keys)
        elapsed_s += time.perf_counter() - started_s
    gc.collect()
    segment_bytes = table_bytes(num_blocks, _NUM_LAYERS)
    return {
        "process_bytes": (resident_bytes() - before_bytes - segment_bytes) / num_blocks,
        "segment_bytes": segment_bytes / num_blocks,
        "sealed_per_s": num_blocks / elapsed_s,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*counts(__spec__.name, "NUM_BLOCKS"))))
