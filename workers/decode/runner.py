"""Decode: reserve pages, wait for the KVCache, then continuous batching (Mooncake, section 3, step 4).

Each request has a task that gets its KVCache here and sees it off; one loop runs the batch. docs/decode.md
tells what happens beside what.

In a tensor-parallel group this is the first rank: what it does with a sequence's KVCache the others do with
theirs, and each iteration is computed by all.

Owns: decode jobs and their order of events. Does not know: who decides, how bytes travel, who is next.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import ReservedBlock
from mooncake.errors import GrammarError, MooncakeError, PoolError, TransferError
from mooncake.messages.fronts import TokenOutput
from mooncake.messages.pools import Grant
from mooncake.messages.requests import Ref
from mooncake.messages.workers import (
    TO_HOST,
    TO_POOL,
    Decode,
    DecodeLoad,
    Finished,
    Joining,
    Refused,
    Reserve,
    Reserved,
    WorkFailed,
)
from workers.decode.batch import DecodeBatch
from workers.decode.block_transfers import BlockPair, BlockTransfers
from workers.decode.double_check import DoubleCheck, TooSlowError
from workers.decode.giving_way import GivingWay
from workers.decode.iterations import Iterations
from workers.decode.meter import DecodeMeter
from workers.decode.reserving_turns import ReservingTurns
from workers.decode.sealing import Sealer
from workers.decode.sequence import Sequence
from workers.engine.kvcache import OutOfPages
from workers.errors import SessionLostError
from workers.execution.executor import Executor
from workers.execution.jobs import Jobs, see_out, together
from workers.groups.followers import Followers
from workers.groups.rank_messages import AwaitArrival, Held, Hold, Keep, LetGo, Load, Restore, Save, Work
from workers.kvcache.reserving import reserve_prompt

log = logging.getLogger(__name__)
T = TypeVar("T")
Send = Callable[[Reserved | Refused | Finished | WorkFailed], Awaitable[None]]
Emit = Callable[[list[tuple[str, TokenOutput]]], Awaitable[None]]


class DecodeRunner:
    """Answers `Reserve` with `Reserved`; after `Decode` it emits tokens, then says `Finished`.

    `emit` takes pairs of (front's endpoint, output) of one iteration. `transfers` are this runner's own;
    they end with `run`.
    """

    def __init__(
        self,
        executor: Executor,
        pool: WorkerClient,
        transfers: BlockTransfers,
        max_batch: int,
        max_inline_tokens: int,
        arrival_timeout_s: float,
        send: Send,
        emit: Emit,
        jobs: Jobs,
        followers: Followers | None = None,
    ) -> None:
        self._executor, self._pool, self._transfers = executor, pool, transfers
        self._arrival_timeout_s = arrival_timeout_s
        self._send, self._emit = send, emit
        self._jobs = jobs
        self._followers = followers
        self._changed = asyncio.Event()
        self._batch = DecodeBatch(executor.kv, max_batch)
        self._iterations = Iterations(executor, self._changed.set, followers)
        self._sealer = Sealer(pool, transfers)
        self.meter = DecodeMeter()
        self._double_check = DoubleCheck(self.meter, max_inline_tokens)
        self._giving_way = GivingWay(self.meter, max_batch)
        self._resumption: asyncio.TimerHandle | None = None
        """of a batch that gives way"""
        self._numbers = itertools.count()
        self._now_s = asyncio.get_running_loop().time
        self._reserving = ReservingTurns(
            pool.num_pages,
            lambda: ((held.request.flow, held.num_reserved_pages) for held in self._sequences.values()),
        )
        self._orders: dict[Ref, asyncio.Future[Decode]] = {}
        self._sequences: dict[Ref, Sequence] = {}
        self._joining: list[Joining] = []

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch."""
        return len(self._sequences) - self._batch.num_running

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return self._batch.num_running

    @property
    def load(self) -> DecodeLoad:
        """With what is reserved, and what waits."""
        return self._double_check.load(self._sequences.values())

    def take_joining(self) -> list[Joining]:
        """How requests have come along on their way into the batch since this was last asked."""
        joining, self._joining = self._joining, []
        return joining

    def _note_joining(self, sequence: Sequence) -> None:
        self._joining.append(Joining(sequence.ref, sequence.arrival_s, sequence.joining_s))

    def reserve(self, order: Reserve) -> None:
        """Take on a request: first its pages. `Jobs.cancel` stops it and gives everything back."""
        self._jobs.start(order.ref, lambda: self._serve(order))

    def decode(self, order: Decode) -> None:
        """Prefill of a reserved request is done. Unknown work has just been aborted."""
        future = self._orders.get(order.ref)
        if future is not None and not future.done():
            future.set_result(order)

    async def run(self) -> None:
        """The loop: receive tokens, plan the next iteration, send the tokens off while one runs."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                with self.meter.host_time():
                    outputs = self._receive()
                    self._double_check.look_again()
                    self._plan()
                    if outputs:
                        await self._emit(outputs)
                    self._batch.settle()
        finally:
            await self._iterations.close()
            for sequence in self._sequences.values():
                sequence.is_in_flight = False
                sequence.left.set()
            self._transfers.close()

    # -- one request --------------------------------------------------------------------------------

    async def _serve(self, order: Reserve) -> None:
        ref = order.ref
        try:
            await self._work(order)
        except TooSlowError as refusal:
            self.meter.num_refusals += 1
            await self._send(Refused(ref, str(refusal), refusal.batch_size, refusal.predicted_tbt_s))
        except SessionLostError:
            raise  # another rank is gone: this worker leaves, and what it had is placed again
        except (MooncakeError, OutOfPages) as error:
            if self._pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("decode of %s failed: %s", ref.request_id, error)
            is_final = isinstance(error, OutOfPages | GrammarError)
            await self._send(WorkFailed(ref, str(error), retryable=not is_final))

    async def _work(self, order: Reserve) -> None:
        ref, request = order.ref, order.request
        grammar = await self._executor.follow(request.sampling.grammar)
        tokens, now_s = list(request.token_ids), self._now_s()
        sequence = Sequence(next(self._numbers), ref, request, tokens, grammar=grammar, came_s=now_s)
        sequence.tbt_slo_s, sequence.must_be_alone = order.tbt_slo_s, order.alone
        self._sequences[ref] = sequence
        self._orders[ref] = asyncio.get_running_loop().create_future()
        try:
            await self._receive_kvcache(sequence, order)
            await self._generate(sequence)
            assert sequence.finish_reason is not None
            await self._send(
                Finished(
                    ref,
                    sequence.finish_reason,
                    sequence.num_output_tokens,
                    sequence.arrival_s,
                    sequence.joining_s,
                )
            )
            await self._seal(sequence)
        finally:
            try:
                await self._give_back(sequence)
            finally:
                del self._orders[ref], self._sequences[ref]
                self._double_check.look_again()

    async def _receive_kvcache(self, sequence: Sequence, order: Reserve) -> None:
        """Pages, and what is to be had of the KVCache: from prefill with the first token, else from the pool.

        The TBT is checked before the first token leaves (section 3): with what is decoded then, which the
        Conductor could only predict.
        """
        num_pages = -(-len(order.request.token_ids) // self._executor.kv.page_size)
        async with self._reserving.turn(order.request.flow, num_pages):
            grant, held = await self._with_others(
                self._reserve(sequence), lambda: Hold(sequence.number, order.request)
            )
        grant = msgspec.structs.replace(grant, others=tuple(rank.grant for rank in held if rank is not None))
        cached = self._find_cached(sequence, [rank.num_cached for rank in held if rank is not None])
        if self._double_check.inlines(sequence, self._those_that_have_begun):
            self.meter.inlined(sequence, [block.tier for block in cached], self._executor.kv.page_size)
            self._batch.enter(sequence)
            await self._send(Reserved(order.ref, grant, inlined=True))
            return
        self.meter.num_not_inlined += 1
        with self._giving_way.prefill(shares_cores=order.shares_cores):
            await self._send(Reserved(order.ref, grant))
            decode = await self._orders[order.ref]
        sequence.ordered_s = self._now_s()
        if order.may_refuse:
            await self._double_check.pass_in_turn(
                sequence, lambda: self._those_that_have_begun, decode.time_left_s
            )
        sequence.turn_s = self._now_s()
        sequence.num_cached_tokens = decode.num_cached_tokens
        sequence.tokens.append(decode.first_token)
        sequence.newest_logprobs = decode.first_logprobs
        await self._emit([sequence.newest_output])
        await self._wait_arrived(sequence)
        sequence.arrived_s = self._now_s()
        self._note_joining(sequence)
        if sequence.finish_reason is None:
            self._batch.enter(sequence)

    @property
    def _those_that_have_begun(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.has_begun]

    async def _reserve(self, sequence: Sequence) -> Grant:
        page_size = self._executor.kv.page_size
        sequence.reservation = await reserve_prompt(self._pool, sequence.request, page_size)
        return await self._pool.grant(sequence.reservation.reservation_id)

    async def _with_others(
        self, own: Coroutine[Any, Any, T], work: Callable[[], Work]
    ) -> tuple[T, list[Held | None]]:
        """`own`, and beside it `work` in all other ranks. When this is left, all have ended."""
        if self._followers is None:
            return await own, []
        return await together(own, self._followers.call(work()))

    def _find_cached(self, sequence: Sequence, num_elsewhere: list[int]) -> list[ReservedBlock]:
        """The longest prefix that the pools of all ranks hold. At least one token is computed."""
        assert sequence.reservation is not None
        found = list(itertools.takewhile(lambda block: block.sealed, sequence.reservation.blocks))
        found = found[: min(num_elsewhere, default=len(found))]
        num_tokens = len(found) * self._executor.kv.page_size
        sequence.num_cached_tokens = min(num_tokens, len(sequence.tokens) - 1)
        return found

    async def _wait_arrived(self, sequence: Sequence) -> None:
        """Prefill has ended, so the KVCache is on its way, unless its sender was lost before it connected."""
        assert sequence.reservation is not None
        arrives = self._pool.wait_arrived(sequence.reservation.reservation_id)
        try:
            async with asyncio.timeout(self._arrival_timeout_s):
                await self._with_others(arrives, lambda: AwaitArrival(sequence.number))
        except TimeoutError:
            raise TransferError(f"the KVCache did not arrive within {self._arrival_timeout_s:g} s") from None

    async def _generate(self, sequence: Sequence) -> None:
        """In the batch, out of it when its pages are wanted for others, and again."""
        while sequence.finish_reason is None:
            self._changed.set()
            await sequence.admitted.wait()
            if sequence.error is None:
                await self._load(sequence)
                self._batch.join(sequence)
                if sequence.joined_s is None:
                    sequence.joined_s = self._now_s()
                    self._note_joining(sequence)
                self._changed.set()
                await self._release(sequence)
            await sequence.left.wait()
            if sequence.error is not None:
                raise sequence.error
            if sequence.finish_reason is None:
                await self._park(sequence)
                self._batch.enter(sequence)

    async def _load(self, sequence: Sequence) -> None:
        """Its KVCache comes to its pages of the device, beside the batch."""
        if sequence.reservation is None:
            pages = sequence.pages[: len(sequence.saved[0])]
            restoring = self._transfers.restore(pages, sequence.saved)
            await self._with_others(restoring, lambda: Restore(sequence.number, pages))
            sequence.saved = []
            return
        pages = self._filled_pages(sequence)
        await self._with_others(self._load_own(sequence, pages), lambda: Load(sequence.number, pages))

    def _filled_pages(self, sequence: Sequence) -> list[int]:
        return sequence.pages[: -(-sequence.num_kv_tokens // self._executor.kv.page_size)]

    async def _load_own(self, sequence: Sequence, pages: list[int]) -> None:
        assert sequence.reservation is not None
        blocks = sequence.reservation.blocks[: len(pages)]
        pairs = [BlockPair(page, block.page) for page, block in zip(pages, blocks, strict=True)]
        damaged = await self._transfers.load(pairs)
        if damaged:
            keyed = zip(self._sealer.keys_of(sequence), blocks, strict=False)
            await self._pool.verify([key for key, block in keyed if block.page in damaged])
            raise PoolError(f"{len(damaged)} blocks were damaged in the pool and have been dropped")

    async def _park(self, sequence: Sequence) -> None:
        """It is preempted: its KVCache goes to the pool, or to host memory if that has no room."""
        try:
            await self._with_others(self._park_own(sequence), lambda: self._keep(sequence, is_parked=True))
            self.meter.num_preemptions[TO_POOL] += 1
        except PoolError:
            if self._pool.closed.is_set():
                raise
            await self._release(sequence)  # another rank may have had room
            pages = self._filled_pages(sequence)
            saving = self._transfers.save(pages)
            sequence.saved, _ = await self._with_others(saving, lambda: Save(sequence.number, pages))
            self.meter.num_preemptions[TO_HOST] += 1
        self._batch.free(sequence)
        self._changed.set()

    async def _park_own(self, sequence: Sequence) -> None:
        sequence.reservation = await self._sealer.park(sequence)

    def _keep(self, sequence: Sequence, *, is_parked: bool) -> Keep:
        """What the other ranks do when this one parks or seals."""
        keys, pages = self._sealer.keys_of(sequence), self._filled_pages(sequence)
        num_private = len(pages) - len(keys) if is_parked else 0
        tokens = self._sealer.tokens_of(sequence, keys)
        return Keep(sequence.number, keys, num_private, pages, tokens, is_parked)

    async def _seal(self, sequence: Sequence) -> None:
        """The answer can be found from now on, if there is room for it."""
        if sequence.pages:
            try:
                sealing = self._sealer.seal(sequence)
                num_sealed, _ = await self._with_others(
                    sealing, lambda: self._keep(sequence, is_parked=False)
                )
                self.meter.num_sealed_blocks += num_sealed
            except PoolError as error:
                self.meter.num_unsealed += 1
                log.info("the answer of %s is not kept: %s", sequence.ref.request_id, error)

    async def _give_back(self, sequence: Sequence) -> None:
        self._batch.leave(sequence)
        self._changed.set()
        try:
            if sequence.is_in_flight:
                await see_out(asyncio.ensure_future(sequence.left.wait()))
        finally:
            self._batch.free(sequence)
            self._changed.set()
            await self._release(sequence)

    async def _release(self, sequence: Sequence) -> None:
        reservation, sequence.reservation = sequence.reservation, None
        if reservation is not None:
            await self._pool.release(reservation.reservation_id)
            self._reserving.look_again()
        if self._followers is not None:
            await self._followers.call(LetGo(sequence.number))

    # -- the batch ----------------------------------------------------------------------------------

    def _receive(self) -> list[tuple[str, TokenOutput]]:
        """The tokens of iterations that have ended."""
        outputs = []
        for iteration in self._iterations.receive():
            self.meter.ended(iteration)
            self._giving_way.ended(iteration.ended_s)
            for row, (sequence, token) in enumerate(zip(iteration.sequences, iteration.tokens, strict=True)):
                if sequence.finish_reason is not None:
                    continue  # it had been planned before its last token was known
                sequence.tokens.append(token)
                sequence.must_be_alone = False
                sequence.newest_logprobs = iteration.logprobs.get(row)
                if sequence.grammar is not None and sequence.grammar.error is not None:
                    sequence.error = GrammarError(f"the grammar failed: {sequence.grammar.error}")
                    self._batch.leave(sequence)
                    continue
                outputs.append(sequence.newest_output)
                if sequence.finish_reason is not None:
                    self._batch.leave(sequence)
        return outputs

    def _plan(self) -> None:
        if self._resumption is not None:
            self._resumption.cancel()
        ready = _sharing(self._batch.plan())
        if not ready:
            self.meter.idle()
            return
        is_running = self._iterations.is_running
        left_s = self._giving_way.left_s(ready, time.perf_counter(), is_running=is_running)
        if not left_s:
            self._iterations.plan(ready)
        elif not is_running:
            self.meter.gives_way()
            self._resumption = asyncio.get_running_loop().call_later(left_s, self._changed.set)


def _sharing(ready: list[Sequence]) -> list[Sequence]:
    """Who shares the next iteration: one that must be alone, or all others."""
    for sequence in ready:
        if sequence.must_be_alone and not sequence.is_in_flight:
            return [sequence]
    return [sequence for sequence in ready if not sequence.must_be_alone]
