"""The driver of one client of the peer, Mooncake Store. The Python of the peer's environment runs it.

    python mooncake_store_driver.py MASTER_ADDRESS SEGMENT_BYTES    (JSON lines: commands in, answers out)

This repository has packages of the same names as the peer. So only modules of this folder may be imported
here.

Owns: the use of the peer's client. Does not know: the comparison.
"""

import functools
import sys
import time
from collections.abc import Sequence

from commands import answer_commands, take_stdout
from workload import Bytes, Memory, Workload

from mooncake.store import MooncakeDistributedStore

_NO_LOCAL_BUFFER = 0
_FORCE = True  # also objects that were read a moment ago


class MooncakeStore:
    """The peer as a store, with registered memory.

    One block uses `put_from` and `get_into`; several blocks use their batch forms.
    """

    def __init__(self, master: str, segment_bytes: int) -> None:
        self._client = MooncakeDistributedStore()
        code = self._client.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment_bytes, _NO_LOCAL_BUFFER, "tcp", "", master
        )
        _expect([0], [code])

    def register(self, memory: Memory) -> None:
        for array in (memory.sources, memory.destinations):
            _expect([0], [self._client.register_buffer(array.ctypes.data, array.nbytes)])

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        self._client.remove_all(_FORCE)
        self._block_bytes = sources.shape[1]
        self._sources = [block.ctypes.data for block in sources]
        self._destinations = [block.ctypes.data for block in destinations]
        self._keys = [f"{i:032x}" for i in range(len(sources))]

    def remove(self, indices: Sequence[int]) -> None:
        _expect([0] * len(indices), self._client.batch_remove([self._keys[i] for i in indices], _FORCE))

    def put(self, indices: Sequence[int]) -> None:
        if len(indices) == 1:
            i = indices[0]
            codes = [self._client.put_from(self._keys[i], self._sources[i], self._block_bytes)]
        else:
            keys, sources = [self._keys[i] for i in indices], [self._sources[i] for i in indices]
            codes = self._client.batch_put_from(keys, sources, [self._block_bytes] * len(indices))
        _expect([0] * len(indices), codes)

    def get(self, indices: Sequence[int]) -> None:
        sizes = [self._block_bytes] * len(indices)
        if len(indices) == 1:
            i = indices[0]
            codes = [self._client.get_into(self._keys[i], self._destinations[i], self._block_bytes)]
        else:
            keys, destinations = [self._keys[i] for i in indices], [self._destinations[i] for i in indices]
            codes = self._client.batch_get_into(keys, destinations, sizes)
        _expect(sizes, codes)

    def exists(self, indices: Sequence[int]) -> None:
        if len(indices) == 1:
            codes = [self._client.is_exist(self._keys[indices[0]])]
        else:
            codes = self._client.batch_is_exist([self._keys[i] for i in indices])
        _expect([1] * len(indices), codes)

    def put_many(self, num_keys: int) -> float:
        """Put `num_keys` objects of one byte in batches, and return the seconds."""
        source, batch, elapsed_s = self._sources[0], 1000, 0.0
        for start in range(0, num_keys, batch):
            keys = [f"many-{i:027x}" for i in range(start, min(start + batch, num_keys))]
            sizes = [1] * len(keys)
            started_s = time.perf_counter()
            codes = self._client.batch_put_from(keys, [source] * len(keys), sizes)
            elapsed_s += time.perf_counter() - started_s
            _expect([0] * len(keys), codes)
        return elapsed_s


def _expect(expected: Sequence[int], codes: Sequence[int]) -> None:
    if list(expected) != list(codes):
        raise RuntimeError(f"the peer answered {codes[:4]}, expected {expected[:4]}")


def main() -> None:
    """Answer commands until stdin ends."""
    answers = take_stdout()
    store = MooncakeStore(sys.argv[1], int(sys.argv[2]))

    @functools.cache
    def workload() -> Workload:
        memory = Memory()
        store.register(memory)
        return Workload(store, memory)

    answer_commands(answers, None, lambda name: store if name == "put_many" else workload())


if __name__ == "__main__":
    main()
