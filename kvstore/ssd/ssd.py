"""The SSD tier: blocks in one slab file on each disk, below DRAM.

A block is written to its slot before its record, and a block that is read is verified before it is used. So
no half-written block is ever used. A disk that does not work is suspended, and the pool goes on without it:
requests never fail because of a disk.

Owns: which disk has which block, writes and reads in flight. Does not know: pages of DRAM, who asks.
"""

import itertools
import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.events.batches import EventLog
from kvstore.ssd.disk import Disk, SlotWrite, Suspended
from kvstore.ssd.slab import Slab
from messenger.wire.checksums import layer_checksums
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SsdCounters:
    """Totals since the tier was opened, in blocks."""

    num_demotions: int = 0
    num_write_errors: int = 0
    num_read_errors: int = 0
    num_checksum_failures: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The record of a block that was read intact."""

    checksums: bytes
    num_uses: int


class SsdTier:
    """The pool's tier on disks, the `LowerTier` of DRAM.

    `on_health` is called when a disk is suspended or resumes.
    """

    def __init__(
        self,
        slabs: Sequence[Slab],
        policy: EvictionPolicy,
        *,
        depth: int,
        timeout_s: float,
        events: EventLog | None = None,
    ) -> None:
        self.counters = SsdCounters()
        self.on_lost: Callable[[BlockKey], None] = lambda _: None
        """Callback for every block that leaves this tier."""
        self.on_health: Callable[[], None] = lambda: None
        self._events = events
        self.disks = [
            Disk(
                slab,
                policy,
                depth=depth,
                timeout_s=timeout_s,
                on_removed=self._removed,
                on_health=lambda: self.on_health(),
            )
            for slab in slabs
        ]
        self._turns = itertools.cycle(self.disks)
        self._writing: dict[BlockKey, SlotWrite] = {}

    @property
    def is_accepting(self) -> bool:
        return any(disk.is_healthy for disk in self.disks)

    @property
    def num_blocks(self) -> int:
        return sum(len(disk.allocator.index) for disk in self.disks)

    @property
    def num_evictions(self) -> int:
        return sum(disk.num_evictions for disk in self.disks)

    @property
    def num_slots(self) -> int:
        return sum(disk.slab.num_slots for disk in self.disks)

    def keys(self) -> Iterator[BlockKey]:
        """Yield the key of every block, also of blocks on suspended disks."""
        return itertools.chain.from_iterable(disk.allocator.index for disk in self.disks)

    def holds(self, key: BlockKey) -> bool:
        """Return whether a working disk has this block."""
        return self._find(key) is not None

    async def store(
        self, key: BlockKey, page: memoryview, checksums: bytes, position: int, num_uses: int
    ) -> bool:
        """Write the sealed block in `page` (a whole page stride). Returns whether the tier holds it now.

        The page must not change before the call returns.
        """
        if self.holds(key):
            return True
        if key in self._writing:
            return False  # another call writes the block, and may fail
        disk = self._healthy_disk()
        slot = disk.take_slot() if disk is not None else None
        if disk is None or slot is None:
            return False
        write = self._writing[key] = SlotWrite(disk, slot)
        try:
            await disk.store(write, page, key, checksums, position, num_uses)
        except Suspended:
            return False
        except OSError:
            self.counters.num_write_errors += 1
            return False
        else:
            if write.is_wanted:
                disk.allocator.table.set_checksums(slot, range(disk.allocator.table.num_layers), checksums)
                disk.allocator.seal(slot, key, position, num_uses)
                self.counters.num_demotions += 1
                if self._events is not None and self._num_copies(key) == 1:
                    self._events.stored(Tier.SSD, key)
            return write.is_wanted
        finally:
            del self._writing[key]
            disk.give_back(slot)

    async def load(self, key: BlockKey, page: memoryview, layer_bytes: int) -> Loaded | None:
        """Read a block into `page` (a whole page stride). Returns its record; None if it cannot be read.

        A copy that is damaged or cannot be read is removed. The caller must not cancel the call, as a thread
        writes to the page until the call returns.
        """
        found = self._find(key)
        if found is None:
            return None
        disk, slot = found
        table = disk.allocator.table
        expected = table.checksums(slot, range(table.num_layers))
        actual = b""

        def read() -> None:
            nonlocal actual
            disk.slab.read(slot, page)
            actual = layer_checksums(page[: table.num_layers * layer_bytes], layer_bytes)

        disk.allocator.add_user([slot])
        try:
            await disk.run(read)
        except Suspended:
            return None
        except OSError:
            self.counters.num_read_errors += 1
            self._drop(disk, slot, key)
            return None
        else:
            if actual != expected or not table.is_intact(slot):
                self.counters.num_checksum_failures += 1
                log.error("SSD tier: a block in %s is damaged and dropped", disk.slab.path)
                self._drop(disk, slot, key)
                return None
            table.use(slot)
            return Loaded(expected, int(table.num_uses[slot]))
        finally:
            disk.give_back(slot)

    async def verify(self, key: BlockKey) -> list[bool | None]:
        """Compare each copy of a block with its checksums. A damaged copy is dropped.

        The reads do not count as uses of the block.

        Returns:
            For each disk that has the block: whether the copy is intact; None if it cannot be read now.
        """
        copies = [(disk, slot) for disk in self.disks if (slot := disk.allocator.index.get(key)) is not None]
        return [await self._is_intact(disk, slot, key) for disk, slot in copies]

    async def _is_intact(self, disk: Disk, slot: int, key: BlockKey) -> bool | None:
        if not disk.is_healthy or disk.allocator.index.get(key) != slot:
            return None
        table, layer_bytes = disk.allocator.table, disk.slab.header.layout.layer_bytes
        expected = table.checksums(slot, range(table.num_layers))
        actual = b""

        def read() -> None:
            nonlocal actual
            with mmap.mmap(-1, disk.slab.slot_bytes) as scratch, memoryview(scratch) as block:
                disk.slab.read(slot, block)
                with block[: table.num_layers * layer_bytes] as layers:
                    actual = layer_checksums(layers, layer_bytes)

        disk.allocator.add_user([slot])
        try:
            await disk.run(read)
        except (OSError, Suspended):
            return None
        else:
            is_intact = actual == expected and table.is_intact(slot)
            if not is_intact:
                self.counters.num_checksum_failures += 1
                self._drop(disk, slot, key)
            return is_intact
        finally:
            for ended in disk.allocator.remove_user([slot], used=False):
                disk.allocator.free(ended)

    def position(self, key: BlockKey) -> int:
        """Return the position (`Block.position`) of a block that this tier holds."""
        found = self._find(key)
        assert found is not None
        disk, slot = found
        return int(disk.allocator.table.positions[slot])

    def forget(self, key: BlockKey) -> bool:
        """Remove a block from every disk, and stop its demotion. Returns whether a disk had the block."""
        if (write := self._writing.get(key)) is not None:
            write.is_wanted = False
            write.disk.slab.erase(write.slot, lambda: True)
        copies = [(disk, slot) for disk in self.disks if (slot := disk.allocator.index.get(key)) is not None]
        for disk, slot in copies:
            disk.drop(slot)
        return bool(copies)

    def close(self) -> None:
        for disk in self.disks:
            disk.close()

    def problems(self) -> Iterator[str]:
        """Yield contradictions in the tables, after a check of every slot."""
        for disk in self.disks:
            yield from (f"{disk.slab.path}: {problem}" for problem in disk.allocator.problems())

    def _find(self, key: BlockKey) -> tuple[Disk, int] | None:
        for disk in self.disks:
            if disk.is_healthy and (slot := disk.allocator.index.get(key)) is not None:
                return disk, slot
        return None

    def _healthy_disk(self) -> Disk | None:
        turns = itertools.islice(self._turns, len(self.disks))
        return next((disk for disk in turns if disk.is_healthy), None)

    def _drop(self, disk: Disk, slot: int, key: BlockKey) -> None:
        if disk.allocator.index.get(key) == slot:
            disk.drop(slot)

    def _num_copies(self, key: BlockKey) -> int:
        """Return the number of disks that have a block.

        There are several if the block was stored again while its first disk was suspended.
        """
        return sum(key in disk.allocator.index for disk in self.disks)

    def _removed(self, key: BlockKey) -> None:
        if self._num_copies(key):
            return
        if self._events is not None:
            self._events.removed(Tier.SSD, key)
        self.on_lost(key)
