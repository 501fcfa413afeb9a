"""Moves of modules from an instance to a helper, and back (BanaServe, section 4.1).

Requests go on meanwhile (`rearranger`). When a helper of this host is lost, its modules return too: their
memory is still mapped by this process, and an iteration that the helper has not answered is computed again.
When a helper on another host is lost, the KVCache of its modules is lost, and the session ends. The weights
of layers at a helper are freed, so that there is memory for more pages, and are loaded from the checkpoint
before the layers return.

Owns: the order of these steps, the place of the modules. Does not know: why modules move, what owner and
helper exchange in a pass.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import NamedTuple

import msgspec

from mooncake.errors import ModelError, TransferError
from mooncake.messages.migration import ModulesPart, ModulesPlace, PlaceModules
from workers.decode.batch_loop import BatchLoop
from workers.decode.batching.batch import DecodeBatch
from workers.decode.batching.iterations import Iteration
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.migration.helper_pace import HelperPace, IterationTime, WithoutHelper
from workers.decode.migration.moves_meter import MovesMeter
from workers.decode.migration.rearranger import Rearranger, at_once
from workers.decode.sequence import Sequence
from workers.engine.kvcache.helped_parts import HostedLayers
from workers.errors import ModulesStayError, SessionLostError
from workers.execution.executor import Executor
from workers.modules.helper_link import HelperAccess, HelperLink
from workers.modules.link_messages import LINK_VERSION, HostModules
from workers.modules.prompts import Prompts
from workers.modules.shared_parts import share_of

_FEW_FREE_PAGES = 16
"""The number of free pages below which full pages of running sequences are moved to a helper."""
log = logging.getLogger(__name__)


class ModuleMoves:
    """The modules of the instance `name`. `run` carries out orders one after the other.

    Args:
        most_tokens: The largest number of new tokens of an iteration.
        helpers: What is needed to connect to helpers.
        most_pages: Returns the largest number of pages that a request on this instance may need.
        prompts: The prompts that are computed outside of the batch.
        is_prefill_only: Returns whether the instance decodes nothing. Such an instance has only layers at
            helpers; any other one computes no prompts outside of the batch while `place` names a helper.
        call_off: Gives up a request that is to move to this instance and is not decoded here yet.
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
        helpers: HelperAccess,
        most_pages: Callable[[], int],
        prompts: Prompts,
        is_prefill_only: Callable[[], bool],
        call_off: Callable[[Sequence], Awaitable[None]],
    ) -> None:
        self._name, self._fingerprint = name, fingerprint
        self._executor = executor
        self._most_tokens, self._max_batch, self._helpers = most_tokens, max_batch, helpers
        self._most_pages, self._prompts, self._is_prefill_only = most_pages, prompts, is_prefill_only
        self._orders: asyncio.Queue[PlaceModules | _Lost | _Slow | _Divide] = asyncio.Queue()
        self._link: HelperLink | None = None
        self._is_lost = False
        """Whether the helper is lost while some modules have not returned yet."""
        self._without_helper, self._pace = WithoutHelper(), HelperPace.unknown()
        self.meter = MovesMeter()
        self._rearranger = Rearranger(executor, batch, transfers, loop, prompts, call_off, self.meter)
        self.place = ModulesPlace()
        """The place of the modules, in the form of heartbeats."""

    def order(self, order: PlaceModules) -> None:
        """Queue an order behind all earlier orders."""
        self._orders.put_nowait(order)

    def lost(self) -> None:
        """Stop iterations, because the helper is lost, until all modules are on this instance again.

        If the helper was only paused, it may still write the results of the last iteration. So pages that are
        freed go to no other sequence until copies of the pages are in use.
        """
        if self._executor.kv.is_helped and not self._is_lost:
            self._is_lost = True
            self._executor.kv.pages.keep_freed()
            self._rearranger.hold()
            self._orders.put_nowait(_Lost())

    def iteration_ended(self, iteration: Iteration) -> None:
        """Record an iteration, and check whether the helper has answered and is fast enough."""
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
        if why and not self.place.is_moving and len(kv.pages.used()) <= kv.pages.num_own:
            self._orders.put_nowait(_Slow(why))

    def recheck(self) -> None:
        """Check whether pages have been freed or loaded, or are needed.

        To be called in each turn of the batch loop.
        """
        self._rearranger.recheck()
        kv = self._executor.kv
        if kv.hosted_pages is None or self.place.is_moving or self._orders.qsize():
            return
        num_own = kv.pages.num_free_for(0)
        if num_own < _FEW_FREE_PAGES and num_own < kv.pages.num_free:
            self._orders.put_nowait(_Divide())

    async def run(self) -> None:
        """Carry out orders until cancelled. When this returns, no helper hosts modules of this instance."""
        try:
            while True:
                match await self._orders.get():
                    case _Lost():
                        await self._come_back(
                            f"{self.place.helper} is lost, and {self.place.part.what} are here again"
                        )
                    case _Slow(why):
                        await self._take_back(why)
                    case _Divide():
                        await self._divide(again=True)
                    case order:
                        await self._carry_out(order)
        finally:
            self._rearranger.close()
            if self._link is not None:
                self._link.close()

    async def _carry_out(self, order: PlaceModules) -> None:
        told_before = self.place.error
        self._tell(epoch=order.epoch, number=order.number, is_moving=True, error="")
        try:
            if order.part:
                await self._move(order)
            elif self._executor.kv.is_helped:
                await self._return("back")
            self._tell(is_moving=False)
        except ModulesStayError as error:
            self.meter.ended("refused")
            # The Conductor asks again and again, while the helper drains or an operator wants the pages.
            if str(error) != told_before:
                log.warning("no modules move: %s", error)
            self._tell(is_moving=False, error=str(error))

    async def _move(self, order: PlaceModules) -> None:
        """Move modules to a helper. If this raises ModulesStayError, the modules are on this instance."""
        if self._executor.kv.is_helped:
            raise ModulesStayError(f"{self.place.part.what} are at {self.place.helper}")
        if self._executor.kv.num_lent_pages:
            raise ModulesStayError(f"{self._name} has modules of others itself")
        if self._is_prefill_only():
            if order.part.layers is None:
                raise ModulesStayError(f"{self._name} prefills, so that only layers of it can be at a helper")
        elif self._prompts.num_prompts:
            raise ModulesStayError(f"{self._name} still computes prompts that other instances decode")
        self._tell(helper=order.helper)
        try:
            link = await self._move_to(order)
        except BaseException:
            self._tell(helper="")
            raise
        self._link, self._pace = link, self._without_helper.pace()
        self.meter.ended("moved")
        self._tell(part=order.part)
        log.info("%s are at %s", self.place.part.what, order.helper)
        if link.is_lost:
            self.lost()
        await self._divide(again=False)

    async def _divide(self, *, again: bool) -> None:
        """Move full pages of running sequences to a helper that can have pages of sequences.

        `again`: sequences have been divided before.
        """
        if self._executor.kv.hosted_pages is None or self._is_lost:
            return
        try:
            await self._rearranger.divide(again=again)
        except TransferError as error:
            log.warning("no more pages go to %s: %s", self.place.helper, error)
        self._hold_if_lost()

    def _hold_if_lost(self) -> None:
        """Let no iteration begin until the modules are back, if the helper was lost while pages moved."""
        if self._is_lost:
            self._rearranger.hold()

    async def _move_to(self, order: PlaceModules) -> HelperLink:
        """Return the link to the helper once the helper has the modules. Raises ModulesStayError."""
        kv, model = self._executor.kv, self._executor.model
        request = HostModules(
            LINK_VERSION,
            self._name,
            self._fingerprint,
            order.part,
            kv.pages.num_own,
            kv.pages.num_own,
            self._most_tokens,
            self._max_batch,
        )
        request = msgspec.structs.replace(request, wanted_pages=self._most_pages_without(request))
        link = await HelperLink.connect(order.address, request, model, kv, self._helpers, self.lost)
        try:
            move = self._rearranger.begin(link.num_pages, link.helped)
            copied = await self._rearranger.pre_copy(move)
            await self._rearranger.switch(move, copied)
            await self._free_weights()
        except (ModulesStayError, TransferError) as error:
            await link.end()  # so that the helper does not refuse the next order for this one
            raise ModulesStayError(str(error)) from None
        except BaseException:
            link.close()
            raise
        return link

    def _most_pages_without(self, request: HostModules) -> int:
        """Return how many pages this instance has memory for once the helper has the part in `request`.

        The memory of all present pages is counted, and the memory of weights that can be freed.
        """
        kv, model = self._executor.kv, self._executor.model
        num_pages = Fraction(kv.pages.num_own)
        if request.part.layers is not None:
            page_bytes = len(kv.layers) * kv.layer(kv.layers.start)[0].nbytes
            num_pages += Fraction(request.part.layers.count * model.layer_bytes, page_bytes)
        return math.floor(num_pages / (1 - share_of(request, model)))

    async def _take_back(self, why: str) -> None:
        """Move all modules back to this instance, because the helper is too slow. `why` is for the log."""
        if not self._executor.kv.is_helped or self._is_lost:
            return
        reason = f"{self.place.helper} was slow, and {self.place.part.what} are here again: {why}"
        self._tell(is_moving=True)
        try:
            await self._return("slow")
            log.warning("%s", reason)
        except ModulesStayError as error:
            reason = f"{self.place.helper} is slow, and {self.place.part.what} stay there: {error}"
            log.warning("%s", reason)
        self._tell(is_moving=False, error=reason)

    async def _return(self, outcome: str) -> None:
        """Move all modules back to this instance while the helper still computes. Raises ModulesStayError.

        `outcome` is the outcome for the counters (`MOVE_OUTCOMES`).
        """
        kv = self._executor.kv
        if (num_pages := max(self._most_pages(), self._prompts.most_pages)) > kv.pages.num_own:
            raise ModulesStayError(
                f"a request may need {num_pages} pages before its end, and with all modules "
                f"there are {kv.pages.num_own}"
            )
        move = self._rearranger.begin(kv.pages.num_own, None)
        await self._load_weights(self._rearranger.beside)
        if kv.hosted_pages is not None:
            try:
                await self._rearranger.reunite()
            except TransferError as error:
                raise self._kvcache_lost(str(error)) from None
            self._hold_if_lost()
        try:
            await self._rearranger.free_in_time(kv.pages.num_own)
        except ModulesStayError:
            if not self._is_lost:
                kv.pages.reopen()
                self._prompts.recheck_pages()
                await self._free_weights()  # their memory is needed for pages
            raise
        try:
            await self._rearranger.switch(move, await self._rearranger.pre_copy(move))
        except TransferError as error:
            raise self._kvcache_lost(str(error)) from None
        await self._end_hosting(outcome)

    async def _come_back(self, reason: str) -> None:
        """Move all modules back to this instance, because the helper is lost. No iteration runs meanwhile.

        Raises SessionLostError if they cannot return.
        """
        kv = self._executor.kv
        if kv.helped is None:
            return
        if kv.helped.remote is not None:
            raise self._kvcache_lost(f"{self.place.helper} is lost")
        log.warning("%s", reason)
        self._tell(is_moving=True)
        await self._rearranger.quiet()
        await self._rearranger.free_beyond(kv.pages.num_own)
        try:
            move = self._rearranger.begin(kv.pages.num_own, None)
            await self._load_weights(at_once)
        except ModulesStayError as error:
            raise SessionLostError(f"{reason}, but cannot be: {error}") from None
        await self._rearranger.switch(move, set())
        await self._end_hosting("lost")
        self._tell(is_moving=False, error=reason)

    def _kvcache_lost(self, reason: str) -> SessionLostError:
        """Return the error for a lost helper on another host.

        Its KVCache is lost, and with it all requests of this instance.
        """
        return SessionLostError(f"{reason}, and with it the KVCache of {self.place.part.what}")

    async def _end_hosting(self, outcome: str) -> None:
        self.meter.ended(outcome)
        if self._link is not None and self._is_lost:
            self._link.close()  # a lost helper confirms nothing
        elif self._link is not None:
            await self._link.end()
        self._link, self._is_lost = None, False
        self._tell(helper="", part=ModulesPart())

    async def _load_weights(self, on_thread: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Load the weights of all freed layers. Raises ModulesStayError."""
        try:
            await on_thread(self._executor.load_freed_layers)
        except ModelError as error:
            raise ModulesStayError(
                f"the weights of {self.place.part.what} cannot be loaded: {error}"
            ) from None

    async def _free_weights(self) -> None:
        """Free the weights of layers that are at the helper."""
        helped, model = self._executor.kv.helped, self._executor.model
        if isinstance(helped, HostedLayers):
            await self._rearranger.beside(lambda: model.free_layers(helped.layers))

    def _tell(self, **changes: object) -> None:
        self.place = msgspec.structs.replace(self.place, **changes)


class _Lost(NamedTuple):
    """An entry in the queue of orders: the helper is lost."""


class _Divide(NamedTuple):
    """An entry in the queue of orders: few pages are free on this instance, and some at the helper."""


class _Slow(NamedTuple):
    """An entry in the queue of orders: the helper is too slow."""

    why: str
