"""The pool that a messenger serves to other messengers: pages that they may write, blocks that they may read.

Owns: the interfaces that the owner of the pool implements. Does not know: connections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from messenger.rdma.cards import Cards
from messenger.shm.copy_table import CopyTable
from messenger.transport.exposures import Range
from messenger.transport.source import SourceSegment
from messenger.transport.transports import Traffic
from messenger.wire.identity import Identity
from messenger.wire.messages import CopySlot, PageTableOffsets, WriteEntry
from mooncake.config.sections import MessengerConfig
from mooncake.security.keys import ClusterKey


class WriteRefused(Exception):
    """A write may not be placed. The message is the reason that the sender gets."""


class GrantWriter(Protocol):
    """The interface through which a `WriteTarget` reaches a peer that writes to a grant."""

    name: str

    def revoke(self, grant_id: int, reason: str) -> None:
        """Tell the peer to stop writing to this grant."""

    def completed(self, grant_id: int) -> None:
        """Close the pages of this grant to the peer, because all of them are complete."""


class WriteTarget(Protocol):
    """The interface of the owner of pages to which remote writes go.

    Every `begin` that returns a view is followed by exactly one `complete` or `abandon`. Until then the page
    must not be given to another owner. These calls get the same `heads`: the KV heads whose bytes the entry
    has; None if the entry has all heads of this side.
    """

    def add_writer(self, grant_id: int, writer: GrantWriter) -> None:
        """Record a writer of the grant. Idempotent. Raises WriteRefused."""

    def begin(self, grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview | None:
        """Return the memory for the bytes of `entry`; None if these bytes are in place already.

        A sender repeats a write whose acknowledgement was lost with a connection.

        Raises WriteRefused if the bytes may not be placed. Of a refused write no byte has been placed, unless
        the sender places bytes itself (`Write.is_placed`, or over RDMA).
        """

    def expose(self, grant_id: int) -> tuple[list[tuple[int, Range]], Callable[[], None]]:
        """Return the incomplete pages of the grant with their ranges in the segment, and a callback.

        The pages are given to no other owner until the callback is called. Raises WriteRefused.
        """

    def is_open(self, grant_id: int) -> bool:
        """Return whether the grant still lacks bytes, and has not failed."""

    def complete(self, grant_id: int, entry: WriteEntry, heads: range | None) -> bool:
        """Record that the bytes of `entry` are placed and verified.

        Returns whether the grant is complete now. The writers of a complete grant have been told. Raises
        WriteRefused if the bytes are not wanted any more.
        """

    def abandon(self, grant_id: int, entry: WriteEntry, heads: range | None) -> None:
        """Give up `entry`: no more of its bytes will be placed. Its bytes in the page are invalid."""

    def remove_writer(self, grant_id: int, writer: GrantWriter, reason: str | None) -> None:
        """Record that the writer has ended.

        `reason`: why the writer ended before all its writes were complete; None if all are complete.
        """


@dataclass(frozen=True, slots=True)
class Readable:
    """Layers of a block, or a part of one layer, that stay in place until their lease ends."""

    index: int
    """The index of the block in the requested keys."""
    view: memoryview
    source_offset: int
    checksums: bytes


class ReadSource(Protocol):
    """The interface of the owner of blocks that other messengers may read.

    `layers` and `heads` are numbered as in the model, and exist here. `heads` is None for all heads;
    otherwise `layers` is a single layer.
    """

    async def lease(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]]:
        """Lease the blocks of `keys` that the pool has. Raises MooncakeError.

        Returns the blocks, and the callback that ends the lease.
        """

    def lease_now(
        self, keys: Sequence[bytes], layers: range, heads: range | None
    ) -> tuple[list[Readable], Callable[[], None]] | None:
        """Lease blocks as `lease` does, but at once. Raises MooncakeError.

        Returns None if leasing the blocks would take a while.
        """

    def count_read(self, keys: Sequence[bytes]) -> int:
        """Count blocks that a peer of this host has read in place. Returns how many of them are still stored.

        Raises MooncakeError.
        """

    def verify(self, keys: Sequence[bytes], layers: range) -> None:
        """Compare layers of these blocks with their checksums, and drop damaged blocks.

        Called after a reader has reported that its copy did not match the checksums.
        """


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """This side's segment and its copy table, opened to peers of this host.

    Peers write granted pages and read sealed pages in the segment.
    """

    copy_table: CopyTable
    fd: int
    """The writable descriptor of the segment."""
    copy_table_offset: int
    pages_offset: int
    page_stride: int
    num_pages: int
    page_table: PageTableOffsets | None = None
    """The offsets of the page table; None if peers cannot find blocks themselves.

    Peers find sealed blocks by these offsets.
    """

    def take_slot(self, pid: int) -> CopySlot | None:
        """Return a copy slot for a lane of the process `pid`; None if no slot is left."""
        number = self.copy_table.take_slot(pid)
        if number is None:
            return None
        token = self.copy_table.token(number)
        return CopySlot(
            number, token, self.copy_table_offset, self.pages_offset, self.page_stride, self.num_pages
        )


@dataclass(frozen=True, slots=True)
class ServedPool:
    """Everything that a messenger's lanes serve and need: identity, key, pages, blocks."""

    identity: Identity
    key: ClusterKey
    target: WriteTarget
    reads: ReadSource
    source: SourceSegment
    traffic: Traffic
    settings: MessengerConfig
    cards: Cards
    shared_segment: SharedSegment | None
    """The segment for peers of this host.

    It is None if such peers cannot write pages themselves, so that this side copies for them.
    """
