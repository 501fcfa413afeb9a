"""Our transfer engines, one for each transport.

Owns: how our messengers are started for a benchmark. Does not know: the comparison.
"""

import asyncio
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np

from benchmarks.kvstore.workload import WORKING_SET_BYTES, Memory
from benchmarks.messenger.ours_driver import (
    GRANT,
    INSTANCE,
    PAGE_BYTES,
    event_loop,
    identity,
    key,
    shared_memory,
    slice_bytes_of,
)
from benchmarks.messenger.work import Direction, Engine, Pair
from messenger.rdma.cards import Cards
from messenger.sender.outgoing_session import OutgoingSession
from messenger.sender.outgoing_sessions import OutgoingSessions
from messenger.sender.requests import Urgency, WriteOutcome
from messenger.transport.source import SourceSegment
from messenger.transport.transports import Traffic
from messenger.wire import checksums
from messenger.wire.checksums import CHECKSUM_BYTES, layer_checksums
from messenger.wire.identity import host_id
from messenger.wire.messages import WriteEntry
from mooncake.config.sections import MessengerConfig
from mooncake.errors import TransferError
from mooncake.messages.pools import MessengerAddress
from mooncake.security.keys import ClusterKey

T = TypeVar("T")
Transport = Literal["tcp", "shm"]
Start = Callable[[], AbstractContextManager[Engine]]
"""A function that starts an engine. Inside its context both processes are up and connected."""


_NUM_TURNS = 3
"""The number of event loop turns until all requests of a transfer have been submitted."""
_NUM_FETCHES = 4
"""The number of fetches of one call that are in flight at the same time."""


class _Batch:
    """Blocks that are moved together, like those of a prompt. Each block's arrival is reported by itself."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.task: asyncio.Task[None] | None = None
        """The task that moves the blocks; None if the caller itself waits for all blocks."""
        self.num_missing = num_blocks
        self._missing_bytes = [block_bytes] * num_blocks
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Wake the waiters. They then check their condition again."""
        self._changed.set()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def arrived(self, index: int, num_bytes: int) -> None:
        """Record that `num_bytes` more of a block have arrived."""
        self._missing_bytes[index] -= num_bytes
        if not self._missing_bytes[index]:
            self.num_missing -= 1
            self.wake()

    def placed(
        self, frame: Sequence[tuple[int, WriteEntry]], slice_bytes: int, outcome: WriteOutcome
    ) -> None:
        """Record the outcome of a write."""
        if outcome is WriteOutcome.PLACED:
            for index, entry in frame:
                self.arrived(index, entry.num_layers * slice_bytes)

    async def block(self, index: int) -> None:
        """Wait until a block has arrived. Raises the error of the task if the block cannot arrive."""
        assert self.task is not None
        while self._missing_bytes[index]:
            if self.task.done():
                self.task.result()
            await self.changed()


class MessengerEngine:
    """The sending half of a messenger in this process. Its event loop runs only while it is measured."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peers: Mapping[int, OutgoingSession],
        memory: Memory,
        buffer: memoryview,
    ) -> None:
        self.memory = memory
        self._loop = loop
        self._peers = peers
        self._buffer = buffer
        self._checksums: dict[int, bytes] = {}
        """The checksums of all sources, by the size of a slice. A pool stores them with its blocks."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def submit(
        self, direction: Direction, pairs: Sequence[Pair], block_bytes: int
    ) -> list[tuple[_Batch, int]]:
        if not pairs:
            return []
        batch = _Batch(len(pairs), block_bytes)
        batch.task = self._loop.create_task(
            self._move(batch, direction, pairs, block_bytes, is_latency=False)
        )
        batch.task.add_done_callback(lambda _: batch.wake())
        for _ in range(_NUM_TURNS):
            await asyncio.sleep(0)
        return [(batch, index) for index in range(len(pairs))]

    async def wait(self, transfers: Sequence[tuple[_Batch, int]]) -> None:
        for batch, index in transfers:
            await batch.block(index)

    async def move(
        self, direction: Direction, pairs: Sequence[Pair], block_bytes: int, *, is_latency: bool
    ) -> None:
        batch = _Batch(len(pairs), block_bytes)
        await self._move(batch, direction, pairs, block_bytes, is_latency=is_latency)

    async def _move(
        self,
        batch: _Batch,
        direction: Direction,
        pairs: Sequence[Pair],
        block_bytes: int,
        *,
        is_latency: bool,
    ) -> None:
        page_bytes = _page_bytes(block_bytes)
        urgency = Urgency.LATENCY if is_latency else Urgency.BULK
        move = self._write if direction == "write" else self._read
        await move(batch, self._peers[page_bytes], pairs, block_bytes, page_bytes, urgency)

    async def _write(
        self,
        batch: _Batch,
        peer: OutgoingSession,
        pairs: Sequence[Pair],
        block_bytes: int,
        page_bytes: int,
        urgency: Urgency,
    ) -> None:
        slice_bytes, frame_bytes = slice_bytes_of(page_bytes), peer.frame_bytes(urgency)
        checksums = self._checksums_of(slice_bytes)
        entries = []
        for index, (local, remote) in enumerate(pairs):
            for begin, length in _parts(block_bytes, min(frame_bytes, page_bytes)):
                first = (local * block_bytes + begin) // slice_bytes
                own = checksums[first * CHECKSUM_BYTES : (first + length // slice_bytes) * CHECKSUM_BYTES]
                page, layers = _target(remote * block_bytes + begin, length, page_bytes)
                entry = WriteEntry(page, 0, layers.start, layers.stop, own, first * slice_bytes)
                entries.append((index, entry))

        with peer.transfer(GRANT, "benchmark", batch.wake, urgency) as transfer:
            for frame in _frames(entries, slice_bytes, frame_bytes):
                num_bytes = sum(entry.num_layers for _, entry in frame) * slice_bytes
                placed = functools.partial(batch.placed, frame, slice_bytes)
                await transfer.write([entry for _, entry in frame], num_bytes, placed)
            while batch.num_missing:
                transfer.check()
                await batch.changed()

    async def _read(
        self,
        batch: _Batch,
        peer: OutgoingSession,
        pairs: Sequence[Pair],
        block_bytes: int,
        page_bytes: int,
        urgency: Urgency,
    ) -> None:
        frame_bytes = peer.frame_bytes(urgency)
        part_bytes = min(frame_bytes, page_bytes)
        parts = [
            (index, begin) for index in range(len(pairs)) for begin, _ in _parts(block_bytes, part_bytes)
        ]
        # A request is for several pages, or for some layers of one page.
        at_once = frame_bytes // page_bytes or 1
        requests = [
            self._fetch(
                batch, peer, parts[n : n + at_once], pairs, block_bytes, page_bytes, part_bytes, urgency
            )
            for n in range(0, len(parts), at_once)
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
        peer: OutgoingSession,
        parts: Sequence[tuple[int, int]],
        pairs: Sequence[Pair],
        block_bytes: int,
        page_bytes: int,
        part_bytes: int,
        urgency: Urgency,
    ) -> None:
        """Fetch `parts` of blocks. A part is the block's number in `pairs`, and an offset in the block."""
        keys, views, layers = [], [], range(0)
        for index, begin in parts:
            local, remote = pairs[index]
            page, layers = _target(remote * block_bytes + begin, part_bytes, page_bytes)
            keys.append(key(page))
            start = WORKING_SET_BYTES + local * block_bytes + begin
            views.append(self._buffer[start : start + part_bytes])
        found = await peer.fetch(keys, views, layers, urgency)
        if len(found) < len(keys):
            raise TransferError("a block did not come")
        for index, _ in parts:
            batch.arrived(index, part_bytes)

    def _checksums_of(self, slice_bytes: int) -> bytes:
        if slice_bytes not in self._checksums:
            self._checksums[slice_bytes] = layer_checksums(self._buffer[:WORKING_SET_BYTES], slice_bytes)
        return self._checksums[slice_bytes]


@functools.cache
def _page_bytes(block_bytes: int) -> int:
    """Return the size of the pages that hold blocks of this size."""
    return max(size for size in PAGE_BYTES if size <= block_bytes)


@functools.cache
def _parts(block_bytes: int, frame_bytes: int) -> Sequence[tuple[int, int]]:
    """Return the offset and length of each part of a block. A part has at most `frame_bytes` bytes."""
    begins = range(0, block_bytes, frame_bytes)
    return [(begin, min(frame_bytes, block_bytes - begin)) for begin in begins]


def _target(begin: int, num_bytes: int, page_bytes: int) -> tuple[int, range]:
    """Return the page and the layers that have these bytes of the remote memory."""
    page, skipped_bytes = divmod(begin, page_bytes)
    slice_bytes = slice_bytes_of(page_bytes)
    return page, range(skipped_bytes // slice_bytes, (skipped_bytes + num_bytes) // slice_bytes)


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
    checksums.prepare()
    cluster_key = ClusterKey.generate()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = [sys.executable, "-m", "benchmarks.messenger.ours_driver", folder, cluster_key.to_text()]
        target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(target.wait)
        stack.callback(target.kill)
        assert target.stdout is not None
        places = json.loads(target.stdout.readline())
        fd, buffer = shared_memory(Memory.SIZE_BYTES)
        source = SourceSegment.of(fd, buffer)
        memory = Memory(np.frombuffer(buffer, np.uint8))
        loop = stack.enter_context(asyncio.Runner(loop_factory=event_loop)).get_loop()
        opened: asyncio.Future[dict[int, OutgoingSession]] = loop.create_future()

        async def connect() -> None:
            async with asyncio.TaskGroup() as tasks:
                peers = {}
                for page_bytes in PAGE_BYTES:
                    unix_path, port = places[str(page_bytes)]
                    address = MessengerAddress(INSTANCE, 1, host_id(), unix_path, (("127.0.0.1", port),))
                    connections = OutgoingSessions(
                        tasks,
                        source,
                        Traffic(),
                        identity=identity("source", page_bytes),
                        key=cluster_key,
                        tls=None,
                        settings=MessengerConfig(transport=transport),
                        cards=Cards([]),
                    )
                    peers[page_bytes] = await connections.peer(address)
                opened.set_result(peers)
                await asyncio.Event().wait()

        task = loop.create_task(connect())
        either: set[asyncio.Future[Any]] = {task, opened}
        loop.run_until_complete(asyncio.wait(either, return_when="FIRST_COMPLETED"))
        stack.callback(task.cancel)
        yield MessengerEngine(loop, opened.result(), memory, buffer)


ENGINES: Mapping[Transport, Start] = {
    "tcp": functools.partial(_start, "tcp"),
    "shm": functools.partial(_start, "shm"),
}
