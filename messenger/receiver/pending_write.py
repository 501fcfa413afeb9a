"""A write whose bytes are being received, and the heads for which a write has bytes.

Owns: that a write is placed as a whole or not at all. Does not know: how bytes arrive, acknowledgements.
"""

from messenger.receiver.served_pool import WriteRefused, WriteTarget
from messenger.wire.messages import Write, WriteEntry
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout


class HeadRanges:
    """The heads of each layer that a sender and this side have in common."""

    def __init__(self, ours: KVLayout, theirs: KVLayout | None) -> None:
        """Compare both layouts; `theirs` is None if the sender has no blocks."""
        self._layout = ours
        self._layer_bytes = ours.layer_bytes
        self.has_same_heads = theirs is not None and theirs.heads == ours.heads
        """Whether both ends have the same heads, so that frames do not name any."""

    def of(self, heads: tuple[int, int] | None) -> tuple[range | None, int]:
        """Return the heads that a frame names, and their bytes in each layer.

        Heads are numbered as in the model; None stands for all heads of this side, in `heads` and in the
        result. Whether this side has the heads is not checked.

        Raises TransferError for an empty range, or if the frame names no heads although the heads of the two
        sides differ.
        """
        layout = self._layout
        if heads is None:
            if not self.has_same_heads:
                raise TransferError(f"which heads of [{layout.heads.start}, {layout.heads.stop}) is not said")
            return None, self._layer_bytes
        begin, end = heads
        if begin >= end:
            raise TransferError(f"heads [{begin}, {end}) are no heads")
        part = range(begin, end)
        return (None if part == layout.heads else part), (end - begin) * layout.head_bytes


class PendingWrite:
    """A write whose bytes are being received, until `complete` or `abandon`.

    A later `abandon` does nothing.
    """

    def __init__(self, target: WriteTarget, write: Write, heads: range | None, layer_bytes: int) -> None:
        self.write = write
        self.layer_bytes = layer_bytes
        """The number of bytes that arrive for each layer."""
        self.entries: list[WriteEntry] = []
        """Entries whose bytes are to be received, each into its view."""
        self.views: list[memoryview] = []
        self._target = target
        self._heads = heads
        self._begun: list[WriteEntry] = []

    def begin(self, *, is_on_wire: bool) -> None:
        """Find the pages of the write. Raises WriteRefused.

        Bytes that are already in their pages are received and discarded if they come over the wire.
        """
        for entry in self.write.entries:
            if entry.num_layers < 1:
                raise WriteRefused(f"layers [{entry.layer_begin}, {entry.layer_end}) are no layers")
            view = self._target.begin(self.write.grant_id, entry, self._heads)
            if view is not None:
                self._begun.append(entry)
            elif is_on_wire:
                view = memoryview(bytearray(entry.num_layers * self.layer_bytes))
            else:
                continue
            self.entries.append(entry)
            self.views.append(view)

    def complete(self) -> bool:
        """Record that all entries are placed. Returns whether the grant is complete. Raises WriteRefused."""
        is_last = False
        while self._begun:
            is_last |= self._target.complete(self.write.grant_id, self._begun.pop(), self._heads)
        return is_last

    def abandon(self) -> None:
        while self._begun:
            self._target.abandon(self.write.grant_id, self._begun.pop(), self._heads)
