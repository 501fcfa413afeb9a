"""Values about instances' pools: addresses, grants, counters.

Owns: these values, which messages carry. Does not know: messages, how a pool works (`kvstore`).
"""

from enum import StrEnum

import msgspec

from mooncake.messages.blocks import KVLayout
from mooncake.messages.quantities import BytesPerSecond, Count, Port, PositiveCount, Seconds


class MessengerAddress(msgspec.Struct, frozen=True):
    """The addresses of an instance's messenger. Messengers with the same `host_id` can share memory."""

    instance: str
    incarnation: int
    host_id: str
    unix_path: str
    tcp_endpoints: tuple[tuple[str, Port], ...]
    """The TCP addresses of the messenger, which are used together."""
    event_endpoints: tuple[str, str] = ("", "")
    """The endpoint of KV events, and the endpoint of replays and snapshots."""


class PoolShard(msgspec.Struct, frozen=True):
    """A messenger, and the shard of a model's blocks that its pool holds."""

    messenger: MessengerAddress
    layout: KVLayout


class PrefixSource(msgspec.Struct, frozen=True):
    """The shards of the instance that is believed to hold the first `num_blocks` blocks of a prompt."""

    shards: tuple[PoolShard, ...]
    num_blocks: int


class GrantedPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of the granting pool to which the prompt's block `block_index` may be written."""

    block_index: Count
    page: Count
    generation: Count


class Grant(msgspec.Struct, frozen=True):
    """The permission to write missing blocks of a prompt to named pages of a decode instance's pool.

    Every member of the prefill group may use the grant, for its own layers or heads. A grant ends when blocks
    have arrived in all of its pages, or when it is revoked. In a tensor-parallel group each rank grants its
    own KV heads: `others` are the grants of the later ranks.
    """

    grant_id: int
    messenger: MessengerAddress
    pages: list[GrantedPage]
    others: tuple["Grant", ...] = ()


class Capacity(msgspec.Struct, frozen=True):
    """The capacity of an instance: pages of one block each, and requests in its decode batch."""

    num_pool_pages: Count
    num_device_pages: Count
    max_batch: PositiveCount


class Tier(StrEnum):
    """The tiers in which an instance may have a block. A block may be in several tiers."""

    DRAM = "dram"
    SSD = "ssd"
    DEVICE = "device"
    """The prefix cache that an engine keeps by itself, and whose blocks no other engine can use.

    DRAM and SSD are the instance's part of the pool.
    """


COMPUTED, REMOTE = "computed", "remote"
PREFILL_SOURCES = (COMPUTED, *(tier.value for tier in Tier), REMOTE)
"""The sources of a prompt's KVCache: computed, a tier of the own pool, or another instance's pool."""


class TierStats(msgspec.Struct, frozen=True):
    """Counters of one tier of an instance's part of the pool, in blocks."""

    num_slots: Count
    """The number of blocks that the tier can hold."""
    num_blocks: Count
    num_hits: Count
    num_evictions: Count
    num_checksum_failures: Count
    num_errors: Count = 0
    """The number of reads and writes that failed."""
    is_healthy: bool = True


class PeerStats(msgspec.Struct, frozen=True):
    """The transfers with another messenger that this messenger has begun."""

    in_flight_bytes: Count
    bandwidth_bytes_per_s: BytesPerSecond | None
    """The recent bandwidth in bytes a second while bytes were in flight; None before the first transfers."""
    num_streams: Count
    sent_bytes: dict[str, Count] = {}
    """Bytes sent, by transport: a total since this messenger started, like the two fields below."""
    received_bytes: dict[str, Count] = {}
    busy_s: dict[str, Seconds] = {}
    """Seconds with bytes in flight, by transport."""


class PoolStats(msgspec.Struct, frozen=True):
    """Counters of an instance's part of the pool: numbers of pages, or of the blocks in them.

    `num_reservations`, `num_leases`, `num_pins` and `num_expired_leases` count claims. Totals count since the
    messenger of the part started.

    `integrity` says what the last check of pages and SSD slots found wrong; None if nothing. `num_orphaned`
    is the number of pages whose users and claims differed in number at this check. Such a page never becomes
    free.
    """

    num_pages: Count
    num_free: Count
    num_reserved: Count
    num_sealed: Count
    num_quarantined: Count
    num_used: Count
    num_reservations: Count
    num_leases: Count
    num_pins: Count
    block_bytes: Count
    eviction_policy: str
    tiers: dict[Tier, TierStats]
    num_misses: dict[str, Count]
    """Look-ups of missing blocks, by reason."""
    num_dropped: Count
    num_removed: Count
    num_demotions: Count
    num_promotions: Count
    num_expired_leases: Count
    num_checksum_failures: Count
    """The number of blocks that arrived damaged from other messengers."""
    num_orphaned: Count
    sent_bytes: dict[str, Count]
    received_bytes: dict[str, Count]
    num_unauthenticated: Count = 0
    """The number of connections from peers without the cluster key."""
    peers: dict[str, PeerStats] = {}
    """The transfers with other messengers, by instance."""
    integrity: str | None = None
