"""Rearrangement of the device pages while requests go on, when modules move to a helper or back.

Full pages, which no iteration writes any more, are copied while iterations run. The others are copied between
two iterations, when the KVCache switches to the new arrangement.

Owns: what is copied when, the pause of iterations, the pages that must be free before. Does not know: why
modules move, helpers.
"""

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from mooncake.node.memory import available_bytes
from workers.decode.batch_loop import BatchLoop
from workers.decode.batching.batch import DecodeBatch, FullPage
from workers.decode.batching.division import (
    Division,
    begin_division,
    begin_reunion,
    drop_division,
    end_division,
)
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.migration.kvcache_move import COPIED_BYTES, KVCacheMove
from workers.decode.migration.moves_meter import MovesMeter
from workers.decode.sequence import Sequence
from workers.engine.kvcache.helped_parts import Helped
from workers.errors import ModulesStayError
from workers.execution.executor import Executor
from workers.execution.jobs import wait_to_end
from workers.modules.prompts import Prompts

_MIB = 1 << 20
_FEW_PAGES = 32
"""The number of full pages that may remain to be copied in the pause between two iterations."""
_MOST_ROUNDS = 4
"""The most rounds of copies while iterations run."""
_LOADING_TIMEOUT_S = 1.0
"""Seconds for which a move waits for pages that are being loaded, so that they need no copy in the pause."""
_FREEING_TIMEOUT_S = 30.0
"""Seconds for which `free_in_time` waits for pages to be freed."""
_NICENESS = 5
"""The niceness that is added to the copying thread's.

On a core that it shares with another thread of the process, the copying thread gets a quarter of the time.
"""


class Rearranger:
    """The rearrangements of one instance's device pages, one at a time.

    `call_off` gives up a request that is to move to this instance and is not decoded here yet.
    """

    def __init__(
        self,
        executor: Executor,
        batch: DecodeBatch,
        transfers: BlockTransfers,
        loop: BatchLoop,
        prompts: Prompts,
        call_off: Callable[[Sequence], Awaitable[None]],
        meter: MovesMeter,
    ) -> None:
        self._kv, self._model, self._batch = executor.kv, executor.model, batch
        self._transfers, self._loop, self._prompts = transfers, loop, prompts
        self._call_off, self._meter = call_off, meter
        self._held_s: float | None = None
        """The time since which no iteration begins, by the performance counter; None without a pause."""
        self._turn_taken = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "modules-move", _be_nice)

    def close(self) -> None:
        """End the thread after its current call. Does not wait."""
        self._thread.shutdown(wait=False)

    def recheck(self) -> None:
        """Check whether pages have been freed or loaded. To be called in each turn of the batch loop."""
        self._turn_taken.set()

    async def free_in_time(self, num_pages: int) -> None:
        """Free the pages with the number `num_pages` and higher, as `free_beyond` does.

        Raises ModulesStayError if that takes longer than `_FREEING_TIMEOUT_S`.
        """
        try:
            async with asyncio.timeout(_FREEING_TIMEOUT_S):
                await self.free_beyond(num_pages)
        except TimeoutError:
            raise ModulesStayError(
                f"pages beyond the {num_pages} that there are without a helper were not freed in "
                f"{_FREEING_TIMEOUT_S:g} s"
            ) from None

    async def free_beyond(self, num_pages: int) -> None:
        """Free the pages with the number `num_pages` and higher, and wait until nothing uses them.

        Running sequences and prompts that have such pages are preempted. Sequences that are prepared to
        migrate here and have such pages are given up, and stay at their sources.
        """
        self._kv.pages.close_from(num_pages)
        await self._prompts.free_beyond(num_pages)
        while self._kv.pages.used(num_pages):
            self._turn_taken.clear()
            if self._batch.preempt_beyond(num_pages):
                self._loop.take_turn()
            for sequence in self._batch.prepared_beyond(num_pages):
                await self._call_off(sequence)
            await self._turn_taken.wait()

    def begin(self, num_pages: int, helped: Helped | None) -> KVCacheMove:
        """Begin a rearrangement to `num_pages` pages. `helped` is the part that a helper will have, if any.

        Raises ModulesStayError if there is no memory for the pages, or for the weights of layers that come
        back.
        """
        try:
            move = KVCacheMove(self._model.library, self._kv, num_pages, helped)
        except OSError as error:
            raise ModulesStayError(f"no memory for {num_pages} pages beside those in use: {error}") from None
        weight_bytes = self._model.freed_bytes
        needed_bytes = move.expected_bytes + weight_bytes
        free_bytes = available_bytes()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ModulesStayError(
                f"no memory to copy {len(self._kv.pages.used())} pages in use, for those that come, and for"
                f" weights ({weight_bytes // _MIB} MiB): {needed_bytes // _MIB} MiB, of which"
                f" {free_bytes // _MIB} MiB are available"
            )
        return move

    async def pre_copy(self, move: KVCacheMove) -> set[FullPage]:
        """Copy full pages while iterations run, in rounds, until few are left. Returns the copied pages.

        Pages that are being loaded are awaited, for `_LOADING_TIMEOUT_S` at most. Raises ModulesStayError if
        the helper that is to get modules is lost, and TransferError if a helper on another host is lost.
        """
        copied, num_rounds = set[FullPage](), 0
        if move.are_further:
            return copied
        await self.beside(move.take_memory, move.give_up)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _LOADING_TIMEOUT_S
        while num_rounds < _MOST_ROUNDS:
            full = self._batch.full_pages() - copied
            if len(full) > _FEW_PAGES:
                pages = sorted(full_page.page for full_page in full)
                await self.beside(functools.partial(move.copy, pages), move.give_up)
                copied |= full
                num_rounds += 1
            elif self._batch.num_loading_pages > _FEW_PAGES and loop.time() < deadline_s:
                self._turn_taken.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline_s):
                        await self._turn_taken.wait()
            else:
                break
        return copied

    async def switch(self, move: KVCacheMove, copied: set[FullPage]) -> None:
        """Copy the remaining used pages between two iterations, and switch to the new arrangement.

        `copied` are pages of earlier copies. Those that are still full are not copied again. Raises errors as
        `pre_copy` does; then iterations go on in the old arrangement.
        """
        async with self._transfers.paused():
            self.hold()
            try:
                await self.quiet()
                pages = [] if move.are_further else self._pages_to_copy(copied)
                await at_once(lambda: move.copy(pages), move.give_up)
                given_up = move.complete()
            finally:
                self._resume()
                self._meter.copied(move.copied_bytes)
        await asyncio.to_thread(given_up.clear)  # it takes a while to give gigabytes back
        self._kv.take_memory_beside()

    def _pages_to_copy(self, copied: set[FullPage]) -> list[int]:
        """Return the used pages that have KVCache, except the pages in `copied` that are still full.

        To be called while no iteration runs.
        """
        needless = {full_page.page for full_page in copied & self._batch.full_pages()}
        needless |= self._batch.unwritten_pages()
        return [page for page in self._kv.pages.used() if page not in needless]

    async def divide(self, *, again: bool) -> None:
        """Move full pages of running sequences to a helper that has pages of sequences.

        `again` says whether sequences have been divided before. If so, and if sequences still have room to
        grow here, nothing moves unless many pages can move (`begin_division`).

        If the helper is lost meanwhile, no pages move. Raises TransferError if a helper on another host is
        lost.
        """
        await self._replace_pages(begin_division(self._batch.running, self._kv, again=again))

    async def reunite(self) -> None:
        """Close the helper's pages of sequences, and move those of running sequences back, as far as there is
        room here.

        If the helper is lost meanwhile, no pages move. Raises TransferError if a helper on another host is
        lost.
        """
        self._kv.pages.close_from(self._kv.pages.num_own)
        await self._replace_pages(begin_reunion(self._batch.running, self._kv))

    async def _replace_pages(self, divisions: list[Division]) -> None:
        """Copy pages of sequences while iterations run, and replace the pages by the copies between two."""
        if not divisions:
            return
        kv = self._kv
        assert kv.hosted_pages is not None
        replaced = torch.tensor([page for division in divisions for page in division.replaced])
        pages = torch.tensor([page for division in divisions for page in division.pages])
        helper, given_up = kv.hosted_pages.owner, threading.Event()

        def copy() -> None:
            num_at_a_time = max(1, COPIED_BYTES // kv.page_bytes)
            for begin in range(0, len(pages), num_at_a_time):
                if given_up.is_set() or helper.is_closed:
                    return
                some = slice(begin, begin + num_at_a_time)
                for layer in kv.layers:
                    kv.scatter(layer, pages[some], kv.gather(layer, replaced[some]))

        try:
            await self.beside(copy, given_up.set)
            self.hold()
            try:
                await self.quiet()
                if not helper.is_closed:
                    end_division(divisions, kv.pages)
                    self._meter.copied(len(pages) * kv.page_bytes)
            finally:
                self._resume()
        finally:
            drop_division(divisions, kv.pages)

    async def beside(self, call: Callable[[], None], on_cancel: Callable[[], None] | None = None) -> None:
        """Run a blocking call on another thread, while iterations go on.

        This returns after the call, even if the caller is cancelled. `on_cancel` may shorten the call.
        """
        await wait_to_end(asyncio.get_running_loop().run_in_executor(self._thread, call), on_cancel)

    def hold(self) -> None:
        """Let no further iteration begin until the next pause of `switch`, `divide` or `reunite` has ended.

        A `divide` or `reunite` that moves no page makes no pause.
        """
        if self._held_s is None:
            self._held_s = time.perf_counter()
        self._loop.hold()
        self._prompts.hold()

    async def quiet(self) -> None:
        """Wait until no iteration and no pass over prompts runs. To be called after `hold`."""
        await self._loop.quiet()
        await self._prompts.quiet()

    def _resume(self) -> None:
        assert self._held_s is not None
        self._meter.paused(time.perf_counter() - self._held_s)
        self._held_s = None
        self._loop.resume()
        self._prompts.resume()


async def at_once(call: Callable[[], None], on_cancel: Callable[[], None] | None = None) -> None:
    """Run a blocking call on a thread of normal priority, after the caller has stopped iterations.

    The call runs to its end even if the caller is cancelled. `on_cancel` may shorten it.
    """
    await wait_to_end(asyncio.ensure_future(asyncio.to_thread(call)), on_cancel)


def _be_nice() -> None:
    """Lower the priority of the calling thread alone, so that the process's other threads go first."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
