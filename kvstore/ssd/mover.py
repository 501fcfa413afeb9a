"""The mover, which keeps pages free and moves blocks between DRAM and SSD in the background.

When fewer pages are free than the low watermark, the mover frees pages up to the high watermark, coldest
first. A block that SSD holds is evicted at once. Other blocks are demoted, that is written to SSD first.
Without SSD, or while every disk is suspended, all blocks are evicted at once. A request that needs blocks
from SSD waits only for their promotion, and for pages.

Owns: demotions and promotions in flight, removal from both tiers. Does not know: requests, disks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.pool.claims import PageReservation
from kvstore.pool.pages import SEALED
from kvstore.pool.pool import Pool
from kvstore.pool.segment import Segment
from kvstore.ssd.ssd import SsdTier
from mooncake.errors import PoolFullError
from mooncake.messages.blocks import BlockKey

log = logging.getLogger(__name__)

_RETRY_S = 0.05
"""Seconds of the pause after a demotion that no disk took."""


@dataclass(slots=True, eq=False)
class _Promotion:
    """A promotion in flight.

    Its page is released when the load has ended and no request waits for the block.
    """

    reservation: PageReservation
    task: asyncio.Task[None] = field(init=False)
    num_waiting: int = 0
    is_current: bool = True
    """Whether the lower tier still has the block: False if it was removed meanwhile."""


@dataclass(slots=True)
class _Claims:
    """The pages and promotions that `keep_promoted` claims for a request."""

    pages: list[int] = field(default_factory=list)
    promotions: list[_Promotion] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        return len(self.pages) + len(self.promotions)


class Mover:
    """The mover of one pool and its SSD tier, if there is one.

    `space` is an event that the pool sets whenever a page becomes free or idle.
    """

    def __init__(
        self,
        pool: Pool,
        segment: Segment,
        ssd: SsdTier | None,
        tasks: asyncio.TaskGroup,
        *,
        space: asyncio.Event,
        high_watermark: int,
        max_demotions: int,
        promotion_timeout_s: float,
    ) -> None:
        self._pool = pool
        self._segment = segment
        self._ssd = ssd
        self._tasks = tasks
        self._space = space
        self._high_watermark = high_watermark
        self._max_demotions = max_demotions
        self._promotion_timeout_s = promotion_timeout_s
        self._demoting: set[int] = set()
        """Pages that are being demoted, and that the mover expects to become free soon.

        If a demotion takes longer than `promotion_timeout_s`, its page is removed from this set, and the
        demotion continues.
        """
        self._is_pausing = False
        """Whether the mover pauses, because no disk took a block."""
        self._promotions: dict[BlockKey, _Promotion] = {}
        self._wake = asyncio.Event()
        self._line = asyncio.Lock()
        """Lock that a request holds while it collects the pages that it needs.

        Two requests that collect at the same time would wait for each other.
        """
        self.num_promotions = 0

    def wake(self) -> None:
        """Wake `run`, as pages are wanted, or more can be evicted now."""
        self._wake.set()

    async def run(self) -> None:
        """Free pages when woken, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self.make_room()

    # -- out of DRAM ------------------------------------------------------------------------------

    @property
    def _num_target(self) -> int:
        """The number of free pages that the mover tries to reach."""
        return min(max(self._high_watermark, self._pool.evictor.num_wanted), self._pool.table.num_pages)

    def make_room(self) -> None:
        """Evict pages, or begin to demote them, until enough pages are free or no demotion can begin now."""
        pool, evictor = self._pool, self._pool.evictor
        while pool.allocator.num_free + len(self._demoting) < self._num_target:
            page = pool.allocator.coldest()
            if page is None:
                break  # every page is in use; the next page that becomes idle wakes us
            if evictor.is_disposable(page):
                evictor.evict(page)
                evictor.changed()
            elif len(self._demoting) < self._max_demotions and not self._is_pausing:
                self._demoting.add(page)
                pool.holds.add(page)
                self._tasks.create_task(self._demote(page))
            else:
                return  # the next demotion that ends, or the end of the pause, wakes us
        if not self._demoting:
            evictor.num_wanted = (
                0  # requests that still wait ask again; else blocks would be evicted for no request
            )

    async def flush(self, timeout_s: float) -> None:
        """Write the blocks that SSD lacks from DRAM to SSD, the most recently used first.

        The call takes at most `timeout_s` seconds. It is the last call before the process ends.
        """
        if self._ssd is None:
            return
        table, pool = self._pool.table, self._pool
        sealed = np.flatnonzero(table.states == SEALED)
        latest_first = sealed[np.argsort(table.last_uses[sealed])[::-1]].tolist()
        writers = asyncio.Semaphore(self._max_demotions)
        num_stored = 0

        async def store(page: int) -> None:
            nonlocal num_stored
            assert self._ssd is not None
            checksums = table.checksums(page, range(table.num_layers))
            view, position = self._segment.stride_view(page), int(table.positions[page])
            try:
                num_stored += await self._ssd.store(
                    table.key(page), view, checksums, position, table.num_uses_of[page]
                )
            finally:
                writers.release()
                pool.holds.remove(page, used=False)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for page in latest_first:
                    if not self._ssd.is_accepting:
                        break
                    if table.state_of[page] == SEALED and not self._ssd.holds(table.key(page)):
                        await writers.acquire()
                        pool.holds.add(page)
                        self._tasks.create_task(store(page))
                for _ in range(self._max_demotions):
                    await writers.acquire()
        log.info("%d blocks of DRAM are on SSD before the end", num_stored)

    async def _demote(self, page: int) -> None:
        assert self._ssd is not None
        pool, table = self._pool, self._pool.table
        key, position, num_uses = table.key(page), int(table.positions[page]), int(table.num_uses[page])
        checksums = table.checksums(page, range(table.num_layers))
        overdue = asyncio.get_running_loop().call_later(
            self._promotion_timeout_s, self._stop_counting_on, page
        )
        try:
            # The block may have been removed, even stored again in another page, before this task began.
            is_held = pool.find(key) == page and await self._ssd.store(
                key, self._segment.stride_view(page), checksums, position, num_uses
            )
        finally:
            overdue.cancel()
            self._demoting.discard(page)
            pool.holds.remove(page, used=False)
        if pool.find(key) != page:
            if is_held:
                self._ssd.forget(key)  # found damaged while it was being written
        elif not is_held:
            self._pause()
        elif pool.allocator.is_idle(page) and pool.evictor.is_disposable(page):
            if pool.allocator.num_free < self._num_target:
                pool.evictor.evict(page)
            pool.evictor.changed()
        self.wake()

    def _stop_counting_on(self, page: int) -> None:
        """Stop counting on a page whose disk hangs, so that another page is freed instead."""
        self._demoting.discard(page)
        self.wake()

    def _pause(self) -> None:
        if not self._is_pausing:
            self._is_pausing = True
            asyncio.get_running_loop().call_later(_RETRY_S, self._end_pause)

    def _end_pause(self) -> None:
        self._is_pausing = False
        self.wake()

    def remove(self, key: BlockKey) -> bool:
        """Remove a block from DRAM and SSD, and stop its demotion or promotion.

        Returns whether DRAM or SSD had the block.
        """
        if (promotion := self._promotions.pop(key, None)) is not None:
            promotion.is_current = False
        was_in_dram = self._pool.remove(key)
        was_on_ssd = self._ssd is not None and self._ssd.forget(key)
        return was_in_dram or was_on_ssd

    # -- into DRAM --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def keep_promoted(self, keys: Iterable[BlockKey], *, patiently: bool) -> AsyncIterator[None]:
        """Make a context in which the blocks of `keys` that DRAM or SSD has are in DRAM, and stay there.

        A block that cannot get a page, or whose promotion takes too long, is left on SSD. `patiently`: wait
        also for pages that other requests have to release; otherwise wait only for pages that become free
        without a release.
        """
        claims = _Claims()
        try:
            if self._ssd is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._promotion_timeout_s):
                        async with self._line if patiently else contextlib.nullcontext():
                            await self._claim(keys, claims, patiently)
                if claims.promotions:
                    tasks = [promotion.task for promotion in claims.promotions]
                    await asyncio.wait(tasks, timeout=self._promotion_timeout_s)
            yield
        finally:
            for page in claims.pages:
                self._pool.holds.remove(page, used=False)
            for promotion in claims.promotions:
                promotion.num_waiting -= 1
                self._release_if_unclaimed(promotion)

    def is_promoted(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether DRAM has every block of `keys` that SSD has."""
        ssd = self._ssd
        return ssd is None or all(self._pool.find(key) is not None or not ssd.holds(key) for key in keys)

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Begin to promote blocks for a future request, as far as pages can be had now."""
        if self._ssd is None:
            return
        pages = [page for key in keys if (page := self._pool.find(key)) is not None]
        for page in pages:
            self._pool.holds.add(page)
        for key in keys:
            if self._pool.find(key) is None and self._ssd.holds(key) and key not in self._promotions:
                self._begin(key)
        for page in pages:
            self._pool.holds.remove(page, used=False)

    async def _claim(self, keys: Iterable[BlockKey], claims: _Claims, patiently: bool) -> None:
        """Hold the blocks of `keys` that are in DRAM, and begin to promote the other blocks.

        Waits for pages as `keep_promoted` describes.
        """
        assert self._ssd is not None
        # Blocks in DRAM come first: else they might be evicted to make room for the others.
        for key in sorted(dict.fromkeys(keys), key=lambda key: self._pool.find(key) is None):
            while (page := self._pool.find(key)) is None and self._ssd.holds(key):
                promotion = self._promotions.get(key) or self._begin(key)
                if promotion is not None:
                    promotion.num_waiting += 1
                    claims.promotions.append(promotion)
                    break
                if not (
                    self._room_is_coming() or (patiently and self._pool.num_used_pages > claims.num_pages)
                ):
                    return
                self._space.clear()
                await self._space.wait()
            if page is not None:
                self._pool.holds.add(page)
                claims.pages.append(page)

    def _begin(self, key: BlockKey) -> _Promotion | None:
        """Begin to promote a block that SSD holds.

        Returns the promotion; None if there is no page for the block.
        """
        assert self._ssd is not None
        try:
            reservation = self._pool.begin_promotion(key, self._ssd.position(key))
        except PoolFullError:
            return None
        promotion = self._promotions[key] = _Promotion(reservation)
        promotion.task = self._tasks.create_task(self._load(key, promotion))
        return promotion

    def _room_is_coming(self) -> bool:
        """Return whether pages will become free without another request releasing blocks."""
        unclaimed = any(not promotion.num_waiting for promotion in self._promotions.values())
        return bool(self._pool.allocator.num_idle or self._demoting or unclaimed)

    async def _load(self, key: BlockKey, promotion: _Promotion) -> None:
        assert self._ssd is not None
        reservation = promotion.reservation
        page = reservation.blocks[0].page
        loaded = await self._ssd.load(key, self._segment.stride_view(page), self._segment.layout.layer_bytes)
        if promotion.is_current:
            del self._promotions[key]
            if loaded is not None:
                self._pool.finish_promotion(reservation, loaded.checksums, loaded.num_uses)
                self.num_promotions += 1
        if not promotion.num_waiting:
            self._pool.release(reservation.reservation_id)

    def _release_if_unclaimed(self, promotion: _Promotion) -> None:
        if not promotion.num_waiting and promotion.task.done():
            self._pool.release(promotion.reservation.reservation_id)
