"""The catalogue of a shared segment: the page of each sealed block, for readers on the same host.

A reader that has the segment mapped finds a block by its key, copies it, and compares it with its checksums.
Then the reader checks that the block has stayed in its page. All of this is one native call, without a
message to the owner: see catalogue.cpp. A reader that does not find a block intact asks the owner of the
segment.

Owns: finding blocks, and reading them. Does not know: who evicts them, connections.
"""

import functools
from collections.abc import Sequence
from ctypes import CDLL, Structure, addressof, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p

import msgspec

from messenger.native import SOURCES
from messenger.wire.checksums import CHECKSUM_BYTES, SHORT_LAYER_BYTES, address_of
from messenger.wire.messages import Fetch, PageTableOffsets
from mooncake.errors import TransferError
from mooncake.messages.blocks import KEY_BYTES, KVLayout
from mooncake.native import load_or_do_without

HINTS_PER_PAGE = 4
"""The number of hints of the catalogue for each page, four bytes each."""


class _Arrays(Structure):
    """The addresses and lengths of a catalogue's arrays, as catalogue.cpp reads them."""

    _fields_ = (
        *((name, c_void_p) for name in ("states", "generations", "keys", "checksums", "places")),
        *((name, c_uint64) for name in ("num_pages", "num_layers")),
    )


@functools.cache
def native() -> CDLL | None:
    """Return the compiled code; None without a compiler: then readers ask the owner."""
    library = load_or_do_without(SOURCES / "catalogue.cpp", "blocks on this host are asked for")
    if library is None:
        return None
    library.note_pages.argtypes = (c_void_p, c_void_p, c_size_t)
    library.count_blocks.argtypes = (c_void_p, c_char_p, c_size_t)
    library.read_blocks.argtypes = (
        c_void_p,
        c_char_p,
        c_size_t,
        c_void_p,
        c_size_t,
        c_size_t,
        c_size_t,
        c_size_t,
        c_void_p,
        c_void_p,
    )
    library.note_pages.restype = None
    library.count_blocks.restype = c_size_t
    library.read_blocks.restype = c_int
    return library


class Catalogue:
    """The catalogue of a segment that is mapped into this process."""

    def __init__(
        self, library: CDLL, segment: memoryview, page_table: PageTableOffsets, layout: KVLayout
    ) -> None:
        """Open the catalogue of a segment whose blocks have `layout`.

        Raises TransferError if an array of `page_table` is outside the segment or not aligned.
        """
        num_pages = page_table.num_pages
        ends = (
            page_table.pages_offset + num_pages * page_table.page_stride,
            page_table.states_offset + num_pages,
            page_table.generations_offset + 4 * num_pages,
            page_table.keys_offset + KEY_BYTES * num_pages,
            page_table.checksums_offset + CHECKSUM_BYTES * layout.num_layers * num_pages,
            page_table.places_offset + 4 * HINTS_PER_PAGE * num_pages,
        )
        numbers = msgspec.structs.astuple(page_table)
        is_inside = num_pages > 0 and min(numbers) >= 0 and max(ends) <= len(segment)
        is_aligned = not any(number % CHECKSUM_BYTES for number in numbers[:-1])
        if not is_inside or not is_aligned or page_table.page_stride < layout.block_bytes:
            raise TransferError(f"{page_table} are not in a segment of {len(segment)} bytes")
        self._native = library
        self._segment = segment  # keeps it mapped
        self._layout = layout
        start = address_of(segment)
        self._pages_address = start + page_table.pages_offset
        self._page_stride = page_table.page_stride
        self._arrays = _Arrays(
            start + page_table.states_offset,
            start + page_table.generations_offset,
            start + page_table.keys_offset,
            start + page_table.checksums_offset,
            start + page_table.places_offset,
            num_pages,
            layout.num_layers,
        )
        self._address = addressof(self._arrays)

    @classmethod
    def at(cls, segment: memoryview, page_table: PageTableOffsets, layout: KVLayout) -> "Catalogue | None":
        """Return the opened catalogue; None where nothing can be compiled. Raises TransferError."""
        library = native()
        return None if library is None else cls(library, segment, page_table, layout)

    def note(self, pages: Sequence[int]) -> None:
        """Enter the blocks in these pages, which the owner has sealed."""
        self._native.note_pages(self._address, (c_int64 * len(pages))(*pages), len(pages))

    def read(self, fetch: Fetch, views: Sequence[memoryview]) -> dict[int, bytes] | None:
        """Copy whole layers of each block to its view, and return their checksums by the block's index.

        The bytes match the checksums. Returns None if a block is not found intact, or if the fetch cannot be
        read in place: it names heads, its layers are not in this segment, or layers have at most
        `SHORT_LAYER_BYTES` bytes. If None is returned, the contents of the views are undefined.
        """
        layout, num_layers = self._layout, fetch.layer_end - fetch.layer_begin
        first_layer, num_blocks = fetch.layer_begin - layout.first_layer, len(fetch.keys)
        keys = b"".join(fetch.keys)
        if (
            fetch.heads is not None
            or not 0 <= first_layer < first_layer + num_layers <= layout.num_layers
            or layout.layer_bytes <= SHORT_LAYER_BYTES
            or [*map(len, views)] != num_blocks * [num_layers * layout.layer_bytes]
            or len(keys) != num_blocks * KEY_BYTES
            or self._native.count_blocks(self._address, keys, num_blocks) < num_blocks
        ):
            return None
        checksums = bytearray(num_blocks * num_layers * CHECKSUM_BYTES)
        is_there = self._native.read_blocks(
            self._address,
            keys,
            num_blocks,
            self._pages_address,
            self._page_stride,
            first_layer,
            num_layers,
            layout.layer_bytes,
            (c_void_p * num_blocks)(*map(address_of, views)),
            address_of(memoryview(checksums)),
        )
        if not is_there:
            return None
        size = num_layers * CHECKSUM_BYTES
        return {index: bytes(checksums[index * size : (index + 1) * size]) for index in range(num_blocks)}
