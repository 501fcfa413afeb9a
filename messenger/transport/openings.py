"""What may be written just now: pages by grant, transfers by sender, in tables that native code reads.

Whoever grants pages, and whoever answers a sender, decides as if there were no tables, and keeps them up to
date. A write that they let pass would have been taken; one that they do not is decided upon without them.

Owns: the tables, see direct.cpp. Does not know: why something is open.
"""

from array import array
from ctypes import Structure, addressof, c_uint64, c_void_p

from messenger.wire.checksums import address_of
from messenger.wire.protocol import MAX_FRAME_BYTES
from mooncake.messages.blocks import KVLayout

_NUM_TRANSFERS = 64
_MOST_NUMBER = 1 << 63


class _Pages(Structure):
    """`Pages` of direct.cpp."""

    _fields_ = (
        ("grants", c_void_p),
        ("generations", c_void_p),
        ("taken", c_void_p),
        ("memory", c_void_p),
        ("num_pages", c_uint64),
        ("page_stride", c_uint64),
        ("first_layer", c_uint64),
        ("num_layers", c_uint64),
        ("layer_bytes", c_uint64),
        ("most_bytes", c_uint64),
    )


class OpenPages:
    """Which layers of which pages may be written, and for which grant; none at first."""

    def __init__(self, memory: memoryview, layout: KVLayout, num_pages: int, page_stride: int) -> None:
        """`memory`: where the pages are, one block of `layout` at the start of each."""
        assert len(memory) >= (num_pages - 1) * page_stride + layout.block_bytes
        self.layer_bytes = layout.layer_bytes
        self._num_layers = layout.num_layers
        self._memory = memory  # keeps it mapped
        self._grants = array("Q", bytes(8 * num_pages))
        """by page: one more than the grant that it is open for, else 0"""
        self._generations = array("Q", bytes(8 * num_pages))
        self._taken = bytearray(num_pages * layout.num_layers)
        """by page and layer: 1 if it is there, or comes already"""
        self._table = _Pages(
            self._grants.buffer_info()[0],
            self._generations.buffer_info()[0],
            address_of(memoryview(self._taken)),
            address_of(memory),
            num_pages,
            page_stride,
            layout.first_layer,
            layout.num_layers,
            layout.layer_bytes,
            max(MAX_FRAME_BYTES, layout.layer_bytes),
        )

    @property
    def address(self) -> int:
        """Of the table."""
        return addressof(self._table)

    def open(self, page: int, generation: int, grant_id: int) -> None:
        """All of its layers."""
        self._generations[page] = generation
        self.release(page, range(self._num_layers))
        self._grants[page] = grant_id + 1

    def close(self, page: int) -> None:
        """All of its layers."""
        self._grants[page] = 0

    def take(self, page: int, layers: range) -> None:
        """They are there, or come already: positions in the block."""
        begin = page * self._num_layers
        self._taken[begin + layers.start : begin + layers.stop] = b"\1" * len(layers)

    def release(self, page: int, layers: range) -> None:
        """They did not come."""
        begin = page * self._num_layers
        self._taken[begin + layers.start : begin + layers.stop] = bytes(len(layers))


class OpenTransfers:
    """Of one sender: the grant of each of its latest transfers, and which would be new."""

    def __init__(self, most: int) -> None:
        """No more than `most` are opened at once."""
        self._most = most
        self._num_open = 0
        self._first_new = 0
        self._table = array("Q", bytes(8 * (1 + 2 * _NUM_TRANSFERS)))
        """first new one, then by remainder: number, and one more than its grant, or 0 if it is not open"""

    @property
    def address(self) -> int:
        """Of the table."""
        return self._table.buffer_info()[0]

    def open(self, transfer_id: int, grant_id: int) -> None:
        self._num_open += 1
        self.name(transfer_id)
        if 0 <= transfer_id < _MOST_NUMBER and 0 <= grant_id < _MOST_NUMBER:
            place = self._place(transfer_id)
            self._table[place], self._table[place + 1] = transfer_id, grant_id + 1

    def close(self, transfer_id: int) -> None:
        """It was open."""
        self._num_open -= 1
        self.name(transfer_id)
        place = self._place(transfer_id)
        if self._table[place] == transfer_id:
            self._table[place + 1] = 0

    def name(self, transfer_id: int) -> None:
        """It is not new any more, though it may never have been open."""
        self._first_new = max(self._first_new, transfer_id + 1)
        is_full = self._num_open >= self._most
        self._table[0] = _MOST_NUMBER if is_full else min(self._first_new, _MOST_NUMBER)

    @staticmethod
    def _place(transfer_id: int) -> int:
        return 1 + 2 * (transfer_id % _NUM_TRANSFERS)
