"""Moves of modules from a decode instance to a helper, and back (BanaServe, section 4.1).

Requests go on meanwhile: pages that no iteration writes any more are copied first; then, between two
iterations, the rest. They also come back when the helper is lost: what it hosted is still mapped here, and
an iteration that it left unanswered is computed again. The weights of layers at a helper are freed, so that
there is memory for more pages, and are loaded from the checkpoint again before the layers come back.

Owns: the order of these steps, what is where. Does not know: why something moves, what a pass exchanges.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import NamedTuple

import msgspec

from mooncake.errors import ModelError
from mooncake.messages.migration import ModulesPlace, PlaceModules
from mooncake.node.segments import available_bytes
from workers.decode.batch_loop import BatchLoop
from workers.decode.batching.batch import DecodeBatch, FullPage
from workers.decode.batching.iterations import Iteration
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.migration.helper_pace import HelperPace, IterationTime, WithoutHelper
from workers.decode.migration.kvcache_move import KVCacheMove
from workers.decode.migration.moves_meter import MovesMeter
from workers.decode.sequence import Sequence
from workers.engine.kvcache import HostedLayers, MovedHeads
from workers.errors import ModulesStayError, SessionLostError
from workers.execution.executor import Executor
from workers.execution.jobs import wait_to_end
from workers.modules.helper_link import HelperLink
from workers.modules.link_messages import LINK_VERSION, HostModules
from workers.modules.shared_parts import share_of

_MIB = 1 << 20
_FEW_PAGES = 32
"""Pages that may be left for the pause between two iterations."""
_MOST_ROUNDS = 4
_LOADING_TIMEOUT_S = 1.0
"""Seconds for which a move waits for pages that are being loaded, rather than copy them in the pause."""
_FREEING_TIMEOUT_S = 30.0
"""Seconds in which the pages must be freed that the owner has no memory for when modules come back."""
_GROWTH_SHARE = 0.1
"""Share of the pages that may come to be used while the others are copied."""
_NICENESS = 5
"""Niceness of what is done beside iterations, above the process's: a quarter of a core that is shared."""
log = logging.getLogger(__name__)


class ModuleMoves:
    """The modules of one instance, `name`. Orders are carried out in `run`, one after the other.

    `most_tokens` is the largest number of new tokens of an iteration. A helper that takes `timeout_s` for a
    layer is lost. `most_pages` returns how many pages a request here may need; `has_prompts` whether passes
    outside of the batch use pages, of which none may begin while `place` names a helper. `call_off` gives up
    a request that is to move here and is not decoded yet.
    """

    def __init__(
        self,
        name: str,
        fingerprint: str,
        executor: Executor,
        batch: DecodeBatch,
        transfers: BlockTransfers,
        loop: BatchLoop,
        most_tokens: int,
        max_batch: int,
        timeout_s: float,
        most_pages: Callable[[], int],
        has_prompts: Callable[[], bool],
        call_off: Callable[[Sequence], Awaitable[None]],
    ) -> None:
        self._name, self._fingerprint = name, fingerprint
        self._executor, self._batch, self._transfers, self._loop = executor, batch, transfers, loop
        self._most_tokens, self._max_batch, self._timeout_s = most_tokens, max_batch, timeout_s
        self._most_pages, self._has_prompts, self._call_off = most_pages, has_prompts, call_off
        self._orders: asyncio.Queue[PlaceModules | _Lost | _Slow] = asyncio.Queue()
        self._link: HelperLink | None = None
        self._is_lost = False
        """Whether the helper is lost, and not all is here again."""
        self._held_s: float | None = None
        """Time from which on no iteration begins, by the performance counter; None: they do."""
        self._without_helper, self._pace = WithoutHelper(), HelperPace.unknown()
        self.meter = MovesMeter()
        self._turn_taken = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "modules-move", _be_nice)
        """The thread beside iterations, which have cores first."""
        self.place = ModulesPlace()
        """The place of modules, as heartbeats tell it."""

    def order(self, order: PlaceModules) -> None:
        """Carry out an order, behind earlier ones."""
        self._orders.put_nowait(order)

    def lost(self) -> None:
        """React to the loss of the helper: no iteration begins until all is here again.

        A helper that only stood still may go on, and write what the last iteration gave it. The pages of that
        iteration are still those of its sequences, and nobody else gets them before their copies are in use.
        """
        if self._executor.kv.is_helped and not self._is_lost:
            self._is_lost = True
            self._executor.kv.keep_freed()
            self._hold()
            self._orders.put_nowait(_Lost())

    def iteration_ended(self, iteration: Iteration) -> None:
        """Look whether the helper has answered, and whether it is fast enough."""
        if iteration.is_lost:
            self.lost()
            return
        if iteration.num_prompt_tokens or not iteration.num_decoded:
            return
        slos_s = [one.tbt_slo_s for one in iteration.sequences if one.tbt_slo_s is not None]
        # Where two micro-batches are in flight, both are one batch without a helper.
        num_decoded = iteration.num_decoded + iteration.num_decoded_beside
        num_tokens = iteration.num_kv_tokens + iteration.num_kv_tokens_beside
        seconds = iteration.ended_s - iteration.began_s
        took = IterationTime(num_decoded, num_tokens, seconds, min(slos_s, default=None))
        kv = self._executor.kv
        if not kv.is_helped:
            self._without_helper.ended(took)
            return
        why = self._pace.ended(took, iteration.ended_s)
        if why and not self.place.is_moving and len(kv.used_pages()) <= kv.num_own_pages:
            self._orders.put_nowait(_Slow(why))

    def recheck(self) -> None:
        """Look whether pages have been freed or loaded. Call this in each turn of the loop."""
        self._turn_taken.set()

    async def run(self) -> None:
        """Carry out orders until cancelled. Then the helper hosts nothing."""
        try:
            while True:
                match await self._orders.get():
                    case _Lost():
                        await self._come_back(
                            f"{self.place.helper} is lost, and {self.place.what} are here again"
                        )
                    case _Slow(why):
                        await self._take_back(why)
                    case order:
                        await self._carry_out(order)
        finally:
            self._thread.shutdown(wait=False)
            if self._link is not None:
                self._link.close()

    async def _carry_out(self, order: PlaceModules) -> None:
        told_before = self.place.error
        self._tell(epoch=order.epoch, number=order.number, is_moving=True, error="")
        try:
            if order.num_heads or order.layers is not None:
                await self._move(order)
            elif self._executor.kv.is_helped:
                await self._return("back")
            self._tell(is_moving=False)
        except ModulesStayError as error:
            self.meter.ended("refused")
            if str(error) != told_before:  # the Conductor asks again and again while the helper drains
                log.warning("no KV heads or layers move: %s", error)
            self._tell(is_moving=False, error=str(error))

    async def _move(self, order: PlaceModules) -> None:
        """Move modules to a helper. Raises ModulesStayError; they are here then."""
        if self._executor.kv.is_helped:
            raise ModulesStayError(f"{self.place.what} are at {self.place.helper}")
        if self._executor.kv.num_lent_pages:
            raise ModulesStayError(f"{self._name} has KV heads or layers of others itself")
        if self._has_prompts():
            raise ModulesStayError(f"{self._name} still computes prompts that other instances decode")
        self._tell(helper=order.helper)
        try:
            link = await self._move_to(order)
        except BaseException:
            self._tell(helper="")
            raise
        self._link, self._pace = link, self._without_helper.pace()
        self.meter.ended("moved")
        self._tell(num_heads=order.num_heads, layers=order.layers)
        log.info("%s are at %s", self.place.what, order.helper)
        if link.is_lost:
            self.lost()

    async def _move_to(self, order: PlaceModules) -> HelperLink:
        """Return the link to the helper that has them. Raises ModulesStayError."""
        kv, model = self._executor.kv, self._executor.model
        request = HostModules(
            LINK_VERSION,
            self._name,
            self._fingerprint,
            order.num_heads,
            order.layers,
            kv.num_own_pages,
            kv.num_own_pages,
            self._most_tokens,
            self._max_batch,
        )
        request = msgspec.structs.replace(request, wanted_pages=self._most_pages_without(request))
        link = await HelperLink.connect(order.socket, request, model, kv, self._timeout_s, self.lost)
        try:
            move = self._begin(link.num_pages, link.helped)
            copied = await self._pre_copy(move)
            if link.is_lost:
                raise ModulesStayError(f"{order.helper} was lost before the move was complete")
            await self._switch(move, copied)
            if isinstance(link.helped, HostedLayers):
                layers = link.helped.layers
                await self._beside(lambda: model.free_layers(layers))
        except ModulesStayError:
            await link.end()  # so that the helper does not refuse the next order for this one
            raise
        except BaseException:
            link.close()
            raise
        return link

    def _most_pages_without(self, request: HostModules) -> int:
        """Return how many pages fit, with this part elsewhere, into the memory of all pages and of the
        weights that go."""
        kv, model = self._executor.kv, self._executor.model
        num_pages = Fraction(kv.num_own_pages)
        if request.layers is not None:
            page_bytes = len(kv.layers) * kv.layer(kv.layers.start)[0].nbytes
            num_pages += Fraction(request.layers.count * model.layer_bytes, page_bytes)
        return math.floor(num_pages / (1 - share_of(request, model)))

    async def _take_back(self, why: str) -> None:
        """Have all here, as the helper is too slow."""
        if not self._executor.kv.is_helped or self._is_lost:
            return
        reason = f"{self.place.helper} was slow, and {self.place.what} are here again: {why}"
        self._tell(is_moving=True)
        try:
            await self._return("slow")
            log.warning("%s", reason)
        except ModulesStayError as error:
            reason = f"{self.place.helper} is slow, and {self.place.what} stay there: {error}"
            log.warning("%s", reason)
        self._tell(is_moving=False, error=reason)

    async def _return(self, outcome: str) -> None:
        """Have all here, while the helper still computes. Raises ModulesStayError."""
        kv = self._executor.kv
        if (num_pages := self._most_pages()) > kv.num_own_pages:
            raise ModulesStayError(
                f"a request may need {num_pages} pages before its end, and with all heads and layers "
                f"there are {kv.num_own_pages}"
            )
        move = self._begin(kv.num_own_pages, None)
        try:
            await self._free_in_time(kv.num_own_pages)
            await self._load_weights(self._beside)
        except ModulesStayError:
            if not self._is_lost:
                kv.reopen()
            raise
        await self._switch(move, await self._pre_copy(move))
        await self._end_hosting(outcome)

    async def _come_back(self, reason: str) -> None:
        """Have all here, as the helper is lost. No iteration runs until then."""
        kv = self._executor.kv
        if not kv.is_helped:
            return
        log.warning("%s", reason)
        self._tell(is_moving=True)
        await self._loop.quiet()
        await self._free_beyond(kv.num_own_pages)
        try:
            move = self._begin(kv.num_own_pages, None)
            await self._load_weights(_at_once)
        except ModulesStayError as error:
            raise SessionLostError(f"{reason}, but cannot be: {error}") from None
        await self._switch(move, set())
        await self._end_hosting("lost")
        self._tell(is_moving=False, error=reason)

    async def _end_hosting(self, outcome: str) -> None:
        self.meter.ended(outcome)
        if self._link is not None and self._is_lost:
            self._link.close()  # a helper that stands still says no more
        elif self._link is not None:
            await self._link.end()
        self._link, self._is_lost = None, False
        self._tell(helper="", num_heads=0, layers=None)

    async def _free_in_time(self, num_pages: int) -> None:
        """Have the pages from `num_pages` on freed. Raises ModulesStayError if that takes too long."""
        try:
            async with asyncio.timeout(_FREEING_TIMEOUT_S):
                await self._free_beyond(num_pages)
        except TimeoutError:
            raise ModulesStayError(
                f"pages beyond the {num_pages} that there are without a helper were not freed in "
                f"{_FREEING_TIMEOUT_S:g} s"
            ) from None

    async def _free_beyond(self, num_pages: int) -> None:
        """Have the pages from `num_pages` on freed: running sequences that have some are preempted, and those
        that are to move here go on where they are."""
        kv = self._executor.kv
        kv.close_from(num_pages)
        while kv.used_pages(num_pages):
            self._turn_taken.clear()
            if self._batch.preempt_beyond(num_pages):
                self._loop.take_turn()
            for sequence in self._batch.prepared_beyond(num_pages):
                await self._call_off(sequence)
            await self._turn_taken.wait()

    async def _load_weights(self, on_thread: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Have the weights of all layers here. Raises ModulesStayError."""
        try:
            await on_thread(self._executor.load_freed_layers)
        except ModelError as error:
            raise ModulesStayError(f"the weights of {self.place.what} cannot be loaded: {error}") from None

    def _begin(self, num_pages: int, helped: MovedHeads | HostedLayers | None) -> KVCacheMove:
        """Begin a move, if there is memory for it, and for the weights of layers that come back. Raises
        ModulesStayError."""
        try:
            move = KVCacheMove(self._executor.kv, num_pages, helped)
        except OSError as error:
            raise ModulesStayError(f"no memory for {num_pages} pages beside those in use: {error}") from None
        num_used = len(self._executor.kv.used_pages())
        weight_bytes = self._executor.model.freed_bytes
        needed_bytes = move.page_bytes * min(num_pages, num_used + round(_GROWTH_SHARE * num_pages))
        needed_bytes += weight_bytes
        free_bytes = available_bytes()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ModulesStayError(
                f"no memory to copy {num_used} pages in use, for those that come, and for weights"
                f" ({weight_bytes // _MIB} MiB): {needed_bytes // _MIB} MiB, of which"
                f" {free_bytes // _MIB} MiB are available"
            )
        return move

    async def _pre_copy(self, move: KVCacheMove) -> set[FullPage]:
        """Copy full pages, in rounds, until few are left. Return those that are copied."""
        copied, num_rounds = set[FullPage](), 0
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _LOADING_TIMEOUT_S
        while num_rounds < _MOST_ROUNDS:
            full = self._batch.full_pages() - copied
            # The first round takes the memory too, which would be cold in the pause.
            if len(full) > (_FEW_PAGES if num_rounds else 0):
                pages = sorted(full_page.page for full_page in full)
                await self._beside(functools.partial(move.copy, pages))
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

    async def _switch(self, move: KVCacheMove, copied: set[FullPage]) -> None:
        """Copy the rest between two iterations, and compute in the new arrangement from then on."""
        kv = self._executor.kv
        async with self._transfers.paused():
            self._hold()
            try:
                await self._loop.quiet()
                needless = {full_page.page for full_page in copied & self._batch.full_pages()}
                needless |= self._batch.unwritten_pages()
                pages = [page for page in kv.used_pages() if page not in needless]
                await _at_once(lambda: move.copy(pages))
                given_up = move.complete()
            finally:
                self._resume()
                self.meter.copied(move.copied_bytes)
        await asyncio.to_thread(given_up.clear)  # it takes a while to give gigabytes back
        threading.Thread(target=kv.take_memory, name="kvcache-memory", daemon=True).start()

    async def _beside(self, call: Callable[[], None]) -> None:
        """Make a call beside iterations, to the end, even if the caller is cancelled."""
        await wait_to_end(asyncio.get_running_loop().run_in_executor(self._thread, call))

    def _hold(self) -> None:
        if self._held_s is None:
            self._held_s = time.perf_counter()
        self._loop.hold()

    def _resume(self) -> None:
        assert self._held_s is not None
        self.meter.paused(time.perf_counter() - self._held_s)
        self._held_s = None
        self._loop.resume()

    def _tell(self, **changes: object) -> None:
        self.place = msgspec.structs.replace(self.place, **changes)


class _Lost(NamedTuple):
    """The helper is lost."""


class _Slow(NamedTuple):
    """The helper is too slow."""

    why: str


async def _at_once(call: Callable[[], None]) -> None:
    """Make a call while no iteration runs, to the end, even if the caller is cancelled."""
    await wait_to_end(asyncio.ensure_future(asyncio.to_thread(call)))


def _be_nice() -> None:
    """Have the calling thread, and no other, yield its core to the others of this process."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
