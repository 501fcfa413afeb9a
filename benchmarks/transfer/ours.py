"""Our transfer engines, by transport.

Owns: how our messengers are started for a benchmark. Does not know: what they are compared with.
"""

import asyncio
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np

from benchmarks.store.workload import WORKING_SET_BYTES, Memory
from benchmarks.transfer.ours_driver import GRANT, INSTANCE, SLICE_BYTES, identity, shared_memory
from benchmarks.transfer.work import Direction, Engine, Pair
from messenger.checksums import CHECKSUM_BYTES, layer_checksums, prepare
from messenger.identity import host_id
from messenger.listening import listening_loop
from messenger.peer import Peer
from messenger.peers import Peers
from messenger.protocol import WriteEntry
from messenger.rdma.cards import Cards
from messenger.requests import Outcome, Urgency
from messenger.transports import SourceSegment, Traffic
from mooncake.errors import TransferError
from mooncake.keys import ClusterKey
from mooncake.pools import MessengerAddress
from mooncake.sections import MessengerConfig

Transport = Literal["tcp", "shm"]
Start = Callable[[], AbstractContextManager[Engine]]
"""both processes are up and connected inside of it"""


_NUM_TURNS = 3
"""of the event loop, until all requests of a transfer have been submitted"""
_NUM_FETCHES = 4
"""of one call that are under way at the same time"""


class _Batch:
    """Blocks that are moved together, as those of one prompt are. Each is told of by itself."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.task: asyncio.Task[None] | None = None
        """that moves them, if nobody waits for all of them"""
        self.num_missing = num_blocks
        self._missing_bytes = [block_bytes] * num_blocks
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Who waits looks again."""
        self._changed.set()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def arrived(self, index: int, num_bytes: int) -> None:
        """So much more of that block."""
        self._missing_bytes[index] -= num_bytes
        if not self._missing_bytes[index]:
            self.num_missing -= 1
            self.wake()

    async def block(self, index: int) -> None:
        """Until it is there. Raises what kept it away."""
        assert self.task is not None
        while self._missing_bytes[index]:
            if self.task.done():
                self.task.result()
            await self.changed()


class MessengerEngine:
    """A messenger's sending half in this process, on an event loop that runs while a call waits."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peers: Mapping[int, Peer], memory: Memory, buffer: memoryview
    ) -> None:
        self.memory = memory
        self._loop = loop
        self._peers = peers
        self._buffer = buffer
        self._checksums: dict[int, bytes] = {}
        """of all sources, by size of a slice: a pool has them from the one who stored the block"""

    def move(
        self, direction: Direction, pairs: Sequence[Pair], block_bytes: int, *, is_latency: bool
    ) -> None:
        batch = _Batch(len(pairs), block_bytes)
        self._loop.run_until_complete(self._move(batch, direction, pairs, block_bytes, is_latency=is_latency))

    def submit(
        self, direction: Direction, pairs: Sequence[Pair], block_bytes: int
    ) -> list[tuple[_Batch, int]]:
        if not pairs:
            return []
        batch = _Batch(len(pairs), block_bytes)
        batch.task = self._loop.create_task(
            self._move(batch, direction, pairs, block_bytes, is_latency=False)
        )
        batch.task.add_done_callback(lambda _: batch.wake())
        self._loop.run_until_complete(_turns(_NUM_TURNS))
        return [(batch, index) for index in range(len(pairs))]

    def wait(self, transfers: Sequence[tuple[_Batch, int]]) -> None:
        self._loop.run_until_complete(_all(transfers))

    async def _move(
        self,
        batch: _Batch,
        direction: Direction,
        pairs: Sequence[Pair],
        block_bytes: int,
        *,
        is_latency: bool,
    ) -> None:
        slice_bytes = max(size for size in SLICE_BYTES if size <= block_bytes)
        urgency = Urgency.LATENCY if is_latency else Urgency.BULK
        move = self._write if direction == "write" else self._read
        await move(batch, self._peers[slice_bytes], pairs, block_bytes, slice_bytes, urgency)

    async def _write(
        self,
        batch: _Batch,
        peer: Peer,
        pairs: Sequence[Pair],
        block_bytes: int,
        slice_bytes: int,
        urgency: Urgency,
    ) -> None:
        checksums, frame_bytes = self._checksums_of(slice_bytes), peer.frame_bytes(urgency)
        entries = []
        for index, (local, remote) in enumerate(pairs):
            for begin, length in _parts(block_bytes, frame_bytes):
                first = (local * block_bytes + begin) // slice_bytes
                target = (remote * block_bytes + begin) // slice_bytes
                num_slices = length // slice_bytes
                own = checksums[first * CHECKSUM_BYTES : (first + num_slices) * CHECKSUM_BYTES]
                entry = WriteEntry(0, 0, target, target + num_slices, own, first * slice_bytes)
                entries.append((index, entry))

        def done(frame: Sequence[tuple[int, WriteEntry]], outcome: Outcome) -> None:
            if outcome is Outcome.PLACED:
                for index, entry in frame:
                    batch.arrived(index, entry.num_layers * slice_bytes)

        with peer.transfer(GRANT, "benchmark", batch.wake, urgency) as transfer:
            for frame in _frames(entries, slice_bytes, frame_bytes):
                num_bytes = sum(entry.num_layers for _, entry in frame) * slice_bytes
                await transfer.write([entry for _, entry in frame], num_bytes, functools.partial(done, frame))
            while batch.num_missing:
                transfer.check()
                await batch.changed()

    async def _read(
        self,
        batch: _Batch,
        peer: Peer,
        pairs: Sequence[Pair],
        block_bytes: int,
        slice_bytes: int,
        urgency: Urgency,
    ) -> None:
        frame_bytes = peer.frame_bytes(urgency)
        parts = list(_parts(block_bytes, frame_bytes))
        at_once = 1
        if len(parts) == 1:  # several small blocks in one request
            at_once = max(1, frame_bytes // block_bytes)
        requests = [
            self._fetch(
                batch,
                peer,
                range(first, min(first + at_once, len(pairs))),
                pairs,
                block_bytes,
                slice_bytes,
                begin,
                length,
                urgency,
            )
            for first in range(0, len(pairs), at_once)
            for begin, length in parts
        ]
        if len(requests) == 1:
            await requests[0]
            return
        left = iter(requests)

        async def some_of_them() -> None:
            for request in left:
                await request

        await asyncio.gather(*(some_of_them() for _ in range(min(len(requests), _NUM_FETCHES))))

    async def _fetch(
        self,
        batch: _Batch,
        peer: Peer,
        indices: range,
        pairs: Sequence[Pair],
        block_bytes: int,
        slice_bytes: int,
        begin: int,
        length: int,
        urgency: Urgency,
    ) -> None:
        asked = [pairs[index] for index in indices]
        keys = [((remote * block_bytes + begin) // slice_bytes).to_bytes(8, "little") for _, remote in asked]
        starts = [WORKING_SET_BYTES + local * block_bytes + begin for local, _ in asked]
        views = [self._buffer[start : start + length] for start in starts]
        found = await peer.fetch(keys, views, range(length // slice_bytes), urgency)
        if len(found) < len(keys):
            raise TransferError("a block did not come")
        for index in indices:
            batch.arrived(index, length)

    def _checksums_of(self, slice_bytes: int) -> bytes:
        if slice_bytes not in self._checksums:
            self._checksums[slice_bytes] = layer_checksums(self._buffer[:WORKING_SET_BYTES], slice_bytes)
        return self._checksums[slice_bytes]


async def _turns(num_turns: int) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def _all(transfers: Sequence[tuple[_Batch, int]]) -> None:
    for batch, index in transfers:
        await batch.block(index)


def _parts(block_bytes: int, frame_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and length of what one frame takes of a block."""
    for begin in range(0, block_bytes, frame_bytes):
        yield begin, min(frame_bytes, block_bytes - begin)


def _frames(
    entries: Sequence[tuple[int, WriteEntry]], slice_bytes: int, most_bytes: int
) -> Iterator[list[tuple[int, WriteEntry]]]:
    frame: list[tuple[int, WriteEntry]] = []
    frame_bytes = 0
    for index, entry in entries:
        num_bytes = entry.num_layers * slice_bytes
        if frame and frame_bytes + num_bytes > most_bytes:
            yield frame
            frame, frame_bytes = [], 0
        frame.append((index, entry))
        frame_bytes += num_bytes
    yield frame


@contextlib.contextmanager
def _start(transport: Transport) -> Iterator[MessengerEngine]:
    prepare()
    key = ClusterKey.generate()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = [sys.executable, "-m", "benchmarks.transfer.ours_driver", folder, key.to_text()]
        target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(target.wait)
        stack.callback(target.kill)
        assert target.stdout is not None
        places = json.loads(target.stdout.readline())
        fd, buffer = shared_memory(Memory.SIZE_BYTES)
        source = SourceSegment.of(fd, buffer)
        memory = Memory(np.frombuffer(buffer, np.uint8))
        loop = stack.enter_context(asyncio.Runner(loop_factory=listening_loop)).get_loop()
        opened: asyncio.Future[dict[int, Peer]] = loop.create_future()

        async def connect() -> None:
            async with asyncio.TaskGroup() as tasks:
                peers = {}
                for slice_bytes in SLICE_BYTES:
                    unix_path, port = places[str(slice_bytes)]
                    address = MessengerAddress(INSTANCE, 1, host_id(), unix_path, (("127.0.0.1", port),))
                    connections = Peers(
                        tasks,
                        source,
                        Traffic(),
                        identity=identity("source", slice_bytes),
                        key=key,
                        tls=None,
                        settings=MessengerConfig(transport=transport),
                        cards=Cards([]),
                    )
                    peers[slice_bytes] = await connections.peer(address)
                opened.set_result(peers)
                await asyncio.Event().wait()

        task = loop.create_task(connect())
        loop.run_until_complete(asyncio.wait({task, opened}, return_when="FIRST_COMPLETED"))
        stack.callback(task.cancel)
        yield MessengerEngine(loop, opened.result(), memory, buffer)


ENGINES: Mapping[Transport, Start] = {
    "tcp": functools.partial(_start, "tcp"),
    "shm": functools.partial(_start, "shm"),
}
