"""The decode runner: reserve pages, wait for the KVCache, batch continuously (Mooncake, section 3, step 4).

Each request has a task that brings its KVCache here and seals it in the end; one loop runs the batch.
docs/decode.md shows what happens beside what.

In a tensor-parallel group this is the first rank: what it does with a sequence's KVCache the others do with
theirs, and each iteration is computed by all.

Owns: decode jobs and their order of events. Does not know: who decides, how bytes travel, the next request.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import GrammarError, MooncakeError, PoolError
from mooncake.messages.fronts import TokenOutput
from mooncake.messages.requests import Ref
from mooncake.messages.workers import (
    TO_HOST,
    TO_POOL,
    Decode,
    DecodeLoad,
    Finished,
    Joining,
    Prefilled,
    Refused,
    Reserve,
    Reserved,
    WorkFailed,
)
from workers.decode.batch import DecodeBatch
from workers.decode.block_transfers import BlockTransfers
from workers.decode.double_check import DoubleCheck, HeldTokens, TooSlowError
from workers.decode.group_blocks import GroupBlocks
from workers.decode.inlining import PromptChunks
from workers.decode.iterations import Iterations
from workers.decode.meter import DecodeMeter
from workers.decode.pauses import DecodePauses
from workers.decode.prompt_budget import ChunkLimits, PromptBudget
from workers.decode.reserving_turns import ReservingTurns
from workers.decode.sequence import Sequence
from workers.decode.sequence_blocks import SequenceBlocks
from workers.engine.kvcache import OutOfPages
from workers.errors import SessionLostError
from workers.execution.executor import Executor
from workers.execution.jobs import Jobs, wait_to_end
from workers.groups.followers import Followers
from workers.kvcache.shared_prefixes import PrefixTurns

log = logging.getLogger(__name__)
Send = Callable[[Reserved | Prefilled | Refused | Finished | WorkFailed], Awaitable[None]]
Emit = Callable[[list[tuple[str, TokenOutput]]], Awaitable[None]]


class DecodeRunner:
    """The runner answers `Reserve` with `Reserved`; after `Decode` it emits tokens, then says `Finished`.

    A prompt that is inlined (`Reserve.inline`) needs no `Decode`; `Prefilled` tells its first token.
    `emit` takes pairs of (front's endpoint, output) of one iteration. `transfers` are this runner's own;
    they end with `run`.
    """

    def __init__(
        self,
        executor: Executor,
        pool: WorkerClient,
        transfers: BlockTransfers,
        max_batch: int,
        chunk_limits: ChunkLimits,
        arrival_timeout_s: float,
        send: Send,
        emit: Emit,
        jobs: Jobs,
        followers: Followers | None = None,
    ) -> None:
        self._executor, self._pool = executor, pool
        self._send, self._emit = send, emit
        self._jobs = jobs
        self._changed = asyncio.Event()
        self._batch = DecodeBatch(executor.kv, max_batch)
        self._iterations = Iterations(executor, self._changed.set, followers)
        page_size = executor.kv.page_size
        self._blocks = GroupBlocks(SequenceBlocks(pool, transfers), followers, page_size, arrival_timeout_s)
        self.meter = DecodeMeter()
        self._prefix_turns = PrefixTurns(page_size)
        predictors = self.meter.predictors
        self._double_check = DoubleCheck(predictors, max_batch)
        self._held_tokens = HeldTokens(self._changed.set)
        self._chunks = PromptChunks(PromptBudget(predictors, chunk_limits))
        self._pauses = DecodePauses(predictors, max_batch)
        self._resumption: asyncio.TimerHandle | None = None
        """Timer that ends a pause between two iterations."""
        self._numbers = itertools.count()
        self._now_s = asyncio.get_running_loop().time
        self._reserving = ReservingTurns(
            pool.num_pages,
            lambda: (
                (sequence.request.flow, self._blocks.num_reserved_pages(sequence))
                for sequence in self._sequences.values()
            ),
        )
        self._orders: dict[Ref, asyncio.Future[Decode]] = {}
        self._sequences: dict[Ref, Sequence] = {}
        self._joining: list[Joining] = []

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not in the batch."""
        return len(self._sequences) - self._batch.num_running

    @property
    def num_running(self) -> int:
        """Number of requests in the batch."""
        return self._batch.num_running

    @property
    def load(self) -> DecodeLoad:
        """Load of this instance, reserved and waiting requests included."""
        return self._double_check.load(self._sequences.values())

    def take_joining(self) -> list[Joining]:
        """Return the progress of requests into the batch since the last call, and forget it."""
        joining, self._joining = self._joining, []
        return joining

    def _note_joining(self, sequence: Sequence) -> None:
        self._joining.append(Joining(sequence.ref, sequence.arrival_s, sequence.joining_s))

    def reserve(self, order: Reserve) -> None:
        """Begin a request by reserving its pages. `Jobs.cancel` stops it and releases everything."""
        self._jobs.start(order.ref, lambda: self._serve(order))

    def decode(self, order: Decode) -> None:
        """Continue a reserved request whose prefill is done. An unknown one has just been aborted."""
        future = self._orders.get(order.ref)
        if future is not None and not future.done():
            future.set_result(order)

    async def run(self) -> None:
        """Loop: receive tokens, plan the next iteration, send the tokens while one runs."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                with self.meter.host_time():
                    outputs = self._held_tokens.take_released() + self._receive()
                    self._double_check.recheck()
                    self._plan()
                    if outputs:
                        await self._emit(outputs)
                    self._batch.settle()
        finally:
            await self._iterations.close()
            for sequence in self._sequences.values():
                sequence.in_flight_until = None
                sequence.note_left()
            self._blocks.close()

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
        sequence = Sequence(next(self._numbers), ref, request, tokens, grammar=grammar, received_s=now_s)
        sequence.tbt_slo_s, sequence.must_be_alone = order.tbt_slo_s, order.alone
        sequence.is_inlined = order.inline
        self._sequences[ref] = sequence
        self._orders[ref] = asyncio.get_running_loop().create_future()
        try:
            await self._reserve(sequence, order)
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
            self._prefix_turns.stored(sequence.ref)
            self._held_tokens.drop(sequence)
            try:
                await self._give_back(sequence)
            finally:
                del self._orders[ref], self._sequences[ref]
                self._double_check.recheck()

    async def _reserve(self, sequence: Sequence, order: Reserve) -> None:
        """Reserve pages, and let the sequence enter the batch: at once if its prompt is computed there."""
        num_tokens, page_size = len(order.request.token_ids), self._executor.kv.page_size
        if order.inline:
            await self._prefix_turns.wait(order.ref, sequence.rank, order.request.block_keys)
        async with self._reserving.turn(order.request.flow, -(-num_tokens // page_size)):
            reserved = await self._blocks.reserve(sequence)
        if order.inline:
            self._prefix_turns.reserved(order.ref, len(reserved.cached_tiers))
            sequence.num_cached_tokens = min(len(reserved.cached_tiers) * page_size, num_tokens - 1)
            sequence.num_tokens_by_source = reserved.num_tokens_by_source(num_tokens, page_size)
            self._batch.enter(sequence)
            await self._send(Reserved(order.ref, reserved.grant))
            return
        self.meter.num_not_inlined += 1
        with self._pauses.prefill(shares_cores=order.shares_cores):
            await self._send(Reserved(order.ref, reserved.grant))
            decode = await self._orders[order.ref]
        await self._receive_kvcache(sequence, decode, may_refuse=order.may_refuse)

    async def _receive_kvcache(self, sequence: Sequence, decode: Decode, *, may_refuse: bool) -> None:
        """Get the prompt's KVCache from prefill, with the first token.

        The TBT is checked before the first token leaves (section 3), with the batch of that moment, which the
        Conductor could only predict. With both SLOs the first token is held while its KVCache comes.
        """
        sequence.ordered_s = self._now_s()
        due_s = None if decode.time_left_s is None else sequence.ordered_s + decode.time_left_s
        if may_refuse:
            await self._double_check.wait_turn(sequence, lambda: self._begun_sequences, decode.time_left_s)
        sequence.turn_s = self._now_s()
        sequence.num_cached_tokens = decode.num_cached_tokens
        sequence.tokens.append(decode.first_token)
        sequence.newest_logprobs = decode.first_logprobs
        if due_s is None or sequence.tbt_slo_s is None or sequence.finish_reason is not None:
            await self._emit([sequence.newest_output])
        else:
            self._held_tokens.hold(sequence, due_s - sequence.turn_s)
        await self._blocks.wait_arrived(sequence)
        sequence.arrived_s = self._now_s()
        self._note_joining(sequence)
        if sequence.finish_reason is None:
            self._batch.enter(sequence)

    @property
    def _begun_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.has_begun]

    async def _generate(self, sequence: Sequence) -> None:
        """Decode the sequence to its end, through as many preemptions as there are."""
        awaits_prefill = sequence.is_inlined
        while sequence.finish_reason is None:
            self._changed.set()
            await sequence.admitted.wait()
            if sequence.error is None:
                await self._blocks.load(sequence)
                self._batch.join(sequence)
                self._held_tokens.release(sequence)
                if sequence.joined_s is None:
                    sequence.joined_s = self._now_s()
                    self._note_joining(sequence)
                self._changed.set()
                await self._release(sequence)
                if awaits_prefill:
                    await sequence.prefilled.wait()
                    awaits_prefill = not sequence.has_drawn
                    await self._end_prefill(sequence)
            await sequence.left.wait()
            if sequence.error is not None:
                raise sequence.error
            if sequence.finish_reason is None:
                await self._park(sequence)
                self._batch.enter(sequence)

    async def _end_prefill(self, sequence: Sequence) -> None:
        """Tell the Conductor that an inlined prompt has its first token, and store its blocks for others."""
        if not sequence.has_drawn or sequence.error is not None:
            return
        self.meter.inlined(sequence.num_tokens_by_source)
        first_token = sequence.tokens[len(sequence.request.token_ids)]
        await self._send(Prefilled(sequence.ref, first_token, sequence.num_cached_tokens))
        if sequence.finish_reason is None:
            with contextlib.suppress(PoolError):
                await self._blocks.store(sequence, is_parked=False)
            self._prefix_turns.stored(sequence.ref)

    async def _park(self, sequence: Sequence) -> None:
        """Move a preempted sequence's KVCache to the pool, or to host memory if the pool has no room."""
        try:
            await self._blocks.store(sequence, is_parked=True)
            self.meter.num_preemptions[TO_POOL] += 1
        except PoolError:
            if self._pool.closed.is_set():
                raise
            await self._release(sequence)  # another rank may have had room
            await self._blocks.save_to_host(sequence)
            self.meter.num_preemptions[TO_HOST] += 1
        self._prefix_turns.stored(sequence.ref)
        self._batch.free(sequence)
        self._changed.set()

    async def _seal(self, sequence: Sequence) -> None:
        """Seal the output's blocks, so that prompts can reuse them, if the pool has room."""
        if sequence.pages:
            try:
                await self._blocks.store(sequence, is_parked=False)
                self.meter.num_sealed_blocks = self._blocks.num_sealed_blocks
            except PoolError as error:
                self.meter.num_unsealed += 1
                log.info("the answer of %s is not kept: %s", sequence.ref.request_id, error)

    async def _give_back(self, sequence: Sequence) -> None:
        self._batch.leave(sequence)
        self._changed.set()
        try:
            if sequence.is_in_flight:
                await wait_to_end(asyncio.ensure_future(sequence.left.wait()))
        finally:
            self._batch.free(sequence)
            self._changed.set()
            await self._release(sequence)

    async def _release(self, sequence: Sequence) -> None:
        await self._blocks.release(sequence)
        self._reserving.recheck()

    # -- the batch ----------------------------------------------------------------------------------

    def _receive(self) -> list[tuple[str, TokenOutput]]:
        """Return the tokens of iterations that have ended."""
        outputs = []
        for iteration in self._iterations.receive():
            self.meter.ended(iteration)
            self._pauses.ended(iteration.ended_s)
            for sequence, end, token, logprobs in iteration.results:
                if sequence.finish_reason is not None:
                    continue  # it had been planned before its last token was known
                if token is None:
                    sequence.num_computed_tokens = end - sequence.num_cached_tokens
                    continue
                sequence.tokens.append(token)
                sequence.prefilled.set()
                sequence.must_be_alone = False
                sequence.newest_logprobs = logprobs
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
        chunks = self._chunks.plan(self._batch.plan())
        if not chunks:
            self.meter.idle()
            return
        is_running = self._iterations.is_running
        left_s = self._pauses.remaining_s(chunks, time.perf_counter(), is_running=is_running)
        if not left_s:
            self._iterations.plan(chunks)
        elif not is_running:
            self.meter.pauses()
            self._resumption = asyncio.get_running_loop().call_later(left_s, self._changed.set)
