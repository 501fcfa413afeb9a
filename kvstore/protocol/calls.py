"""Messages of the users of an instance's part of the pool to its messenger.

The users are a *worker* (`Attach`) and any number of *clients* (`Connect`). Both send the same messages. On a
Unix socket a message is one msgpack packet, and the user maps the segment. Clients on other hosts use TCP,
where a message is one frame (`frames`), after both sides have proved that they know the cluster's key
(`greeting`). These clients map nothing, so blocks travel after `PutBlocks` and `GotBlocks`.

A call carries a `call_id` and is answered by exactly one message with the same id, possibly much later.
`Commit`, `EndLease`, `Prefetch`, `DescribeTokens`, `DeviceBlocks`, `StopFetch` and `DropIdle` are no calls:
such messages are frequent or ordered, and an error in any of them ends the session.

Owns: the vocabulary of these messages. Does not know: the answers (`answers`), sockets.
"""

from typing import Annotated

import msgspec

from kvstore.pool.pages import COPIER_SERIAL
from messenger.sender.requests import Urgency
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Grant, PoolShard
from mooncake.versions import Versions

MAX_MESSAGE_BYTES = 384 * 1024
"""The most bytes of a message or answer.

A message of this size fits into the socket buffer that Linux grants by default. 4,096 keys take 72 KiB.
"""
COMMIT_BYTES = 1 << 17
"""The most bytes of checksums in one commit message; larger commits are split."""

SPOKEN = Versions(1, 2)
"""The versions of this protocol that a messenger and its users speak (`mooncake.versions`).

A messenger and its worker are of one release.
"""

Serial = Annotated[int, msgspec.Meta(ge=0, lt=COPIER_SERIAL)]

# -- first messages ---------------------------------------------------------------------------------


class Attach(msgspec.Struct, tag=True, frozen=True):
    """The first message of a worker. Answered by `Attached`, with the segment's descriptor, or `CallFailed`.

    `serial` numbers the connections of a process to the pool. A process that connects again under an old
    serial has stopped writing to the pages that it had reserved under this serial.
    """

    call_id: int
    instance: str
    incarnation: int
    fingerprint: str
    layout: KVLayout
    serial: Serial


class Connect(msgspec.Struct, tag=True, frozen=True):
    """The first message of a client. Answered by `Connected`, on a Unix socket with the segment's descriptor.

    `fingerprint` and `layout` describe the client's blocks; None accepts the pool's. A pool without a layout
    takes the layout of a client that `may_format`: an engine, or a client whose user has given the layout. A
    client that has learned the layout from an earlier pool may not format. Clients of version 1 do not name
    the versions that they speak.
    """

    call_id: int
    fingerprint: str | None
    layout: KVLayout | None
    serial: Serial
    may_format: bool = False
    oldest_version: int = 1
    newest_version: int = 1


# -- reservations: pages to write -------------------------------------------------------------------


class ReservePages(msgspec.Struct, tag=True, frozen=True):
    """Reserve a page for each key, and `num_private` pages without a key. Answered by `Reservation`.

    Blocks that are sealed already are in the reservation with their pages. The pages count towards the share
    of `tenant`; an empty name stands for no tenant.
    """

    call_id: int
    keys: list[BlockKey]
    num_private: int
    tenant: str = ""


class AwaitSpace(msgspec.Struct, tag=True, frozen=True):
    """Wait until a page has become free or evictable since `space_epoch`. Answered by `Done`.

    `space_epoch`: the `space_epoch` of the `CallFailed` that reported the full pool.
    """

    call_id: int
    space_epoch: int


class Commit(msgspec.Struct, tag=True, frozen=True):
    """Declare that layers `[layer_begin, layer_end)` of `pages` are written.

    `checksums`: little-endian xxh3-64, page by page, within a page layer by layer. The message is ignored if
    the reservation has been released meanwhile.
    """

    reservation_id: int
    layer_begin: int
    layer_end: int
    pages: list[int]
    checksums: bytes


class SealBlocks(msgspec.Struct, tag=True, frozen=True):
    """Declare that all pages of this reservation are written: seal their blocks, and release the reservation.

    `checksums`: little-endian xxh3-64 of the pages whose blocks were not sealed before, page by page, within
    a page layer by layer. Answered by `Done`.
    """

    call_id: int
    reservation_id: int
    checksums: bytes


class DescribeTokens(msgspec.Struct, tag=True, frozen=True):
    """Describe the tokens of the reservation's keys from `first_block` on, as little-endian uint32 token ids.

    Only sent if `Attached.wants_token_ids`. The tokens of a block are sent with its KV event, and not kept.
    """

    reservation_id: int
    first_block: int
    token_ids: bytes


class DeviceBlocks(msgspec.Struct, tag=True, frozen=True):
    """Report blocks that the engine's own prefix cache has from now on, or no longer has.

    The cache is empty when the worker attaches.
    """

    keys: list[BlockKey]
    is_stored: bool


class OpenGrant(msgspec.Struct, tag=True, frozen=True):
    """Open this reservation's incomplete pages to remote writes. Answered by `Granted`."""

    call_id: int
    reservation_id: int


class StartSend(msgspec.Struct, tag=True, frozen=True):
    """Stream this reservation's blocks to `grant`. Answered by `Done` at once.

    `ref_text` names the transfer in logs.
    """

    call_id: int
    reservation_id: int
    grant: Grant
    ref_text: str


class AwaitSent(msgspec.Struct, tag=True, frozen=True):
    """Wait until the receiver has acknowledged everything. Answered by `Done`."""

    call_id: int
    reservation_id: int


class AwaitArrived(msgspec.Struct, tag=True, frozen=True):
    """Wait until every granted page is complete and verified. Answered by `Done`."""

    call_id: int
    reservation_id: int


class FetchBlocks(msgspec.Struct, tag=True, frozen=True):
    """Fetch these blocks of the reservation from another pool. No layer of them may have arrived before.

    `sources`: the shards of a group that together hold these blocks, or the shard of one pool that holds
    them. Layers arrive in order, each for all blocks before the next layer. `LayersFetched` reports the
    progress.

    Answered by `Fetched` when nothing more will arrive. Until then the caller may write only blocks that
    `LayersFetched` reports as given up.
    """

    call_id: int
    reservation_id: int
    sources: list[PoolShard]
    blocks: list[int]
    urgency: Urgency = Urgency.LATENCY


class StopFetch(msgspec.Struct, tag=True, frozen=True):
    """End the fetch of this reservation early. The fetch is answered as soon as nothing writes its pages."""

    reservation_id: int


class Release(msgspec.Struct, tag=True, frozen=True):
    """Release a reservation. Answered by `Done`, even if there is no such reservation."""

    call_id: int
    reservation_id: int


# -- leases: blocks to read, and what else can be done with keys ------------------------------------


class Lookup(msgspec.Struct, tag=True, frozen=True):
    """Ask for the tiers of these blocks. Answered by `Located`.

    Leases nothing and does not count as a use.
    """

    call_id: int
    keys: list[BlockKey]


class LeaseBlocks(msgspec.Struct, tag=True, frozen=True):
    """Lease these blocks in DRAM for `ttl_s` seconds, promoted from SSD if need be. Answered by `Leased`."""

    call_id: int
    keys: list[BlockKey]
    ttl_s: float


class EndLease(msgspec.Struct, tag=True, frozen=True):
    """End a lease. Ignored if the lease has ended."""

    lease_id: int


class Prefetch(msgspec.Struct, tag=True, frozen=True):
    """Begin to promote blocks to DRAM, for a later reservation or lease."""

    keys: list[BlockKey]


class PinBlocks(msgspec.Struct, tag=True, frozen=True):
    """Pin these blocks for `ttl_s` seconds. Answered by `Count`: the number of pinned blocks.

    `hard` pins keep their blocks always, soft pins as long as other blocks can be evicted. Pins outlive the
    connection. A block has at most one pin. A new pin replaces an earlier pin, but a soft pin never replaces
    a hard pin.
    """

    call_id: int
    keys: list[BlockKey]
    ttl_s: float
    hard: bool


class UnpinBlocks(msgspec.Struct, tag=True, frozen=True):
    """Unpin these blocks. Answered by `Count`: the number of removed pins.

    `hard`: whether hard pins are removed too.
    """

    call_id: int
    keys: list[BlockKey]
    hard: bool = True


class RemoveBlocks(msgspec.Struct, tag=True, frozen=True):
    """Remove these blocks (None: all) from DRAM and SSD. Answered by `Count`. Reads in flight may finish."""

    call_id: int
    keys: list[BlockKey] | None


class DropIdle(msgspec.Struct, tag=True, frozen=True):
    """Remove blocks from DRAM and SSD, except blocks that are in use in DRAM or pinned."""

    keys: list[BlockKey]


class ListBlocks(msgspec.Struct, tag=True, frozen=True):
    """List up to `max_blocks` blocks from `cursor` on. Answered by `Listing`. The first `cursor` is 0."""

    call_id: int
    cursor: int
    max_blocks: int


class VerifyBlocks(msgspec.Struct, tag=True, frozen=True):
    """Read all copies of these blocks in DRAM and on SSD, and drop damaged copies. Answered by `Verified`.

    A copy is damaged if its bytes do not match its checksums.
    """

    call_id: int
    keys: list[BlockKey]


class GetBlocks(msgspec.Struct, tag=True, frozen=True):
    """Ask for layers `[layer_begin, layer_end)` of these blocks, over TCP only. Answered by `GotBlocks`."""

    call_id: int
    keys: list[BlockKey]
    layer_begin: int
    layer_end: int


class PutBlocks(msgspec.Struct, tag=True, frozen=True):
    """Store the whole blocks that follow, over TCP only. Answered by `Done` when all of them can be found.

    `checksums`: little-endian xxh3-64, block by block, within a block layer by layer. Waits up to
    `timeout_s` for room.
    """

    call_id: int
    keys: list[BlockKey]
    checksums: bytes
    timeout_s: float


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Ask for counters. Answered by `Stats`. `check_integrity`: first check every page."""

    call_id: int
    check_integrity: bool


Waiting = AwaitSpace | AwaitSent | AwaitArrived | FetchBlocks
"""The calls that may wait for another worker, client or pool.

Of the other calls, `VerifyBlocks` takes the time to read all blocks that it names, and `PinBlocks` may wait
for the disk. All others are answered within seconds.
"""
Call = (
    Attach
    | Connect
    | ReservePages
    | SealBlocks
    | OpenGrant
    | StartSend
    | Waiting
    | Release
    | Lookup
    | LeaseBlocks
    | PinBlocks
    | UnpinBlocks
    | RemoveBlocks
    | ListBlocks
    | VerifyBlocks
    | GetStats
)
Notice = Commit | DescribeTokens | EndLease | Prefetch | StopFetch | DropIdle | DeviceBlocks
ToPool = Call | Notice
ToRemotePool = ToPool | GetBlocks | PutBlocks
