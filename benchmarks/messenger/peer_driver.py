"""The driver of one end of the peer, Mooncake's Transfer Engine. The Python of its environment runs it.

  python peer_driver.py                    the memory that is written and read; prints its address
  python peer_driver.py SESSION ADDRESS    the end that transfers

Both take commands by the protocol of benchmarks/kvstore/commands.py, and end when their stdin does.

This repository has packages of the same names as the peer. So the repository's path comes last, and the
peer's packages are found first.

Owns: the use of the peer's engine. Does not know: the comparison.
"""

import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mooncake.engine import TransferEngine

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kvstore.commands import answer_commands, take_stdout
from benchmarks.kvstore.workload import WORKING_SET_BYTES, Bytes, Memory
from benchmarks.messenger.work import Direction, Pair, Transfers

T = TypeVar("T")


class MooncakeEngine:
    """Registered memory, and the session with the other end."""

    def __init__(self, engine: TransferEngine, session: str, address: int) -> None:
        self.memory = Memory()
        for array in (self.memory.sources, self.memory.destinations):
            _register(engine, array)
        self._session = session
        self._address = address
        self._bases = {
            "write": self.memory.sources.ctypes.data,
            "read": self.memory.destinations.ctypes.data,
        }
        self._one = {"write": engine.transfer_sync_write, "read": engine.transfer_sync_read}
        self._batch = {"write": engine.batch_transfer_sync_write, "read": engine.batch_transfer_sync_read}
        self._start = {"write": engine.batch_transfer_async_write, "read": engine.batch_transfer_async_read}
        self._await = engine.get_batch_transfer_status
        self._under_way: set[int] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work whose calls block until they are done, so that nothing is awaited."""
        try:
            work.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise RuntimeError("somebody waits")

    async def move(
        self, direction: Direction, pairs: Sequence[Pair], block_bytes: int, *, is_latency: bool
    ) -> None:
        """Move blocks. The peer has no classes of transfers, so `is_latency` changes nothing."""
        local, remote = self._addresses(direction, pairs, block_bytes)
        if len(pairs) == 1:
            _expect_0(self._one[direction](self._session, local[0], remote[0], block_bytes))
        else:
            _expect_0(self._batch[direction](self._session, local, remote, [block_bytes] * len(pairs)))

    async def submit(self, direction: Direction, pairs: Sequence[Pair], block_bytes: int) -> list[int]:
        if not pairs:
            return []
        local, remote = self._addresses(direction, pairs, block_bytes)
        batch = self._start[direction](self._session, local, remote, [block_bytes] * len(pairs))
        if batch == 0:
            raise RuntimeError("the peer refused a batch")
        self._under_way.add(batch)
        return [batch] * len(pairs)

    async def wait(self, transfers: Sequence[int]) -> None:
        """Wait for whole batches. Each batch reports its end once."""
        for batch in transfers:
            if batch in self._under_way:
                self._under_way.remove(batch)
                _expect_0(self._await([batch]))

    def _addresses(
        self, direction: Direction, pairs: Sequence[Pair], block_bytes: int
    ) -> tuple[list[int], list[int]]:
        base = self._bases[direction]
        return (
            [base + local * block_bytes for local, _ in pairs],
            [self._address + remote * block_bytes for _, remote in pairs],
        )


def _register(engine: TransferEngine, array: Bytes) -> None:
    _expect_0(engine.register_memory(array.ctypes.data, array.nbytes))


def _expect_0(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the peer answered {code}, expected 0")


def main() -> None:
    """Answer commands until stdin ends."""
    answers = take_stdout()
    engine = TransferEngine()
    _expect_0(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
    if len(sys.argv) == 1:
        memory = np.zeros(WORKING_SET_BYTES, np.uint8)
        _register(engine, memory)
        session = f"127.0.0.1:{engine.get_rpc_port()}"
        answer_commands(answers, (session, memory.ctypes.data), lambda _: memory)
    else:
        transfers = Transfers(MooncakeEngine(engine, sys.argv[1], int(sys.argv[2])))
        answer_commands(answers, None, lambda _: transfers)


if __name__ == "__main__":
    main()
