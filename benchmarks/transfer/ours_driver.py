"""The memory that our messenger writes to and reads from, in a process of its own.

    python -m benchmarks.transfer.ours_driver FOLDER KEY      (says where it listens, ends with its stdin)

What a pool's page table does is done by the simplest thing that keeps its promises: every range may be
written at any time, and is found with the checksums that came with it.

Owns: that memory. Does not know: what is measured.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence

from benchmarks.store.workload import WORKING_SET_BYTES
from messenger.board import BOARD_BYTES, Board
from messenger.checksums import CHECKSUM_BYTES, prepare
from messenger.door import Door, Landing, Readable, Writer, WriteRefused
from messenger.identity import Identity, host_id
from messenger.listening import listening_loop
from messenger.protocol import WriteEntry
from messenger.rdma.cards import Cards
from messenger.rdma.windows import Range
from messenger.receiver import Sessions
from messenger.stream import Stream
from messenger.transports import SourceSegment, Traffic
from mooncake.blocks import KVLayout
from mooncake.keys import ClusterKey
from mooncake.mapping import HUGE_PAGE_BYTES, MappedFile
from mooncake.sections import MessengerConfig

INSTANCE = "target"
GRANT = 1
"""of all of the memory, for ever"""
SLICE_BYTES = (4 << 10, 64 << 10, 256 << 10)
"""checksums are of so much; the largest that fits a block is used"""


def identity(instance: str, slice_bytes: int) -> Identity:
    """The whole memory as one page whose layers are slices."""
    layout = KVLayout(
        num_layers=WORKING_SET_BYTES // slice_bytes,
        num_kv_heads=1,
        head_dim=16,
        block_size=slice_bytes // 64,
        dtype="bfloat16",
    )
    assert layout.layer_bytes == slice_bytes
    return Identity(instance, 1, host_id(), "benchmark", layout)


class Slices:
    """`WriteTarget` and `ReadSource` over the memory."""

    def __init__(self, memory: memoryview, slice_bytes: int) -> None:
        self._memory = memory
        self._slice_bytes = slice_bytes
        self._checksums = bytearray(len(memory) // slice_bytes * CHECKSUM_BYTES)

    def open(self, grant_id: int, writer: Writer) -> None:
        """Everybody may write."""

    def begin(self, grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview:
        end = entry.layer_end * self._slice_bytes
        if not 0 <= entry.layer_begin < entry.layer_end or end > len(self._memory):
            raise WriteRefused("outside the memory")
        return self._memory[entry.layer_begin * self._slice_bytes : end]

    def expose(self, grant_id: int) -> tuple[list[tuple[int, Range]], Callable[[], None]]:
        return [(0, Range(0, len(self._memory)))], lambda: None

    def complete(self, grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
        begin = entry.layer_begin * CHECKSUM_BYTES
        self._checksums[begin : begin + len(entry.checksums)] = entry.checksums
        return False

    def abandon(self, grant_id: int, entry: WriteEntry, heads: range | None) -> None:
        """The next write comes over it."""

    def close(self, grant_id: int, writer: Writer, reason: str | None) -> None:
        """Nobody waits for it."""

    async def lease(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        return self.lease_now(keys, layers, heads)

    def lease_now(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        """A key is the number of a slice."""
        blocks = []
        for index, key in enumerate(keys):
            first = int.from_bytes(key, "little") + layers.start
            begin, end = first * self._slice_bytes, (first + len(layers)) * self._slice_bytes
            checksums = self._checksums[first * CHECKSUM_BYTES : (first + len(layers)) * CHECKSUM_BYTES]
            blocks.append(Readable(index, self._memory[begin:end], begin, bytes(checksums)))
        return blocks, lambda: None


def shared_memory(num_bytes: int) -> tuple[int, memoryview]:
    """Descriptor and mapping of new memory, in huge pages as a pool's segment is after a while."""
    fd = os.memfd_create("benchmark")
    os.posix_fallocate(fd, 0, num_bytes)
    mapping = MappedFile(fd, num_bytes)
    mapping.use_huge_pages(0, num_bytes)
    return fd, mapping.view


async def _accept(listener: socket.socket, sessions: Sessions, tasks: asyncio.TaskGroup) -> None:
    while True:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        tasks.create_task(sessions.serve(Stream(sock)))


async def _serve(folder: str, key: ClusterKey) -> None:
    prepare()
    fd, segment = shared_memory(WORKING_SET_BYTES + HUGE_PAGE_BYTES)
    memory, board = segment[:WORKING_SET_BYTES], Board.at(segment[-BOARD_BYTES:])
    source, landing = SourceSegment.of(fd, segment), None
    if board is not None:
        board.open(GRANT)
        landing = Landing(board, fd, len(segment) - BOARD_BYTES, 0, WORKING_SET_BYTES, 1)
    places: dict[int, tuple[str, int]] = {}
    async with asyncio.TaskGroup() as tasks:
        for slice_bytes in SLICE_BYTES:
            slices = Slices(memory, slice_bytes)
            door = Door(
                identity(INSTANCE, slice_bytes),
                key,
                slices,
                slices,
                source,
                Traffic(),
                MessengerConfig(),
                Cards([]),
                landing,
            )
            sessions = Sessions(door)
            by_memory, by_network = socket.socket(socket.AF_UNIX), socket.socket()
            by_memory.bind(f"{folder}/{slice_bytes}.sock")
            by_network.bind(("127.0.0.1", 0))
            for listener in (by_memory, by_network):
                listener.listen()
                listener.setblocking(False)
                tasks.create_task(_accept(listener, sessions, tasks))
            places[slice_bytes] = (by_memory.getsockname(), by_network.getsockname()[1])
        print(json.dumps(places), flush=True)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(sys.stdin, ended.set)
        await ended.wait()
        os._exit(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=listening_loop) as runner:
        runner.run(_serve(sys.argv[1], ClusterKey.from_text(sys.argv[2])))
