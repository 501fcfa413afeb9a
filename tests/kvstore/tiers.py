"""Slabs in memory whose disks do what a test tells them to, and a store that uses them."""

import asyncio
import contextlib
import errno
import functools
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kvstore.events.batches import EventLog
from kvstore.pool.claims import PageReservation
from kvstore.pool.pages import PageTable, record_bytes
from kvstore.pool.pool import Pool
from kvstore.pool.segment import ALIGNMENT, Segment, SegmentHeader
from kvstore.server.device_tier import DeviceTier
from kvstore.server.store import Store
from kvstore.ssd.mover import Mover
from kvstore.ssd.slab import Record
from kvstore.ssd.ssd import SsdTier
from kvstore.transfer.grants import Grants
from messenger.rdma.cards import Cards
from messenger.transport.transports import Traffic
from messenger.wire.checksums import layer_checksums
from messenger.wire.identity import Identity
from mooncake.config.policies import EvictionPolicy
from mooncake.config.sections import KVCacheConfig
from mooncake.errors import PoolFullError
from mooncake.messages.blocks import KEY_BYTES, BlockKey, KVLayout
from mooncake.messages.pools import MessengerAddress
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16")
STRIDE_BYTES = 4096
"""The bytes of a page or slot. A block of this layout is smaller."""
ADDRESS = MessengerAddress("node", 1, "host", "/nowhere", (("127.0.0.1", 1),))
OWNER = 1


def key_of(number: int) -> BlockKey:
    return number.to_bytes(KEY_BYTES, "big")


def block_of(key: BlockKey) -> bytes:
    """Return the bytes of the block that is stored under `key`."""
    return np.random.default_rng(int.from_bytes(key, "big")).bytes(LAYOUT.block_bytes)


def checksums_of(key: BlockKey) -> bytes:
    return layer_checksums(memoryview(block_of(key)), LAYOUT.layer_bytes)


class FakeSlab:
    """A replacement of a `Slab`. Its reads and writes are called from threads."""

    def __init__(self, num_slots: int, name: str = "disk", layout: KVLayout = LAYOUT) -> None:
        self.path = Path(f"/{name}/node.slab")
        self.header = SegmentHeader.plan((num_slots + 1) * STRIDE_BYTES + (1 << 20), FINGERPRINT, layout)
        self.table = PageTable.in_memory(num_slots, layout.num_layers)
        self.num_slots = num_slots
        self.slot_bytes = STRIDE_BYTES
        self.bytes = bytearray(num_slots * STRIDE_BYTES)
        self.error: OSError | None = None
        """The error with which reads and writes end; None for none."""
        self.delay_s = 0.0
        """The seconds that each read and write takes."""
        self.num_reads = self.num_writes = self.num_at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._hanging: list[threading.Event] = []
        self.go_on()

    def hang(self) -> None:
        """Make reads and writes that begin from now on hang until `go_on`."""
        self._gate = threading.Event()
        self._hanging.append(self._gate)

    def hang_no_more(self) -> None:
        """Let new reads and writes end. Those that hang already go on hanging."""
        self._gate = threading.Event()
        self._gate.set()

    def go_on(self) -> None:
        self.hang_no_more()
        while self._hanging:
            self._hanging.pop().set()

    @property
    def is_slow(self) -> bool:
        """Whether reads and writes may take long, on any machine."""
        return bool(self._hanging or self.delay_s)

    def fail(self, error_code: int = errno.EIO) -> None:
        self.error = OSError(error_code, "it does not want to")

    def recover(self) -> None:
        self.error = None

    def damage(self, slot: int) -> None:
        self.bytes[slot * STRIDE_BYTES + LAYOUT.layer_bytes + 5] ^= 1

    def write(self, slot: int, block: memoryview) -> None:
        assert len(block) == STRIDE_BYTES
        with self._lock:
            self.num_writes += 1
        self._work()
        self.bytes[slot * STRIDE_BYTES : (slot + 1) * STRIDE_BYTES] = block

    def store(
        self, slot: int, block: memoryview, record: Record, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self.table.clear(slot)
        self.table.reserve(slot)
        self.write(slot, block)
        if is_wanted():
            self.table.set_checksums(slot, range(self.table.num_layers), record.checksums)
            self.table.seal(slot, record.key, record.last_use, record.position, record.num_uses)

    def erase(self, slot: int, is_free: Callable[[], bool]) -> None:
        if is_free():
            self.table.clear(slot)

    def read(self, slot: int, block: memoryview) -> None:
        assert len(block) == STRIDE_BYTES
        with self._lock:
            self.num_reads += 1
        given_to_the_kernel = block[0:]
        self._work()
        given_to_the_kernel[:] = self.bytes[slot * STRIDE_BYTES : (slot + 1) * STRIDE_BYTES]

    def _work(self) -> None:
        gate = self._gate
        with self._lock:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            time.sleep(self.delay_s)
            assert gate.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
        finally:
            with self._lock:
                self.num_at_once -= 1


def ssd_tier(
    *slabs: FakeSlab,
    policy: EvictionPolicy = EvictionPolicy.LRU,
    depth: int = 4,
    timeout_s: float = DEADLINE_S,
    events: EventLog | None = None,
) -> SsdTier:
    """Return an SSD tier that does not take a slab for slow because the machine is busy."""
    tier = SsdTier(slabs, policy, depth=depth, timeout_s=timeout_s, events=events)  # type: ignore[arg-type]
    for disk, slab in zip(tier.disks, slabs, strict=True):
        disk.suspend = functools.partial(_suspend, slab, disk.suspend)  # type: ignore[method-assign]
    return tier


def _suspend(slab: FakeSlab, suspend: Callable[[str], None], reason: str) -> None:
    if slab.is_slow or not reason.startswith("no answer"):
        suspend(reason)


def is_settled(ssd: SsdTier) -> bool:
    """Return whether no slot is in use. Raises an error if the tier contradicts itself."""
    assert list(ssd.problems()) == []
    return not any(disk.allocator.num_users.any() for disk in ssd.disks)


def buffer(content: bytes = b"") -> memoryview:
    """Return memory for a page, with zeros behind `content`."""
    view = memoryview(mmap.mmap(-1, STRIDE_BYTES))
    view[: len(content)] = content
    return view


class Running:
    """A store with a small segment and fake slabs, and a client of it. `running` makes it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.pool = store.pool
        self.mover = store.mover
        self.ssd = store.ssd

    async def reserve(self, keys: Sequence[BlockKey], num_private: int = 0) -> PageReservation:
        """Reserve pages as clients do, and wait while the pool is full."""
        while True:
            try:
                return self.pool.reserve(OWNER, keys, num_private)
            except PoolFullError:
                await self.store.wait_for_space(self.pool.evictor.space_epoch)

    async def put(self, *keys: BlockKey) -> None:
        """Store the blocks of `keys`, and leave them to eviction."""
        reservation = await self.reserve(keys)
        for block in reservation.blocks:
            if not block.found:
                assert block.key is not None
                self.store.segment.page_view(block.page)[:] = block_of(block.key)
                layers = range(LAYOUT.num_layers)
                self.pool.record_arrival(block, layers, checksums_of(block.key))
        self.pool.release(reservation.reservation_id)

    async def get(self, key: BlockKey, *, patiently: bool = True) -> bytes | None:
        """Return a block, which is brought to DRAM if necessary; None if the store has none."""
        async with self.mover.keep_promoted([key], patiently=patiently):
            return self.read(key)

    def read(self, key: BlockKey) -> bytes | None:
        """Return a block if it is in DRAM, else None."""
        lease = self.pool.lease(OWNER, [key], self.store.now_s() + DEADLINE_S)
        try:
            (page,) = lease.pages
            return bytes(self.store.segment.page_view(page)) if page is not None else None
        finally:
            self.pool.end_lease(lease.lease_id)

    def has(self, key: BlockKey) -> bool:
        """Return whether any tier has a block."""
        return self.pool.locate([key]) != [None]

    def is_settled(self) -> bool:
        """Return whether nothing is in use or in flight. Raises an error if the store contradicts itself."""
        assert self.pool.check_integrity() is None
        assert self.ssd is None or list(self.ssd.problems()) == []
        is_used = self.pool.num_used_pages or len(self.pool.reservations) or len(self.pool.leases)
        return not is_used and (self.ssd is None or is_settled(self.ssd))


@contextlib.asynccontextmanager
async def running(
    num_pages: int,
    *slabs: FakeSlab,
    low_watermark: int = 0,
    high_watermark: int = 0,
    depth: int = 4,
    timeout_s: float = DEADLINE_S,
    promotion_timeout_s: float = DEADLINE_S,
    policy: EvictionPolicy = EvictionPolicy.LRU,
) -> AsyncIterator[Running]:
    """Make a context with a store. At its end nothing may be in use. `timeout_s` is that of a disk."""
    fd = os.memfd_create("segment")
    try:
        os.truncate(fd, 3 * ALIGNMENT + num_pages * (STRIDE_BYTES + record_bytes(LAYOUT.num_layers)))
        segment = Segment.format(fd, FINGERPRINT, LAYOUT)
    finally:
        os.close(fd)
    assert segment.num_pages == num_pages
    events, space = EventLog(8), asyncio.Event()
    ssd = ssd_tier(*slabs, policy=policy, depth=depth, timeout_s=timeout_s) if slabs else None
    pool = Pool(
        segment.page_table(),
        policy=policy,
        events=events,
        lower=ssd,
        low_watermark=low_watermark,
        on_space=space.set,
        on_pressure=lambda: mover.wake(),
    )
    if ssd is not None:
        ssd.on_lost, ssd.on_health = pool.evictor.left_lower_tier, pool.evictor.changed
    async with asyncio.TaskGroup() as tasks:
        mover = Mover(
            pool,
            segment,
            ssd,
            tasks,
            space=space,
            high_watermark=high_watermark,
            max_demotions=depth * max(1, len(slabs)),
            promotion_timeout_s=promotion_timeout_s,
        )
        store = Store(
            config=KVCacheConfig(ssd_dirs=[slab.path.parent for slab in slabs]),
            identity=Identity("node", 1, "host", FINGERPRINT, LAYOUT),
            address=ADDRESS,
            segment=segment,
            pool=pool,
            ssd=ssd,
            mover=mover,
            grants=Grants(pool, segment, ADDRESS, None),
            peers=SimpleNamespace(all=[]),  # type: ignore[arg-type]  # nothing is sent
            sessions=None,  # type: ignore[arg-type]
            traffic=Traffic(),
            cards=Cards([]),
            events=events,
            device=DeviceTier(events),
            copy_table=None,
            space=space,
        )
        moving = tasks.create_task(mover.run())
        try:
            test = Running(store)
            yield test
            await until(test.is_settled)
        finally:
            moving.cancel()
            for slab in slabs:
                slab.go_on()
            store.close()
            del pool, store  # views of the segment


async def until(condition: Callable[[], object]) -> None:
    """Return as soon as `condition` is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)
