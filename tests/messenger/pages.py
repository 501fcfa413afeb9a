"""A segment that peers write to and read from, and that checks what they do."""

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from messenger.receiver.served_pool import GrantWriter, Readable, SharedSegment, WriteRefused
from messenger.shm.catalogue import HINTS_PER_PAGE, Catalogue
from messenger.shm.copy_table import COPY_TABLE_BYTES, CopyTable
from messenger.transport.exposures import Range
from messenger.transport.source import SourceSegment
from messenger.wire.checksums import CHECKSUM_BYTES, layer_checksums
from messenger.wire.messages import PageTableOffsets, WriteEntry
from mooncake.errors import MooncakeError
from mooncake.messages.blocks import KEY_BYTES, KVLayout

_SEALED = 2
"""The state of a page whose block can be found."""


class Memory:
    """A segment with `num_pages` pages of one block each."""

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.fd = os.memfd_create("fabric")
        self._copy_table_offset = -(-layout.block_bytes * num_pages // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = (8, 8, KEY_BYTES, CHECKSUM_BYTES * layout.num_layers, 4 * HINTS_PER_PAGE)
        offsets = [
            *accumulate(
                (size * num_pages for size in sizes), initial=self._copy_table_offset + COPY_TABLE_BYTES
            )
        ]
        self._page_table = PageTableOffsets(*offsets[:-1], 0, layout.block_bytes, num_pages)
        os.truncate(self.fd, offsets[-1])
        self.mapping = mmap.mmap(self.fd, offsets[-1])
        self.view = memoryview(self.mapping)[: layout.block_bytes * num_pages]
        self.source = SourceSegment.of(self.fd, memoryview(self.mapping))
        self.shared_segment: SharedSegment | None = None

    def land(self) -> None:
        """Let peers of this host write to the segment themselves, where that is possible."""
        copy_table = CopyTable.at(
            self.source.buffer[self._copy_table_offset : self._copy_table_offset + COPY_TABLE_BYTES]
        )
        if copy_table is not None:
            size, page_table = self.layout.block_bytes, self._page_table
            self.shared_segment = SharedSegment(
                copy_table, self.fd, self._copy_table_offset, 0, size, self.num_pages, page_table
            )

    def shelve(self, key: bytes, page: int) -> None:
        """Let peers of this host find a block in `page`, until `unshelve` is called."""
        page_table, checksums = self._page_table, self.checksums(page, range(self.layout.num_layers))
        checksums_offset = page_table.checksums_offset + page * len(checksums)
        self.mapping[checksums_offset : checksums_offset + len(checksums)] = checksums
        key_offset = page_table.keys_offset + page * KEY_BYTES
        self.mapping[key_offset : key_offset + KEY_BYTES] = key
        self.mapping[page_table.states_offset + page] = _SEALED
        catalogue = Catalogue.at(self.source.buffer, page_table, self.layout)
        assert catalogue is not None
        catalogue.note([page])

    def unshelve(self, page: int) -> None:
        self.mapping[self._page_table.generations_offset + 4 * page] += 1
        self.mapping[self._page_table.states_offset + page] = 0

    @property
    def copy_table(self) -> CopyTable:
        assert self.shared_segment is not None
        return self.shared_segment.copy_table

    def fill(self, seed: int) -> None:
        self.view[:] = np.random.default_rng(seed).bytes(len(self.view))

    def offset(self, page: int, layer: int) -> int:
        return page * self.layout.block_bytes + layer * self.layout.layer_bytes

    def layers(self, page: int, layers: range) -> memoryview:
        return self.view[self.offset(page, layers.start) : self.offset(page, layers.stop)]

    def page(self, page: int) -> memoryview:
        return self.layers(page, range(self.layout.num_layers))

    def checksums(self, page: int, layers: range) -> bytes:
        return layer_checksums(self.layers(page, layers), self.layout.layer_bytes)

    def close(self) -> None:
        os.close(self.source.read_only_fd)
        os.close(self.fd)


@dataclass(eq=False)
class GrantState:
    """The layers of a grant's pages that have arrived or are being received, by (page, layer)."""

    pages: list[int]
    writers: list[GrantWriter] = field(default_factory=list)
    receiving: set[tuple[int, int]] = field(default_factory=set)
    arrived: dict[tuple[int, int], bytes] = field(default_factory=dict)
    failure: str | None = None
    is_complete: bool = False


class Pages:
    """The `WriteTarget` and `ReadSource` of a `Memory`. Calls that break their contract go to `violations`.

    All peers have the same heads here.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.grants: dict[int, GrantState] = {}
        self.blocks: dict[bytes, int] = {}
        """The page of each key that can be read."""
        self.violations: list[str] = []
        self.num_leases = 0
        self.num_asked = 0
        """The number of leases so far."""
        self.num_read = 0
        """The number of blocks that peers report to have read themselves."""
        self.num_verified = 0
        """The number of blocks that a reader has reported as damaged."""
        self.num_begun = 0
        self.num_exposed = 0
        """The number of exposures of grants' pages to peers that write by themselves."""
        self.read_failure: MooncakeError | None = None
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._opened: dict[tuple[int, int], int] = {}
        """The number of times that each (grant, writer) is open."""

    def grant(self, grant_id: int, pages: Sequence[int]) -> GrantState:
        self.grants[grant_id] = GrantState(list(pages))
        if self.memory.shared_segment is not None:
            self.memory.shared_segment.copy_table.open(grant_id)
        return self.grants[grant_id]

    def revoke(self, grant_id: int, reason: str) -> None:
        grant = self.grants[grant_id]
        grant.failure = reason
        self._close_to_copiers(grant_id)
        for writer in grant.writers:
            writer.revoke(grant_id, reason)
            self._opened[grant_id, id(writer)] -= 1
        grant.writers.clear()

    def _usable(self, grant_id: int) -> GrantState:
        grant = self.grants.get(grant_id)
        if grant is None or grant.failure is not None:
            raise WriteRefused(f"grant {grant_id} is unknown here")
        return grant

    def add_writer(self, grant_id: int, writer: GrantWriter) -> None:
        grant = self._usable(grant_id)
        if writer not in grant.writers:
            grant.writers.append(writer)
            self._opened[grant_id, id(writer)] = self._opened.get((grant_id, id(writer)), 0) + 1

    def begin(self, grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview | None:
        assert heads is None
        grant = self._usable(grant_id)
        if not grant.writers and not grant.is_complete:
            self.violations.append(f"a write to grant {grant_id}, which nobody has opened")
        if grant.is_complete:
            return None
        slots = [(entry.page, layer) for layer in range(entry.layer_begin, entry.layer_end)]
        if entry.page not in grant.pages or entry.generation != 1:
            raise WriteRefused(f"page {entry.page} is no part of grant {grant_id}")
        if not 0 <= entry.layer_begin < entry.layer_end <= self.memory.layout.num_layers:
            raise WriteRefused("layers that there are not")
        if len(entry.checksums) != CHECKSUM_BYTES * len(slots):
            raise WriteRefused("checksums are missing")
        if any(slot in grant.receiving for slot in slots):
            self.violations.append(f"{entry} begins while it is being received")
            raise WriteRefused("being received")
        there = [grant.arrived[slot] for slot in slots if slot in grant.arrived]
        if there:
            if b"".join(there) != entry.checksums:
                self.violations.append(f"{entry} differs from what is there already")
                raise WriteRefused("there already, and differs")
            return None
        grant.receiving.update(slots)
        self.num_begun += 1
        return self.memory.layers(entry.page, range(entry.layer_begin, entry.layer_end))

    def expose(self, grant_id: int) -> tuple[list[tuple[int, Range]], Callable[[], None]]:
        grant = self._usable(grant_id)
        pages = [] if grant.is_complete else list(grant.pages)
        self.num_exposed += 1

        def on_closed() -> None:
            self.num_exposed -= 1
            self._scrub_pages(grant, pages)

        block_bytes = self.memory.layout.block_bytes
        return [(page, Range(self.memory.offset(page, 0), block_bytes)) for page in pages], on_closed

    def is_open(self, grant_id: int) -> bool:
        return self.grants[grant_id].failure is None and not self.grants[grant_id].is_complete

    def complete(self, grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
        grant = self._end(grant_id, entry)
        layers = range(entry.layer_begin, entry.layer_end)
        if self.memory.checksums(entry.page, layers) != entry.checksums:
            self.violations.append(f"{entry} is complete, but the bytes differ")
        if grant.failure is not None:
            self._scrub(entry)
            raise WriteRefused("revoked meanwhile")
        for number, layer in enumerate(layers):
            checksum = entry.checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
            grant.arrived[entry.page, layer] = checksum
        grant.is_complete = len(grant.arrived) == len(grant.pages) * self.memory.layout.num_layers
        if grant.is_complete:
            self._close_to_copiers(grant_id)
            for writer in grant.writers:
                writer.completed(grant_id)
        return grant.is_complete

    def abandon(self, grant_id: int, entry: WriteEntry, heads: range | None) -> None:
        self._end(grant_id, entry)
        self._scrub(entry)

    def _scrub_pages(self, grant: GrantState, pages: Sequence[int]) -> None:
        """Erase the layers of pages that did not arrive and are not being received."""
        all_layers = range(self.memory.layout.num_layers)
        slots = {(page, layer) for page in pages for layer in all_layers}
        for page, layer in slots - set(grant.arrived) - grant.receiving:
            view = self.memory.layers(page, range(layer, layer + 1))
            view[:] = bytes(len(view))

    def _close_to_copiers(self, grant_id: int) -> None:
        """Close a grant's pages to peers of this host, and wait for copies in progress."""
        grant, shared_segment = self.grants[grant_id], self.memory.shared_segment
        if shared_segment is None:
            return

        def on_quiet() -> None:
            self.num_exposed -= 1
            self._scrub_pages(grant, grant.pages)

        self.num_exposed += 1
        if shared_segment.copy_table.close(grant_id, on_quiet):
            on_quiet()

    def _scrub(self, entry: WriteEntry) -> None:
        view = self.memory.layers(entry.page, range(entry.layer_begin, entry.layer_end))
        view[:] = bytes(len(view))

    def _end(self, grant_id: int, entry: WriteEntry) -> GrantState:
        grant = self.grants[grant_id]
        slots = {(entry.page, layer) for layer in range(entry.layer_begin, entry.layer_end)}
        if not slots <= grant.receiving:
            self.violations.append(f"{entry} ends that was not begun")
        grant.receiving -= slots
        self.num_begun -= 1
        return grant

    def remove_writer(self, grant_id: int, writer: GrantWriter, reason: str | None) -> None:
        grant = self.grants[grant_id]
        if writer in grant.writers:
            grant.writers.remove(writer)
            self._opened[grant_id, id(writer)] -= 1
        elif grant.failure is None:
            self.violations.append(f"grant {grant_id} is closed by {writer.name}, which has it not open")
        if reason is not None and not grant.is_complete and grant.failure is None:
            grant.failure = reason
            self._close_to_copiers(grant_id)

    async def lease(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        await self.may_read.wait()
        assert heads is None
        return self._lease(keys, layers)

    def lease_now(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]] | None:
        assert heads is None
        return self._lease(keys, layers) if self.may_read.is_set() else None

    def count_read(self, keys: Sequence[bytes]) -> int:
        self.num_read += len(keys)
        return len(keys)

    def verify(self, keys: Sequence[bytes], layers: range) -> None:
        self.num_verified += len(keys)

    def _lease(self, keys: Sequence[bytes], layers: range) -> tuple[list[Readable], Callable[[], None]]:
        if self.read_failure is not None:
            raise self.read_failure
        found = [(index, self.blocks[key]) for index, key in enumerate(keys) if key in self.blocks]
        is_leased = True
        self.num_leases += 1
        self.num_asked += 1

        def end_lease() -> None:
            nonlocal is_leased
            if not is_leased:
                self.violations.append("a lease ends twice")
            is_leased = False
            self.num_leases -= 1

        memory = self.memory
        blocks = [
            Readable(index, memory.layers(page, layers), memory.offset(page, layers.start), checksums)
            for index, page in found
            for checksums in [memory.checksums(page, layers)]
        ]
        return blocks, end_lease

    def check_idle(self) -> None:
        """Check, after the last connection, that nothing is held, and that incomplete pages are empty."""
        assert self.violations == []
        assert self.num_begun == 0
        assert self.num_leases == 0
        assert self.num_exposed == 0
        assert set(self._opened.values()) <= {0}
        written = {slot for grant in self.grants.values() for slot in grant.arrived}
        read = set(self.blocks.values())
        for page in set(range(self.memory.num_pages)) - read:
            for layer in range(self.memory.layout.num_layers):
                view = self.memory.layers(page, range(layer, layer + 1))
                assert (page, layer) in written or view == bytes(len(view)), f"stray bytes in page {page}"
