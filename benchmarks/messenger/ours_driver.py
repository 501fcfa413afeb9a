"""The memory that our messenger writes to and reads from, in a process of its own.

    python -m benchmarks.messenger.ours_driver FOLDER KEY      (prints its addresses, ends with its stdin)

The class `Pages` takes the place of a pool: every page may be written at any time, and its block is found
with the checksums that came with it.

Owns: this memory. Does not know: what is measured.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate

from benchmarks.kvstore.workload import WORKING_SET_BYTES
from messenger.rdma.cards import Cards
from messenger.receiver.receiver import Sessions, UnauthenticatedPeers
from messenger.receiver.served_pool import GrantWriter, Readable, ServedPool, SharedSegment, WriteRefused
from messenger.shm.catalogue import HINTS_PER_PAGE, Catalogue
from messenger.shm.copy_table import COPY_TABLE_BYTES, CopyTable
from messenger.transport import busy_poll
from messenger.transport.exposures import Range
from messenger.transport.pacing import begin_unpaced
from messenger.transport.source import SourceSegment
from messenger.transport.stream import Stream
from messenger.transport.transports import Traffic
from messenger.wire import checksums
from messenger.wire.checksums import CHECKSUM_BYTES
from messenger.wire.identity import Identity, host_id
from messenger.wire.messages import PageTableOffsets, WriteEntry
from mooncake.config.sections import MessengerConfig
from mooncake.messages.blocks import KEY_BYTES, KVLayout
from mooncake.node.mapping import HUGE_PAGE_BYTES, MappedFile
from mooncake.security.keys import ClusterKey

INSTANCE = "target"
GRANT = 1
"""The grant of the whole memory, without end."""
PAGE_BYTES = (4 << 10, 64 << 10, 256 << 10, 1 << 20)
"""The sizes of pages. A block is in the largest page that it fills, or in several such pages."""
_LARGEST_SLICE_BYTES = 256 << 10
_TABLES_BYTES = 4 * HUGE_PAGE_BYTES
_SEALED = 2
"""The state of all pages."""


def slice_bytes_of(page_bytes: int) -> int:
    """Return the bytes that one checksum covers."""
    return min(page_bytes, _LARGEST_SLICE_BYTES)


def key(page: int) -> bytes:
    """Return the key of the block in this page. It never changes."""
    return page.to_bytes(KEY_BYTES, "little")


def identity(instance: str, page_bytes: int) -> Identity:
    """Return the identity of a messenger with pages of this size. A layer is one slice."""
    slice_bytes = slice_bytes_of(page_bytes)
    layout = KVLayout(
        num_layers=page_bytes // slice_bytes,
        num_kv_heads=1,
        head_dim=16,
        block_size=slice_bytes // 64,
        dtype="bfloat16",
    )
    assert layout.block_bytes == page_bytes
    return Identity(instance, 1, host_id(), "benchmark", layout)


class Pages:
    """The memory, cut into pages of one size, as a `WriteTarget` and `ReadSource`."""

    def __init__(self, segment: memoryview, page_bytes: int, table_offset: int) -> None:
        """Make pages of `page_bytes` in `segment`.

        The table of blocks is in `segment[table_offset : self.table_end]`.
        """
        layout = identity(INSTANCE, page_bytes).layout
        self.num_pages = num_pages = WORKING_SET_BYTES // page_bytes
        self._num_layers = layout.num_layers
        sizes = (1, 4, KEY_BYTES, self._num_layers * CHECKSUM_BYTES, 4 * HINTS_PER_PAGE)
        offsets = [*accumulate((-(-size * num_pages // 8) * 8 for size in sizes), initial=table_offset)]
        states, generations, keys, checksums, places, self.table_end = offsets
        self.page_table = PageTableOffsets(
            states, generations, keys, checksums, places, 0, page_bytes, num_pages
        )
        segment[states : states + num_pages] = bytes([_SEALED]) * num_pages
        segment[keys : keys + KEY_BYTES * num_pages] = b"".join(map(key, range(num_pages)))
        catalogue = Catalogue.at(segment, self.page_table, layout)
        if catalogue is not None:
            catalogue.note(range(num_pages))
        self._checksums = segment[checksums:places]
        self._memory = segment[:WORKING_SET_BYTES]
        self._page_bytes = page_bytes
        self._slice_bytes = layout.layer_bytes

    def add_writer(self, grant_id: int, writer: GrantWriter) -> None:
        """Do nothing, as every peer may write."""

    def begin(self, grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview:
        layers = range(entry.layer_begin, entry.layer_end)
        if not (0 <= entry.page < self.num_pages and 0 <= layers.start < layers.stop <= self._num_layers):
            raise WriteRefused("outside the memory")
        begin = self._offset(entry.page, layers)
        return self._memory[begin : begin + len(layers) * self._slice_bytes]

    def expose(self, grant_id: int) -> tuple[list[tuple[int, Range]], Callable[[], None]]:
        size = self._page_bytes
        return [(page, Range(page * size, size)) for page in range(self.num_pages)], lambda: None

    def is_open(self, grant_id: int) -> bool:
        return True

    def complete(self, grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
        self._checksums[self._places(entry.page, range(entry.layer_begin, entry.layer_end))] = entry.checksums
        return False

    def abandon(self, grant_id: int, entry: WriteEntry, heads: range | None) -> None:
        """Do nothing, as the next write overwrites the page."""

    def remove_writer(self, grant_id: int, writer: GrantWriter, reason: str | None) -> None:
        """Do nothing, as no caller waits for the end of a writer."""

    async def lease(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        return self.lease_now(keys, layers, heads)

    def lease_now(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        blocks = []
        for index, page in enumerate(int.from_bytes(each, "little") for each in keys):
            begin = self._offset(page, layers)
            view = self._memory[begin : begin + len(layers) * self._slice_bytes]
            blocks.append(Readable(index, view, begin, bytes(self._checksums[self._places(page, layers)])))
        return blocks, lambda: None

    def count_read(self, keys: Sequence[bytes]) -> int:
        return len(keys)

    def verify(self, keys: Sequence[bytes], layers: range) -> None:
        raise AssertionError(f"{len(keys)} blocks were damaged")

    def _offset(self, page: int, layers: range) -> int:
        return page * self._page_bytes + layers.start * self._slice_bytes

    def _places(self, page: int, layers: range) -> slice:
        """Return the slice of the checksums of a page's layers."""
        first = page * self._num_layers + layers.start
        return slice(first * CHECKSUM_BYTES, (first + len(layers)) * CHECKSUM_BYTES)


def event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop like that of a messenger with default settings."""
    return busy_poll.event_loop(1e-6 * MessengerConfig().poll_us)


def shared_memory(num_bytes: int) -> tuple[int, memoryview]:
    """Return the descriptor and mapping of new memory in huge pages, like a settled pool's segment."""
    fd = os.memfd_create("benchmark")
    os.posix_fallocate(fd, 0, num_bytes)
    mapping = MappedFile(fd, num_bytes)
    mapping.use_huge_pages(0, num_bytes)
    return fd, mapping.view


async def _accept(listener: socket.socket, sessions: Sessions, tasks: asyncio.TaskGroup) -> None:
    unauthenticated = UnauthenticatedPeers()
    while True:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        tasks.create_task(sessions.serve(Stream(sock), unauthenticated))


async def _serve(folder: str, cluster_key: ClusterKey) -> None:
    checksums.prepare()
    fd, segment = shared_memory(WORKING_SET_BYTES + _TABLES_BYTES)
    copy_table, source = CopyTable.at(segment[-COPY_TABLE_BYTES:]), SourceSegment.of(fd, segment)
    if copy_table is not None:
        copy_table.open(GRANT)
    table_offset = WORKING_SET_BYTES
    places: dict[int, tuple[str, int]] = {}
    async with asyncio.TaskGroup() as tasks:
        for page_bytes in PAGE_BYTES:
            pages, shared_segment = Pages(segment, page_bytes, table_offset), None
            table_offset = pages.table_end
            assert table_offset <= len(segment) - COPY_TABLE_BYTES
            if copy_table is not None:
                shared_segment = SharedSegment(
                    copy_table,
                    fd,
                    len(segment) - COPY_TABLE_BYTES,
                    0,
                    page_bytes,
                    pages.num_pages,
                    pages.page_table,
                )
            door = ServedPool(
                identity(INSTANCE, page_bytes),
                cluster_key,
                pages,
                pages,
                source,
                Traffic(),
                MessengerConfig(),
                Cards([]),
                shared_segment,
            )
            sessions = Sessions(door)
            by_memory, by_network = socket.socket(socket.AF_UNIX), socket.socket()
            by_memory.bind(f"{folder}/{page_bytes}.sock")
            begin_unpaced(by_network)
            by_network.bind(("127.0.0.1", 0))
            for listener in (by_memory, by_network):
                listener.listen()
                listener.setblocking(False)
                tasks.create_task(_accept(listener, sessions, tasks))
            places[page_bytes] = (by_memory.getsockname(), by_network.getsockname()[1])
        print(json.dumps(places), flush=True)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(sys.stdin, ended.set)
        await ended.wait()
        os._exit(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(_serve(sys.argv[1], ClusterKey.from_text(sys.argv[2])))
