"""What a messenger offers to others: pages that they may write, blocks that they may read.

Owns: what its owner must be able to do. Does not know: connections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from messenger.rdma.cards import Cards
from messenger.rdma.windows import Range
from messenger.shm.copy_table import CopyTable
from messenger.transport.source import SourceSegment
from messenger.transport.transports import Traffic
from messenger.wire.identity import Identity
from messenger.wire.messages import CopySlot, PageTableOffsets, WriteEntry
from mooncake.config.sections import MessengerConfig
from mooncake.security.keys import ClusterKey


class WriteRefused(Exception):
    """A write may not be placed; the message is the reason the sender gets."""


class GrantWriter(Protocol):
    """A peer that has opened a transfer, as its target sees it."""

    name: str

    def revoke(self, grant_id: int, reason: str) -> None:
        """Tell the peer to stop writing to this grant."""


class WriteTarget(Protocol):
    """Owner of the pages that remote writes go to.

    Every `begin` that returns a view is followed by exactly one `complete` or `abandon`, and the page must
    not be given to anybody else in between. `heads`, the same in all three: the part of its layer that
    `entry` brings, or None if it brings all that this side has.
    """

    def open(self, grant_id: int, writer: GrantWriter) -> None:
        """A writer has announced itself. Idempotent. Raises WriteRefused."""

    def begin(self, grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview | None:
        """Where the bytes of `entry` go; None if they are there already: a lost connection may have kept the
        acknowledgement. Raises WriteRefused before a byte is placed."""

    def expose(self, grant_id: int) -> tuple[list[tuple[int, Range]], Callable[[], None]]:
        """The pages of the grant that are not complete, with their places in the segment. They are given to
        nobody else until what is returned with them is called. Raises WriteRefused."""

    def complete(self, grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
        """The bytes are there and verified. Whether they were the last. Raises WriteRefused (once) if nobody
        wants them any more."""

    def abandon(self, grant_id: int, entry: WriteEntry, heads: range | None) -> None:
        """Nothing more will be placed for `entry`; the bytes there are worth nothing."""

    def close(self, grant_id: int, writer: GrantWriter, reason: str | None) -> None:
        """The writer is through; `reason` says why if not all of its writes were completed."""


@dataclass(frozen=True, slots=True)
class Readable:
    """Layers of a block, or a part of one, that stay where they are until their lease ends."""

    index: int
    """into the keys that were asked for"""
    view: memoryview
    source_offset: int
    checksums: bytes


class ReadSource(Protocol):
    """Owner of the blocks that others may read.

    `layers` and `heads` are the model's, and there. With `heads`, which are not all, `layers` is one.
    """

    async def lease(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        """Those of `keys` that are there, and what ends their lease. Raises MooncakeError."""

    def lease_now(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]] | None:
        """The same, or None if that would take a while. Raises MooncakeError."""

    def was_read(self, keys: Sequence[bytes]) -> int:
        """Somebody of this host has read these blocks where they are. How many of them are there still.
        Raises MooncakeError."""


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """Where those of this host may write granted pages and read sealed ones themselves: our segment, with a
    copy_table in it."""

    copy_table: CopyTable
    fd: int
    """of the segment, writable"""
    copy_table_offset: int
    pages_offset: int
    page_stride: int
    num_pages: int
    page_table: PageTableOffsets | None = None
    """where sealed blocks can be found, if they can"""

    def take_slot(self, pid: int) -> CopySlot | None:
        """For a lane of that process; None if there is none left."""
        number = self.copy_table.take_slot(pid)
        if number is None:
            return None
        token = self.copy_table.token(number)
        return CopySlot(
            number, token, self.copy_table_offset, self.pages_offset, self.page_stride, self.num_pages
        )


@dataclass(frozen=True, slots=True)
class ServedPool:
    """What every lane needs: who we are, whom we let in, and what they may write and read."""

    identity: Identity
    key: ClusterKey
    target: WriteTarget
    reads: ReadSource
    source: SourceSegment
    traffic: Traffic
    settings: MessengerConfig
    cards: Cards
    shared_segment: SharedSegment | None
    """None: over shared memory we copy what is written to us"""
