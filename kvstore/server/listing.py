"""Descriptions of a pool: counters, lists of blocks, checks whether a block is intact.

Owns: descriptions of a store. Does not know: who asks.
"""

import asyncio
from collections.abc import Mapping

import numpy as np

from kvstore.pool.allocator import PageAllocator
from kvstore.pool.pages import PageState
from kvstore.protocol.answers import BlockInfo, Listing
from kvstore.server.store import Store
from messenger.sender.outgoing_session import OutgoingSession
from messenger.transport.transports import Number, PeerTraffic, Transport
from messenger.wire.checksums import layer_checksums
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import PeerStats, PoolStats, Tier, TierStats


def pool_stats(store: Store, *, check_integrity: bool) -> PoolStats:
    """Return all counters.

    `check_integrity`: check every page now; else `integrity` and `num_orphaned` are results of the last
    check.
    """
    if check_integrity:
        store.check()
    pool, traffic = store.pool, store.traffic
    states = pool.table.count()
    return PoolStats(
        num_pages=pool.table.num_pages,
        num_free=states[PageState.FREE],
        num_reserved=states[PageState.RESERVED],
        num_sealed=states[PageState.SEALED],
        num_quarantined=states[PageState.QUARANTINED],
        num_used=pool.num_used_pages,
        num_reservations=len(pool.reservations),
        num_leases=len(pool.leases),
        num_pins=len(pool.pins),
        block_bytes=store.segment.layout.block_bytes,
        eviction_policy=pool.allocator.policy.value,
        tiers=_tiers(store),
        num_misses=dict(pool.hits.num_misses),
        num_dropped=pool.counters.num_dropped,
        num_removed=pool.counters.num_removed,
        num_demotions=store.ssd.counters.num_demotions if store.ssd is not None else 0,
        num_promotions=store.mover.num_promotions,
        num_expired_leases=pool.counters.num_expired_leases,
        num_checksum_failures=traffic.num_checksum_failures,
        num_orphaned=store.num_orphaned,
        sent_bytes=by_name(traffic.sent_bytes),
        received_bytes=by_name(traffic.received_bytes),
        num_unauthenticated=traffic.num_unauthenticated,
        peers={peer.name: _peer_stats(peer, traffic.by_peer[peer.name]) for peer in store.peers.all},
        integrity=store.problem,
    )


def _tiers(store: Store) -> dict[Tier, TierStats]:
    pool, ssd = store.pool, store.ssd
    tiers = {
        Tier.DRAM: TierStats(
            num_slots=pool.table.num_pages,
            num_blocks=len(pool.allocator.index),
            num_hits=pool.hits.num_hits[Tier.DRAM],
            num_evictions=pool.evictor.num_evictions,
            num_checksum_failures=pool.counters.num_dropped,
        )
    }
    if ssd is not None:
        tiers[Tier.SSD] = TierStats(
            num_slots=ssd.num_slots,
            num_blocks=ssd.num_blocks,
            num_hits=pool.hits.num_hits[Tier.SSD],
            num_evictions=ssd.num_evictions,
            num_checksum_failures=ssd.counters.num_checksum_failures,
            num_errors=ssd.counters.num_read_errors + ssd.counters.num_write_errors,
            is_healthy=len(ssd.disks) == len(store.config.ssd_dirs)
            and all(disk.is_healthy for disk in ssd.disks),
        )
    elif store.config.ssd_dirs:  # none could be opened
        tiers[Tier.SSD] = TierStats(0, 0, 0, 0, 0, is_healthy=False)
    return tiers


def by_name(num_bytes: dict[Transport, int]) -> dict[str, int]:
    """Return the numbers by the names of the transports, as messages need them."""
    return {transport.value: count for transport, count in num_bytes.items()}


def _peer_stats(peer: OutgoingSession, moved: PeerTraffic) -> PeerStats:
    return PeerStats(
        peer.throughput.pending_bytes,
        peer.throughput.bandwidth_bytes_per_s,
        num_streams=len(peer.lanes),
        sent_bytes=_used(moved.sent_bytes),
        received_bytes=_used(moved.received_bytes),
        busy_s=_used(moved.busy_s),
    )


def _used(amounts: Mapping[Transport, Number]) -> dict[str, Number]:
    """Return the entries of transports that have been used. (Two messengers mostly use one transport.)"""
    return {transport.value: amount for transport, amount in amounts.items() if amount}


def list_blocks(store: Store, call_id: int, cursor: int, max_blocks: int) -> Listing:
    """Return up to `max_blocks` copies of blocks, from the place `cursor` on.

    The places are numbered from 0: first DRAM pages, then the slots of each disk. Raises PoolError for an
    invalid `cursor` or `max_blocks`.
    """
    if cursor < 0 or max_blocks < 1:
        raise PoolError(
            f"{max_blocks} blocks from {cursor} on; ask for at least one, from 0 or a `next_cursor` on"
        )
    allocators = [(Tier.DRAM, store.pool.allocator)]
    allocators += [(Tier.SSD, disk.allocator) for disk in store.ssd.disks] if store.ssd is not None else []
    blocks: list[BlockInfo] = []
    first_place = 0
    for tier, allocator in allocators:
        end_place = first_place + allocator.table.num_pages
        if cursor < end_place:
            start = cursor - first_place
            sealed = start + np.flatnonzero(allocator.table.states[start:] == PageState.SEALED)
            num_left = max_blocks - len(blocks)
            blocks += [_info(tier, allocator, page) for page in sealed[:num_left].tolist()]
            if len(sealed) > num_left:
                return Listing(call_id, blocks, first_place + int(sealed[num_left]))
            cursor = end_place
        first_place = end_place
    return Listing(call_id, blocks, None)


def _info(tier: Tier, allocator: PageAllocator, page: int) -> BlockInfo:
    return BlockInfo(
        allocator.table.key(page), tier, int(allocator.table.num_uses[page]), int(allocator.num_users[page])
    )


async def verify_block(store: Store, key: BlockKey) -> bool | None:
    """Compare all copies of a block with their checksums, and drop damaged copies.

    This does not count as a use of the block. Returns False if a copy is damaged, and True if all copies are
    intact. In all other cases returns None: there is no copy, or a copy cannot be read now.
    """
    results = [*await _verify_in_dram(store, key), *await _verify_on_ssd(store, key)]
    if False in results:
        return False
    return None if None in results or not results else True


async def _verify_in_dram(store: Store, key: BlockKey) -> list[bool]:
    """Verify the copy in DRAM, if there is one. Returns a list of at most one result."""
    pool, segment = store.pool, store.segment
    page = pool.find(key)
    if page is None:
        return []
    expected = pool.table.checksums(page, range(pool.table.num_layers))
    reading = asyncio.get_running_loop().run_in_executor(
        None, layer_checksums, segment.page_view(page), segment.layout.layer_bytes
    )
    pool.holds.add(page)
    reading.add_done_callback(lambda _: pool.holds.remove(page, used=False))
    is_intact = await asyncio.shield(reading) == expected
    if not is_intact and pool.find(key) == page:  # else the page may have another block now
        pool.drop(page)
    return [is_intact]


async def _verify_on_ssd(store: Store, key: BlockKey) -> list[bool | None]:
    """Verify the copy on each disk that has one.

    Returns the results: None for a copy that cannot be read now.
    """
    return await store.ssd.verify(key) if store.ssd is not None else []
