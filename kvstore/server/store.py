"""An open pool part of an instance: both tiers, and the modules that work on them.

Owns: how the parts fit together, their opening and their closing. Does not know: who uses the pool.
"""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.events.batches import EventLog
from kvstore.pool.pages import PageState, PageWriter
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.server.device_tier import DeviceTier
from kvstore.ssd.mover import Mover
from kvstore.ssd.slab import Slab
from kvstore.ssd.ssd import SsdTier
from kvstore.transfer.grants import Grants
from kvstore.transfer.reads import Reads
from messenger.rdma.cards import Cards
from messenger.receiver.receiver import Sessions
from messenger.receiver.served_pool import ServedPool
from messenger.sender.outgoing_sessions import OutgoingSessions
from messenger.shm.copy_table import CopyTable
from messenger.transport.source import SourceSegment
from messenger.transport.tls import Tls
from messenger.transport.transports import Traffic
from messenger.wire.identity import Identity
from mooncake.config.sections import KVCacheConfig
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import MessengerAddress, Tier
from mooncake.node.process_config import MessengerProcess

log = logging.getLogger(__name__)

_TICK_S = 1.0
"""Seconds between two checks for expired leases and pins."""
_WATCH_AGAIN_S = 60.0
"""Seconds before another attempt to watch a process that cannot be watched now."""
_CHECK_INTERVAL_S = 30.0
"""The least number of seconds between two checks of all pages."""


@dataclass(slots=True)
class Store:
    """An open pool part: its segment, its slabs, and the modules that work on them. Made by `open_store`."""

    config: KVCacheConfig
    identity: Identity
    address: MessengerAddress
    segment: Segment
    pool: Pool
    ssd: SsdTier | None
    mover: Mover
    grants: Grants
    peers: OutgoingSessions
    sessions: Sessions
    traffic: Traffic
    cards: Cards
    events: EventLog
    device: DeviceTier
    copy_table: CopyTable | None
    space: asyncio.Event
    """The event that is set whenever a page becomes free or evictable."""
    problem: str | None = None
    """The problem that the latest check of every page found; None if the check found no problem."""
    num_orphaned: int = 0
    """Pages that nothing will ever free (`Pool.orphans`), as of the latest check."""

    def now_s(self) -> float:
        """Return the time in seconds by the clock of leases and pins."""
        return asyncio.get_running_loop().time()

    def is_on_ssd_only(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether SSD has a block of `keys` that DRAM lacks."""
        return self.ssd is not None and Tier.SSD in self.pool.locate(keys)

    def found_prefix(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the leading blocks that some tier has.

        Blocks after a missing block are of no use to a prefill.
        """
        located = zip(keys, self.pool.locate(keys), strict=True)
        return [key for key, _ in itertools.takewhile(lambda block: block[1] is not None, located)]

    def remove(self, keys: Sequence[BlockKey] | None) -> int:
        """Remove these blocks from DRAM and SSD; all blocks if `keys` is None.

        Returns the number of removed blocks. Blocks in the engine's own prefix cache (device tier) stay.
        """
        if keys is not None:
            return sum(self.mover.remove(key) for key in keys)
        everything = {*self.pool.allocator.index, *(self.ssd.keys() if self.ssd is not None else ())}
        num_removed = sum(self.mover.remove(key) for key in everything)
        self.events.cleared()
        self.device.change(self.device.keys, is_stored=True)
        return num_removed

    def drop_idle(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks from DRAM and SSD, except blocks that are in use in DRAM or pinned."""
        for key in keys:
            page = self.pool.find(key)
            if page is None or (self.pool.allocator.is_idle(page) and key not in self.pool.pins):
                self.mover.remove(key)

    def snapshot(self) -> Iterator[tuple[Tier, list[BlockKey]]]:
        """Yield every block that can be found, by tier."""
        yield Tier.DRAM, list(self.pool.allocator.index)
        if self.ssd is not None:
            yield Tier.SSD, list(dict.fromkeys(self.ssd.keys()))
        if self.device.keys:
            yield Tier.DEVICE, self.device.keys

    async def wait_for_space(self, space_epoch: int) -> None:
        """Wait until pages have become free or evictable since `space_epoch`."""
        while self.pool.evictor.space_epoch <= space_epoch:
            self.space.clear()
            await self.space.wait()

    # -- upkeep -----------------------------------------------------------------------------------

    async def tend(self, tasks: asyncio.TaskGroup) -> None:
        """Do the upkeep until cancelled.

        Leases and pins end at their deadlines, pages of former writers are freed when the writers have ended,
        and all pages are checked when the pool is idle.
        """
        for writer in self.pool.holds.former_writers:
            tasks.create_task(self._await_end(writer))
        seen = checked = self.pool.num_changes
        next_check_s = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = self.now_s()
            self.pool.expire(now_s)
            is_idle, seen = seen == self.pool.num_changes, self.pool.num_changes
            if is_idle and checked != seen and now_s >= next_check_s:
                self.check()
                checked, next_check_s = seen, now_s + _CHECK_INTERVAL_S

    async def settle(self) -> None:
        """Move the segment into huge pages, lock it in memory, and then register it for RDMA.

        The segment is locked as far as the kernel allows. RDMA comes last, because registered memory cannot
        be moved any more, and because huge pages are registered fast. The work runs while requests are
        served, and takes minutes in a large segment. On a machine without RDMA cards the work is not urgent,
        and pauses after each chunk for as long as the chunk took. Raises ConfigError if RDMA is demanded and
        the segment cannot be registered.
        """
        loop = asyncio.get_running_loop()
        is_huge = was_moved = True
        for start in self.segment.huge_chunks():
            started_s = loop.time()
            is_moved = await loop.run_in_executor(None, self.segment.use_huge_pages, start)
            is_huge &= is_moved
            if not is_moved and not was_moved:
                break  # one failure may be due to a page that is being sent
            was_moved = is_moved
            if not self.cards.names:
                await asyncio.sleep(loop.time() - started_s)
        is_locked = await loop.run_in_executor(None, self.segment.lock)
        log.info("segment: huge pages %s, locked in memory %s", is_huge, is_locked)
        await self.cards.register(self.segment.buffer)

    def check(self) -> None:
        """Check every page of DRAM and, if there is no problem, every SSD slot. Record the findings."""
        problem = self.pool.check_integrity()
        if problem is None and self.ssd is not None:
            problem = "; ".join(self.ssd.problems()) or None
        if problem is not None and problem != self.problem:
            log.error("pages are not all accounted for: %s", problem)
        self.problem = problem
        self.num_orphaned = len(self.pool.orphans())

    async def _await_end(self, writer: PageWriter) -> None:
        """Free the pages of a former writer (`Holds.former_writers`) once this writer cannot write any more.

        An ordinary writer can write until its process ends, a copier until its copy ends. Pages of a process
        that cannot be watched stay quarantined until the process connects again.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        if writer.is_copier and self.copy_table is not None:
            self.copy_table.await_former(writer.pid, ended.set)
        while not ended.is_set():
            try:
                process = os.pidfd_open(writer.pid)
            except ProcessLookupError:
                break
            except OSError as error:
                log.warning("cannot tell whether process %d still writes: %s", writer.pid, error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _WATCH_AGAIN_S)
                continue
            try:
                loop.add_reader(process, ended.set)
                await ended.wait()
            finally:
                loop.remove_reader(process)
                os.close(process)
        self.pool.holds.writer_gone(writer)

    def close(self) -> None:
        if self.ssd is not None:
            self.ssd.close()


def open_store(
    config: MessengerProcess,
    segment: Segment,
    address: MessengerAddress,
    traffic: Traffic,
    events: EventLog,
    tls: Tls | None,
    cards: Cards,
    tasks: asyncio.TaskGroup,
) -> Store:
    """Return the store with the blocks in segment and slabs adopted, and start the tasks that work on it.

    Raises ConfigError if a directory for SSD cannot be used, MismatchError if a slab is of another format,
    model or layout.
    """
    kvcache, settings = config.kvcache, config.settings
    identity = Identity(
        config.instance, config.incarnation, address.host_id, segment.fingerprint, segment.layout
    )
    space = asyncio.Event()
    ssd = _open_ssd(config, segment, events)
    shared_segment = segment.shared_segment(config.segment_fd)
    table = segment.page_table()
    copy_table = shared_segment.copy_table if shared_segment is not None else None
    copiers = [PageWriter.copier(pid) for pid in copy_table.former_copiers] if copy_table is not None else []
    # Each process that was copying may be writing any granted page, but the table names one writer a page.
    # So the first copier is entered in the table, and `keep_aside` adds the others.
    for copier in copiers[:1]:
        table.assign(copier)
    catalogue = segment.catalogue()
    pool = Pool(
        table,
        policy=kvcache.eviction,
        events=events,
        lower=ssd,
        low_watermark=int(kvcache.low_watermark * segment.num_pages),
        on_sealed=catalogue.note if catalogue is not None else lambda pages: None,
        on_space=space.set,
        on_pressure=lambda: mover.wake(),
    )
    mover = Mover(
        pool,
        segment,
        ssd,
        tasks,
        space=space,
        high_watermark=int(kvcache.high_watermark * segment.num_pages),
        max_demotions=kvcache.ssd_depth * max(1, len(ssd.disks) if ssd is not None else 0),
        promotion_timeout_s=kvcache.ssd_timeout_s,
    )
    if ssd is not None:
        ssd.on_lost = pool.evictor.left_lower_tier
        ssd.on_health = pool.evictor.changed
    for copier in copiers:
        pool.holds.keep_aside(copier)
    grants = Grants(pool, segment, address, copy_table)
    source = SourceSegment.of(config.segment_fd, segment.buffer)
    peers = OutgoingSessions(
        tasks,
        source,
        traffic,
        identity=identity,
        key=config.cluster_key,
        tls=tls,
        settings=settings,
        cards=cards,
    )
    reads = Reads(pool, mover, segment, asyncio.get_running_loop().time)
    sessions = Sessions(
        ServedPool(
            identity, config.cluster_key, grants, reads, source, traffic, settings, cards, shared_segment
        )
    )
    store = Store(
        kvcache,
        identity,
        address,
        segment,
        pool,
        ssd,
        mover,
        grants,
        peers,
        sessions,
        traffic,
        cards,
        events,
        DeviceTier(events),
        copy_table,
        space,
    )
    log.info(
        "pool of %d pages: %d blocks adopted in DRAM, %d of %d slots on SSD",
        segment.num_pages,
        pool.table.count()[PageState.SEALED],
        ssd.num_blocks if ssd is not None else 0,
        ssd.num_slots if ssd is not None else 0,
    )
    tasks.create_task(mover.run())
    tasks.create_task(store.tend(tasks))
    tasks.create_task(store.settle())
    return store


def _open_ssd(config: MessengerProcess, segment: Segment, events: EventLog) -> SsdTier | None:
    """Return the SSD tier over the directories whose disks work; None if there are none.

    Raises ConfigError and MismatchError as `Slab.open` does.
    """
    kvcache, slabs = config.kvcache, []
    for directory in kvcache.ssd_dirs:
        try:
            slab = Slab.open(
                directory, config.instance, int(kvcache.ssd_bytes), segment.fingerprint, segment.layout
            )
        except OSError as error:
            log.error("SSD tier: %s is not used: %s; the pool goes on without it", directory, error)
        else:
            slabs.append(slab)
    if not slabs:
        return None
    return SsdTier(
        slabs, kvcache.eviction, depth=kvcache.ssd_depth, timeout_s=kvcache.ssd_timeout_s, events=events
    )
