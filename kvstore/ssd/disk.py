"""One disk of the SSD tier: the slots of its slab, its threads, and its health.

A disk that fails, or does not answer in time, is suspended for a while, longer each time.

Owns: slots and the order of their eviction, the disk's health. Does not know: other disks, pages of DRAM.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.pool.allocator import PageAllocator
from kvstore.pool.pages import FREE, QUARANTINED
from kvstore.ssd.slab import Record, Slab
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import BlockKey

log = logging.getLogger(__name__)

_GONE = (FREE, QUARANTINED)
"""The states of slots whose block cannot be found."""
_USES = 1 << 62
"""The modulus for last uses that are read from a slab.

The disk continues to count from the slab's largest last use. A damaged slab may have any number there, and
the count must not overflow.
"""
_FIRST_PAUSE_S = 1.0
"""Seconds for which a disk is suspended after its first failure."""
_LONGEST_PAUSE_S = 60.0
"""Seconds of the longest suspension; each failure doubles the time."""


class Suspended(Exception):
    """The disk was suspended before the work could begin."""


class Disk:
    """One disk's slab, with its slots, threads and health.

    The constructor adopts the blocks of a slab that existed before: a `PageAllocator` adopts a copy of the
    slab's table.
    """

    def __init__(
        self,
        slab: Slab,
        policy: EvictionPolicy,
        *,
        depth: int,
        timeout_s: float,
        on_removed: Callable[[BlockKey], None],
        on_health: Callable[[], None],
    ) -> None:
        self.slab = slab
        # The slab's own table lies in a file: a disk that hangs may block threads that write to the table.
        self.allocator = PageAllocator(slab.table.copy(), policy, on_removed)
        self._last_use = int(slab.table.last_uses.max(initial=0)) % _USES
        self.is_healthy = True
        self.num_evictions = 0
        self._timeout_s = timeout_s
        self._on_health = on_health
        self._threads = ThreadPoolExecutor(depth, thread_name_prefix=f"slab-{slab.path.parent.name}")
        self._num_idle_threads = depth
        self._queue: deque[asyncio.Future[None]] = deque()
        """Futures of work that waits for a thread. A future is done when its work gets a thread."""
        self._num_overdue = 0
        self._pause_s = _FIRST_PAUSE_S

    async def run(self, work: Callable[[], None]) -> None:
        """Run blocking work on the slab in a thread, and wait for its end.

        The disk is suspended if the work exceeds the deadline or raises OSError. The caller must not cancel
        the call. Raises that OSError, or Suspended if the work was not begun.
        """
        await self._take_thread()
        loop = asyncio.get_running_loop()
        overdue = False

        def too_slow() -> None:
            nonlocal overdue
            overdue = True
            self._num_overdue += 1
            self.suspend(f"no answer within {self._timeout_s:g} s")

        deadline = loop.call_later(self._timeout_s, too_slow)
        try:
            await loop.run_in_executor(self._threads, work)
        except OSError as error:
            self.suspend(str(error))
            raise
        else:
            if not overdue:
                self._pause_s = _FIRST_PAUSE_S
        finally:
            deadline.cancel()
            self._num_overdue -= overdue
            self._give_back_thread()

    async def _take_thread(self) -> None:
        """Wait for a thread. Raises Suspended if the disk is suspended meanwhile.

        The wait is caused by other work, and does not count against the deadline of the work that waits.
        """
        if self._num_idle_threads:
            self._num_idle_threads -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            await turn

    def _give_back_thread(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():  # else the task that waited was cancelled
                turn.set_result(None)
                return
        self._num_idle_threads += 1

    def suspend(self, reason: str) -> None:
        """Suspend the disk, longer after each failure. `reason` is logged."""
        if not self.is_healthy:
            return
        self.is_healthy = False
        if self._pause_s == _FIRST_PAUSE_S:
            log.error("SSD tier: %s is suspended: %s; the pool goes on without it", self.slab.path, reason)
        asyncio.get_running_loop().call_later(self._pause_s, self._resume)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        while self._queue:  # the waiting work holds pages that requests need
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_exception(Suspended())
        self._on_health()

    def _resume(self) -> None:
        if self._num_overdue:
            asyncio.get_running_loop().call_later(self._pause_s, self._resume)
            return
        self.is_healthy = True
        self._on_health()

    def take_slot(self) -> int | None:
        """Return a slot to write, now RESERVED; None if no slot can be had.

        The coldest block is evicted if no slot is free.
        """
        if not self.allocator.num_free:
            coldest = self.allocator.coldest()
            if coldest is None:
                return None  # every block is being read or written
            self.allocator.evict(coldest)
            self.num_evictions += 1
        return self.allocator.take(1)[0]

    def give_back(self, slot: int) -> None:
        """End a user's claim on `slot`."""
        for ended in self.allocator.remove_user([slot]):
            self.allocator.free(ended)

    async def store(
        self,
        write: "SlotWrite",
        block: memoryview,
        key: BlockKey,
        checksums: bytes,
        position: int,
        num_uses: int,
    ) -> None:
        """Write a block to the disk, and then its record if `write` is still wanted.

        `block` is as for `Slab.write`. Raises the errors of `run`.
        """
        self._last_use += 1
        record = Record(key, checksums, self._last_use, position, num_uses)
        await self.run(lambda: self.slab.store(write.slot, block, record, lambda: write.is_wanted))

    def drop(self, slot: int) -> None:
        """Remove the block in `slot` from the index, and erase its record."""
        self.allocator.unseal(slot)
        if not self.allocator.num_users[slot]:
            self.allocator.free(slot)
        self.erase(slot)

    def erase(self, slot: int) -> None:
        """Erase the record in `slot` at once, unless the slot has got another block meanwhile.

        Thus a removed block is not found after a crash.
        """
        self.slab.erase(slot, lambda: self.allocator.table.state_of[slot] in _GONE)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class SlotWrite:
    """A block that is being written to a slot."""

    disk: Disk
    slot: int
    is_wanted: bool = True
    """Whether the block is still wanted: False if it was removed meanwhile."""
