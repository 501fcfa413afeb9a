"""The segment: the memory that holds an instance's part of the KVCache pool.

    0              magic, format version, length of the header, header (msgpack)
    table_offset   page table, one record per page (see pages)
    pages_offset   pages, one block each, aligned to 4096 bytes; one layer of a block is contiguous

It is a mapping of a descriptor that the supervisor created and allocated, so it outlives both the
messenger and the worker. The magic is written last: a half-formatted segment counts as unformatted.

Owns: the format. Does not know: sockets, who uses which page.
"""

import contextlib
import mmap
import os
import struct

import msgspec
import numpy as np

from kvstore.pages import PageTable, page_dtype
from mooncake.blocks import KVLayout
from mooncake.errors import ConfigError, MismatchError

MAGIC = b"MCKVSEG\0"
FORMAT_VERSION = 1
ALIGNMENT = 4096

_PREFIX = struct.Struct("<8sII")  # magic, format version, bytes of the msgpack header
_UNFORMATTED = bytes(len(MAGIC))


class SegmentHeader(msgspec.Struct, frozen=True):
    """What a segment holds. `page_stride` is the distance between pages in bytes."""

    fingerprint: str
    layout: KVLayout
    num_pages: int
    page_stride: int
    table_offset: int
    pages_offset: int

    @classmethod
    def plan(cls, size_bytes: int, fingerprint: str, layout: KVLayout) -> "SegmentHeader":
        """As many pages as `size_bytes` hold. Raises ConfigError if that is none."""
        record_bytes = page_dtype(layout.num_layers).itemsize
        page_stride = _aligned(layout.block_bytes)
        num_pages = max(0, size_bytes - 2 * ALIGNMENT) // (page_stride + record_bytes)
        if num_pages == 0:
            raise ConfigError(
                f"a segment of {size_bytes} bytes holds no page of {page_stride} bytes; raise the pool's size"
            )
        pages_offset = _aligned(ALIGNMENT + num_pages * record_bytes)
        return cls(fingerprint, layout, num_pages, page_stride, ALIGNMENT, pages_offset)


class Segment:
    """A formatted segment, mapped read-write.

    `buffer` is the whole mapping; views of it (torch, numpy) keep the mapping alive.
    """

    def __init__(self, buffer: memoryview, header: SegmentHeader) -> None:
        self.buffer = buffer
        self.fingerprint = header.fingerprint
        self.layout = header.layout
        self.num_pages = header.num_pages
        self.page_stride = header.page_stride
        self._layer_bytes = header.layout.layer_bytes
        self._table_offset = header.table_offset
        self._pages_offset = header.pages_offset

    @classmethod
    def open(cls, fd: int) -> "Segment | None":
        """Maps the segment behind `fd`, or None if it has not been formatted."""
        buffer = _map(fd)
        magic, version, header_bytes = _PREFIX.unpack_from(buffer)
        if magic == _UNFORMATTED:
            return None
        if (magic, version) != (MAGIC, FORMAT_VERSION):
            raise MismatchError(
                "segment format", (MAGIC, FORMAT_VERSION), (magic, version), "use a new pool file"
            )
        header = msgspec.msgpack.decode(
            buffer[_PREFIX.size : _PREFIX.size + header_bytes], type=SegmentHeader
        )
        if header.pages_offset + header.num_pages * header.page_stride > len(buffer):
            raise ConfigError(
                f"the segment has {len(buffer)} bytes but was formatted for {header.num_pages} pages;"
                " restore its size"
            )
        return cls(buffer, header)

    @classmethod
    def format(cls, fd: int, fingerprint: str, layout: KVLayout) -> "Segment":
        """Makes the unformatted segment behind `fd` an empty pool for `layout`."""
        buffer = _map(fd)
        header = SegmentHeader.plan(len(buffer), fingerprint, layout)
        encoded = msgspec.msgpack.encode(header)
        assert _PREFIX.size + len(encoded) <= header.table_offset
        np.frombuffer(buffer, np.uint8)[header.table_offset : header.pages_offset] = 0
        buffer[_PREFIX.size : _PREFIX.size + len(encoded)] = encoded
        _PREFIX.pack_into(buffer, 0, _UNFORMATTED, FORMAT_VERSION, len(encoded))
        buffer[: len(MAGIC)] = MAGIC
        return cls(buffer, header)

    def check(self, fingerprint: str, layout: KVLayout) -> None:
        """Raises MismatchError unless this segment holds blocks of that model in that layout."""
        if fingerprint != self.fingerprint:
            raise MismatchError(
                "model fingerprint", self.fingerprint, fingerprint, "give each model its own pool"
            )
        if layout != self.layout:
            raise MismatchError("KV layout", self.layout, layout, "give each layout its own pool")

    def page_table(self) -> PageTable:
        return PageTable(
            np.frombuffer(
                self.buffer,
                page_dtype(self.layout.num_layers),
                count=self.num_pages,
                offset=self._table_offset,
            )
        )

    def page_offset(self, page: int) -> int:
        """Byte offset of `page` in the segment."""
        assert 0 <= page < self.num_pages
        return self._pages_offset + page * self.page_stride

    def layers_offset(self, page: int, layer: int) -> int:
        """Byte offset of `layer` of `page` in the segment."""
        return self.page_offset(page) + layer * self._layer_bytes

    def layers_view(self, page: int, layers: range) -> memoryview:
        """The bytes of consecutive `layers` of `page`."""
        start = self.layers_offset(page, layers.start)
        return self.buffer[start : start + len(layers) * self._layer_bytes]

    def layer_view(self, page: int, layer: int) -> memoryview:
        """The bytes of one layer of `page`."""
        return self.layers_view(page, range(layer, layer + 1))

    def close(self) -> None:
        """Unmaps the segment, or leaves that to the last view of it."""
        with contextlib.suppress(BufferError):
            self.buffer.release()


def _map(fd: int) -> memoryview:
    size_bytes = os.fstat(fd).st_size
    if size_bytes < 2 * ALIGNMENT:
        raise ConfigError(f"a segment of {size_bytes} bytes is too small; raise the pool's size")
    return memoryview(mmap.mmap(fd, size_bytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
