"""Writes to granted pages of a peer on this host: one native call copies and hashes in one pass.

Owns: the writable mapping of the peer's segment, this lane's slot in its copy table. Does not know: the
connection.
"""

import struct

from messenger.shm.copy_table import COPY_TABLE_BYTES, NUM_COPY_SLOTS, native
from messenger.wire.checksums import CHECKSUM_BYTES, SHORT_LAYER_BYTES, address_of
from messenger.wire.messages import CopySlot, Write
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout


class SharedPages:
    """The placement of one lane's bytes in the peer's pages. The lane's outlet calls `leave` at its end."""

    def __init__(self, segment: memoryview, slot: CopySlot, layout: KVLayout, source: memoryview) -> None:
        """Take `slot` of the peer's writable `segment`.

        The peer's blocks have `layout`; bytes come from `source`. Raises TransferError for a slot that is
        outside of the segment, or was given up meanwhile.
        """
        end = slot.pages_offset + slot.num_pages * slot.page_stride
        is_inside = (
            0 <= slot.pages_offset <= end <= len(segment)
            and 0 <= slot.copy_table_offset <= len(segment) - COPY_TABLE_BYTES
            and slot.copy_table_offset % CHECKSUM_BYTES == 0
            and slot.page_stride >= layout.block_bytes
        )
        library = native()
        if not is_inside or not 0 <= slot.number < NUM_COPY_SLOTS or library is None:
            raise TransferError(f"{slot} cannot be taken in a segment of {len(segment)} bytes")
        self._native = library
        self._segment = segment  # keeps it mapped
        self._source = source
        self._copy_slot = slot
        self._layout = layout
        self._layer_bytes, self._block_bytes = layout.layer_bytes, layout.block_bytes
        self._copy_table = address_of(segment) + slot.copy_table_offset
        self._target_address = address_of(segment)
        self._source_address = address_of(source)
        if not library.occupy_slot(self._copy_table, slot.number, slot.token):
            raise TransferError(f"slot {slot.number} was given up meanwhile")

    def place(self, write: Write, layer_bytes: int, fd: int = -1, word: bytes = b"") -> int | None:
        """Place the bytes of all entries, `layer_bytes` bytes of each layer, and then send `word` over `fd`.

        `word` is sent without blocking, and only if all bytes are in place and intact, and the grant is
        still open.

        Returns:
            The number of bytes of `word` that were sent. None if the bytes are not in place; then the
            receiver has to copy them or refuse them.
        """
        if layer_bytes <= SHORT_LAYER_BYTES:
            return None
        slices: list[int] = []
        skipped_bytes = write.skipped_bytes(self._layout)
        for entry in write.entries:
            begin = skipped_bytes + entry.layer_begin * self._layer_bytes
            num_bytes = entry.num_layers * layer_bytes
            if not (
                0 <= entry.page < self._copy_slot.num_pages
                and 0 <= begin < begin + num_bytes <= self._block_bytes
                and 0 <= entry.source_offset <= len(self._source) - num_bytes
                and len(entry.checksums) == entry.num_layers * CHECKSUM_BYTES
            ):
                return None
            target = self._copy_slot.pages_offset + entry.page * self._copy_slot.page_stride + begin
            slices += (target, entry.source_offset, entry.num_layers)
        num_sent_bytes: int = self._native.place(
            self._copy_table,
            self._copy_slot.number,
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
        return None if num_sent_bytes < 0 else num_sent_bytes

    def leave(self) -> None:
        """Return the copy slot to its owner."""
        self._native.leave_slot(self._copy_table, self._copy_slot.number)
