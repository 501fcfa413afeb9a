"""The segment: the memory that holds an instance's part of the KVCache pool.

    0              magic, format version, length of the header, header (msgpack)
    2048           copy_table: who may write granted pages (see messenger.shm.copy_table)
    table_offset   page table (`kvstore.pool.pages`)
    pages_offset   pages, one block each, aligned to 4096 bytes; one layer of a block is contiguous

The segment is a mapping of a descriptor that the supervisor created and allocated, so it outlives both the
messenger and the worker. The magic is written last: a half-formatted segment counts as unformatted.
A slab file has the same format (`kvstore.ssd.slab`).

Owns: the format. Does not know: sockets, who uses which page.
"""

import contextlib
import os
import struct

import msgspec
import numpy as np

from kvstore.pool.pages import PageTable, field_offsets, record_bytes, table_bytes
from messenger.receiver.served_pool import SharedSegment
from messenger.shm.catalogue import Catalogue
from messenger.shm.copy_table import COPY_TABLE_BYTES, CopyTable
from messenger.wire.checksums import layer_checksums
from messenger.wire.messages import PageTableOffsets
from mooncake.errors import ConfigError, MismatchError
from mooncake.messages.blocks import KVLayout
from mooncake.node.mapping import HUGE_PAGE_BYTES, MappedFile

MAGIC = b"MCKVSEG\0"
FORMAT_VERSION = 3
ALIGNMENT = 4096
_COPY_TABLE_OFFSET = ALIGNMENT - COPY_TABLE_BYTES

_PREFIX = struct.Struct("<8sII")  # magic, format version, bytes of the msgpack header
_CHUNK_BYTES = 16 * HUGE_PAGE_BYTES
"""Bytes of the mapping that are moved into huge pages at a time."""
_UNFORMATTED = bytes(len(MAGIC))
_ROUNDING_BYTES = 3 * ALIGNMENT  # the header, and what aligning table and pages may cost


class SegmentHeader(msgspec.Struct, frozen=True):
    """The header of a segment. `page_stride` is the distance between pages in bytes."""

    fingerprint: str
    layout: KVLayout
    num_pages: int
    page_stride: int
    table_offset: int
    pages_offset: int

    @classmethod
    def plan(cls, size_bytes: int, fingerprint: str, layout: KVLayout) -> "SegmentHeader":
        """Return the header for as many pages as fit into `size_bytes`. Raises ConfigError if none fits."""
        page_stride = _aligned(layout.block_bytes)
        space_bytes = max(0, size_bytes - _ROUNDING_BYTES)
        num_pages = space_bytes // (page_stride + record_bytes(layout.num_layers))
        if num_pages == 0:
            raise ConfigError(
                f"{size_bytes} bytes hold no page of {page_stride} bytes;"
                " raise kvcache.pool_bytes or kvcache.ssd_bytes"
            )
        pages_offset = _aligned(ALIGNMENT + table_bytes(num_pages, layout.num_layers))
        return cls(fingerprint, layout, num_pages, page_stride, ALIGNMENT, pages_offset)

    @property
    def size_bytes(self) -> int:
        """The bytes from the start of the header to the end of the last page."""
        return self.pages_offset + self.num_pages * self.page_stride

    def page_offset(self, page: int) -> int:
        """Return the byte offset of `page` from the start of the header."""
        assert 0 <= page < self.num_pages
        return self.pages_offset + page * self.page_stride

    def page_table(self, buffer: memoryview) -> PageTable:
        """Return the page table in a mapping that begins with this header."""
        return PageTable(buffer[self.table_offset :], self.num_pages, self.layout.num_layers)

    def check(self, fingerprint: str, layout: KVLayout) -> None:
        """Check that the segment is for this model and layout. Raises MismatchError."""
        if fingerprint != self.fingerprint:
            raise MismatchError(
                "model fingerprint", self.fingerprint, fingerprint, "give each model its own pool"
            )
        if layout != self.layout:
            raise MismatchError("KV layout", self.layout, layout, "give each layout its own pool")


def read_header(buffer: memoryview, magic: bytes, what: str) -> SegmentHeader | None:
    """Return the header at the start of `buffer`; None if no header was written yet.

    Raises MismatchError for a header of another kind or version, msgspec.MsgspecError for a damaged header.
    The message of a MismatchError calls the file `what`.
    """
    found_magic, version, header_bytes = _PREFIX.unpack_from(buffer)
    if found_magic == _UNFORMATTED:
        return None
    if (found_magic, version) != (magic, FORMAT_VERSION):
        raise MismatchError(
            f"format of {what}", (magic, FORMAT_VERSION), (found_magic, version), "remove it or use a new one"
        )
    encoded = buffer[_PREFIX.size : _PREFIX.size + header_bytes]
    return msgspec.msgpack.decode(encoded, type=SegmentHeader)


def write_header(buffer: memoryview, magic: bytes, header: SegmentHeader) -> None:
    """Write `header` and an empty page table into `buffer`. The magic is written last.

    Raises ConfigError if the header is too long.
    """
    encoded = msgspec.msgpack.encode(header)
    if _PREFIX.size + len(encoded) > _COPY_TABLE_OFFSET:
        raise ConfigError(f"a fingerprint of {len(header.fingerprint)} characters; give it at most 1,000")
    np.frombuffer(buffer, np.uint8)[header.table_offset : header.pages_offset] = 0
    buffer[_PREFIX.size : _PREFIX.size + len(encoded)] = encoded
    _PREFIX.pack_into(buffer, 0, _UNFORMATTED, FORMAT_VERSION, len(encoded))
    buffer[: len(magic)] = magic


class Segment:
    """A formatted segment, mapped for reading and writing.

    `buffer` is the whole mapping; views of it (torch, numpy) keep the mapping alive.
    """

    def __init__(self, mapping: MappedFile, header: SegmentHeader) -> None:
        self.buffer = mapping.view
        self._mapping = mapping
        self.header = header
        self.fingerprint = header.fingerprint
        self.layout = header.layout
        self.num_pages = header.num_pages
        self.page_stride = header.page_stride
        self._layer_bytes = header.layout.layer_bytes
        self._head_bytes = header.layout.head_bytes

    @classmethod
    def open(cls, fd: int) -> "Segment | None":
        """Map the segment with the descriptor `fd`, and return it; None if it is not formatted.

        Raises ConfigError if the header is damaged, or the segment smaller than its header says, and
        MismatchError if its format is of another kind or version.
        """
        mapping = _map(fd)
        try:
            header = read_header(mapping.view, MAGIC, "the segment")
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"the segment's header is damaged ({error}); remove its file in kvcache.segment_dir"
            ) from None
        if header is None:
            return None
        if header.size_bytes > mapping.size_bytes:
            raise ConfigError(
                f"the segment has {mapping.size_bytes} bytes but was formatted for {header.num_pages} pages;"
                " restore its size"
            )
        return cls(mapping, header)

    @classmethod
    def format(cls, fd: int, fingerprint: str, layout: KVLayout) -> "Segment":
        """Map the segment with the descriptor `fd`, and format it as an empty pool for `layout`.

        Raises ConfigError if no page fits into the segment, or if the fingerprint is too long.
        """
        mapping = _map(fd)
        header = SegmentHeader.plan(mapping.size_bytes, fingerprint, layout)
        write_header(mapping.view, MAGIC, header)
        return cls(mapping, header)

    def shared_segment(self, fd: int) -> SharedSegment | None:
        """Return the description of the segment for peers on this host that map it.

        Returns None without a compiler.
        """
        copy_table = CopyTable.at(self.buffer[_COPY_TABLE_OFFSET : _COPY_TABLE_OFFSET + COPY_TABLE_BYTES])
        if copy_table is None:
            return None
        header = self.header
        return SharedSegment(
            copy_table,
            fd,
            _COPY_TABLE_OFFSET,
            header.pages_offset,
            header.page_stride,
            header.num_pages,
            self._page_table(),
        )

    def catalogue(self) -> Catalogue | None:
        """Return the catalogue by which peers on this host find sealed blocks; None without a compiler."""
        return Catalogue.at(self.buffer, self._page_table(), self.layout)

    def _page_table(self) -> PageTableOffsets:
        header = self.header
        fields = field_offsets(header.num_pages, header.layout.num_layers)
        table_offset = header.table_offset
        return PageTableOffsets(
            states_offset=table_offset + fields["state"],
            generations_offset=table_offset + fields["generation"],
            keys_offset=table_offset + fields["key"],
            checksums_offset=table_offset + fields["checksums"],
            places_offset=table_offset + fields["places"],
            pages_offset=header.pages_offset,
            page_stride=header.page_stride,
            num_pages=header.num_pages,
        )

    def page_table(self) -> PageTable:
        return self.header.page_table(self.buffer)

    def page_offset(self, page: int) -> int:
        """Return the byte offset of `page` in the segment."""
        return self.header.page_offset(page)

    def page_view(self, page: int) -> memoryview:
        """Return a view of the block in `page`."""
        return self.layers_view(page, range(self.layout.num_layers))

    def stride_view(self, page: int) -> memoryview:
        """Return a view of `page` with its padding, for disks, which read and write whole sectors."""
        start = self.page_offset(page)
        return self.buffer[start : start + self.page_stride]

    def layers_offset(self, page: int, layer: int) -> int:
        """Return the byte offset of `layer` of `page` in the segment."""
        return self.page_offset(page) + layer * self._layer_bytes

    def layers_view(self, page: int, layers: range) -> memoryview:
        """Return a view of consecutive `layers` of `page`."""
        start = self.layers_offset(page, layers.start)
        return self.buffer[start : start + len(layers) * self._layer_bytes]

    def layer_view(self, page: int, layer: int) -> memoryview:
        """Return a view of one layer of `page`."""
        return self.layers_view(page, range(layer, layer + 1))

    def heads_offset(self, page: int, layer: int, heads: range) -> int:
        """Return the byte offset of consecutive `heads` of one layer of `page` in the segment."""
        return self.layers_offset(page, layer) + heads.start * self._head_bytes

    def heads_view(self, page: int, layer: int, heads: range) -> memoryview:
        """Return a view of consecutive `heads` of one layer of `page`."""
        start = self.heads_offset(page, layer, heads)
        return self.buffer[start : start + len(heads) * self._head_bytes]

    def is_intact(self, page: int, layers: range, checksums: bytes) -> bool:
        """Return whether the bytes of `layers` of `page` have these little-endian xxh3-64 checksums."""
        return layer_checksums(self.layers_view(page, layers), self._layer_bytes) == checksums

    def huge_chunks(self) -> range:
        """Return the offsets of the segment's chunks, each for one call of `use_huge_pages`."""
        return range(0, self._mapping.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, _CHUNK_BYTES)

    def use_huge_pages(self, start: int) -> bool:
        """Move one of `huge_chunks` into huge pages. Returns whether the kernel has done so.

        The call blocks for some 100 ms.
        """
        end = self.huge_chunks().stop
        return self._mapping.use_huge_pages(start, min(_CHUNK_BYTES, end - start))

    def lock(self) -> bool:
        """Map the whole segment and lock it in memory. Returns whether the limits of this process allow that.

        The call blocks.
        """
        return self._mapping.lock()

    def populate(self, page: int) -> None:
        """Fault `page` in, as otherwise the first copy to the page is much slower."""
        self._mapping.populate(self.page_offset(page), self.page_stride)

    def close(self) -> None:
        """Unmap the segment, now or when its last view is released."""
        with contextlib.suppress(BufferError):
            self.buffer.release()


def _map(fd: int) -> MappedFile:
    size_bytes = os.fstat(fd).st_size
    if size_bytes < 2 * ALIGNMENT:
        raise ConfigError(f"a segment of {size_bytes} bytes is too small; raise the pool's size")
    return MappedFile(fd, size_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
