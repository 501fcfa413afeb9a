"""Instances' pools in numbers and addresses: where blocks are, and where they may be written.

Owns: these values, which messages carry. Does not know: messages, how a pool works (`kvstore`).
"""

from enum import StrEnum

import msgspec

from mooncake.messages.blocks import KVLayout
from mooncake.messages.quantities import BytesPerSecond, Count, Port, Seconds


class MessengerAddress(msgspec.Struct, frozen=True):
    """Where an instance's messenger listens. `host_id` tells whether two messengers share memory."""

    instance: str
    incarnation: int
    host_id: str
    unix_path: str
    tcp_endpoints: tuple[tuple[str, Port], ...]
    """each reaches it; several are used together"""
    event_endpoints: tuple[str, str] = ("", "")
    """where KV events are published, and where replays and snapshots are asked for"""


class PoolShard(msgspec.Struct, frozen=True):
    """A messenger, and which layers and heads of a model's blocks its pool holds."""

    messenger: MessengerAddress
    layout: KVLayout


class GrantedPage(msgspec.Struct, frozen=True, array_like=True):
    """One page of the granting pool that the prompt's block `block_index` may be written to."""

    block_index: Count
    page: Count
    generation: Count


class Grant(msgspec.Struct, frozen=True):
    """The decode side's answer to a reservation: the blocks it lacks, and where they may be written.

    Only these travel. A grant ends when all of its pages have arrived or it is revoked. A tensor-parallel
    group grants once a rank: `others` are those of the ranks behind the first, each for its own KV heads.
    """

    grant_id: int
    messenger: MessengerAddress
    pages: list[GrantedPage]
    others: tuple["Grant", ...] = ()


class Capacity(msgspec.Struct, frozen=True):
    """What an instance can hold at all, in pages of one block."""

    num_pool_pages: Count
    num_device_pages: Count


class Tier(StrEnum):
    """Where in an instance's part of the pool a block is. One block may be in several."""

    DRAM = "dram"
    SSD = "ssd"


COMPUTED, REMOTE = "computed", "remote"
PREFILL_SOURCES = (COMPUTED, *(tier.value for tier in Tier), REMOTE)
"""computed, reused from a tier of the own pool, or fetched from another instance's"""


class TierStats(msgspec.Struct, frozen=True):
    """One tier of an instance's part of the pool, in blocks."""

    num_slots: Count
    """blocks that it can hold"""
    num_blocks: Count
    num_hits: Count
    num_evictions: Count
    num_checksum_failures: Count
    num_errors: Count = 0
    """reads and writes that failed"""
    is_healthy: bool = True


class PeerStats(msgspec.Struct, frozen=True):
    """What is under way between this messenger and another, at this one's request."""

    in_flight_bytes: Count
    bandwidth_bytes_per_s: BytesPerSecond | None
    """lately, while something was under way; None before the first transfers"""
    num_streams: Count
    sent_bytes: dict[str, Count] = {}
    """by transport, as the two below: totals since this messenger started"""
    received_bytes: dict[str, Count] = {}
    busy_s: dict[str, Seconds] = {}
    """in which something was under way"""


class PoolStats(msgspec.Struct, frozen=True):
    """An instance's part of the pool. Counts are pages (blocks), totals are since its messenger started.

    `integrity` says what is wrong when pages are not each accounted for exactly once, as seen when that was
    last looked at; `num_orphaned` is the number of such pages.
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
    """by reason"""
    num_dropped: Count
    num_removed: Count
    num_demotions: Count
    num_promotions: Count
    num_expired_leases: Count
    num_checksum_failures: Count
    """blocks that arrived damaged from other messengers"""
    num_orphaned: Count
    sent_bytes: dict[str, Count]
    received_bytes: dict[str, Count]
    num_strangers: Count = 0
    """connections from whoever has not the cluster's key"""
    peers: dict[str, PeerStats] = {}
    """by instance"""
    integrity: str | None = None
