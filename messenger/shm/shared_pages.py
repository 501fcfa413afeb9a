"""Writing to granted pages of a peer on this host: one pass for bytes and checksums, in one native call.

Owns: what is mapped of the peer to be written, our seat at its board. Does not know: the connection.
"""

import struct

from messenger.shm.board import BOARD_BYTES, NUM_SEATS, native
from messenger.wire.checksums import CHECKSUM_BYTES, SHORT_LAYER_BYTES, address_of
from messenger.wire.messages import Seat, Write
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout


class SharedPages:
    """One lane's way to place bytes. `leave` it when the lane ends."""

    def __init__(self, segment: memoryview, seat: Seat, layout: KVLayout, source: memoryview) -> None:
        """`segment`: the peer's, writable; `layout`: of its blocks; `source`: what is sent from.

        Raises TransferError for a seat outside of the segment, or one that was given up meanwhile.
        """
        end = seat.pages_offset + seat.num_pages * seat.page_stride
        is_inside = (
            0 <= seat.pages_offset <= end <= len(segment)
            and 0 <= seat.board_offset <= len(segment) - BOARD_BYTES
            and seat.board_offset % CHECKSUM_BYTES == 0
            and seat.page_stride >= layout.block_bytes
        )
        library = native()
        if not is_inside or not 0 <= seat.number < NUM_SEATS or library is None:
            raise TransferError(f"{seat} cannot be taken in a segment of {len(segment)} bytes")
        self._native = library
        self._segment = segment  # keeps it mapped
        self._source = source
        self._seat = seat
        self._layout = layout
        self._layer_bytes, self._block_bytes = layout.layer_bytes, layout.block_bytes
        self._board = address_of(segment) + seat.board_offset
        self._target_address = address_of(segment)
        self._source_address = address_of(source)
        if not library.sit_down(self._board, seat.number, seat.ticket):
            raise TransferError(f"seat {seat.number} was given up meanwhile")

    def place(self, write: Write, layer_bytes: int, fd: int = -1, word: bytes = b"") -> int | None:
        """Places the bytes of all entries, `layer_bytes` of each layer. None unless they are there, intact,
        and were wanted all the time: then it is the receiver's to copy them, or to say why not.

        Else `word` is sent over `fd`, if there is one, as far as that can be at once; how many bytes of it.
        """
        if layer_bytes <= SHORT_LAYER_BYTES:
            return None
        slices: list[int] = []
        skipped_bytes = write.skipped_bytes(self._layout)
        for entry in write.entries:
            begin = skipped_bytes + entry.layer_begin * self._layer_bytes
            num_bytes = entry.num_layers * layer_bytes
            if not (
                0 <= entry.page < self._seat.num_pages
                and 0 <= begin < begin + num_bytes <= self._block_bytes
                and 0 <= entry.source_offset <= len(self._source) - num_bytes
                and len(entry.checksums) == entry.num_layers * CHECKSUM_BYTES
            ):
                return None
            target = self._seat.pages_offset + entry.page * self._seat.page_stride + begin
            slices += (target, entry.source_offset, entry.num_layers)
        num_left: int = self._native.place(
            self._board,
            self._seat.number,
            write.grant_id,
            self._target_address,
            self._source_address,
            struct.pack(f"<{len(slices)}Q", *slices),
            len(write.entries),
            layer_bytes,
            b"".join([entry.checksums for entry in write.entries]),
            fd,
            word,
            len(word),
        )
        return None if num_left < 0 else num_left

    def leave(self) -> None:
        """The seat is the owner's to give again."""
        self._native.leave_seat(self._board, self._seat.number)
