"""The decode runner: continuous batching of requests placed on this instance or migrating to it.

Each request has a task that brings its KVCache here, and seals its blocks in the end. One loop runs the
batch. docs/decode.md shows what runs at the same time.

In a tensor-parallel group the runner is in the first rank. The other ranks do the same work on their parts of
each sequence's KVCache. All ranks compute each iteration.

Owns: decode jobs, and the reports of their errors. Does not know: how requests are placed, how bytes travel.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING

from kvstore.client.worker_client import WorkerClient
from mooncake.errors import MooncakeError
from mooncake.messages.heartbeats import DecodeLoad, Joining
from mooncake.messages.migration import (
    HandOver,
    MigrationOrder,
    ModulesPlace,
    MovesStats,
    PlaceModules,
    PreCopy,
    Prepare,
    TakeOver,
)
from mooncake.messages.requests import Held, Ref
from mooncake.messages.workers import Decode, DecodeRefused, Reserve, WorkFailed
from workers.decode.arrivals import Arrivals
from workers.decode.batch_loop import BatchLoop, Emit
from workers.decode.batching.batch import DecodeBatch
from workers.decode.batching.iterations import Iterations
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.blocks.group_blocks import GroupBlocks
from workers.decode.blocks.reserving_turns import ReservingTurns
from workers.decode.blocks.sequence_blocks import SequenceBlocks
from workers.decode.meter import DecodeMeter
from workers.decode.migration.destination import MigrationDestination
from workers.decode.migration.module_moves import ModuleMoves
from workers.decode.migration.source import MigrationSource
from workers.decode.sequence import Sequence
from workers.decode.sequence_runs import Send, SequenceRuns
from workers.decode.sequence_span import sequence_span
from workers.decode.tbt_slo.double_check import DoubleCheck, HeldTokens, TooSlowError
from workers.decode.tbt_slo.inlining import PromptChunks
from workers.decode.tbt_slo.pauses import DecodePauses
from workers.decode.tbt_slo.prompt_budget import ChunkLimits, PromptBudget
from workers.errors import NoRoomError, SessionLostError, report_of
from workers.execution.executor import Executor
from workers.execution.jobs import Jobs
from workers.groups.followers import Followers
from workers.kvcache.shared_prefixes import PrefixTurns
from workers.modules.helper_link import HelperAccess
from workers.modules.prompts import Prompts

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer

log = logging.getLogger(__name__)


class DecodeRunner:
    """The runner of a decode instance, which answers `Reserve` with `Reserved`.

    After `Decode` the runner emits tokens, then sends `Finished`.

    A prompt that is inlined (`Reserve.inline`) needs no `Decode`; `Prefilled` reports its first token. A
    request that migrates here comes with `Prepare` and `TakeOver` instead of `Reserve` and `Decode`.
    `Jobs.cancel` stops a request at any step, and releases all that the request holds.

    `emit` takes pairs of (front's endpoint, output) of one iteration. Only this runner uses `transfers`, and
    `run` closes them at its end. `tracer` gets spans of requests. `beat` sends a heartbeat. `prompts`
    are those of `Prefill` orders. `is_prefill_only` returns whether the instance decodes nothing.
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
        fingerprint: str,
        helpers: HelperAccess,
        beat: Callable[[], Awaitable[None]],
        prompts: Prompts,
        is_prefill_only: Callable[[], bool],
        followers: Followers | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._pool, self._send, self._jobs, self._tracer = pool, send, jobs, tracer
        self._beat, self._is_prefill_only = beat, is_prefill_only
        self.meter = DecodeMeter()
        self._sequences: dict[Ref, Sequence] = {}
        changed, predictors, page_size = asyncio.Event(), self.meter.predictors, executor.kv.page_size
        self._page_size = page_size
        self._batch = DecodeBatch(executor.kv, max_batch)
        self._blocks = GroupBlocks(SequenceBlocks(pool, transfers), followers, page_size, arrival_timeout_s)
        self._double_check = DoubleCheck(predictors, max_batch)
        self._reserving = ReservingTurns(
            pool.num_pages,
            lambda: (
                (sequence.request.flow, self._blocks.num_reserved_pages(sequence))
                for sequence in self._sequences.values()
            ),
        )
        held_tokens, pauses = HeldTokens(changed.set), DecodePauses(predictors, max_batch)
        prefix_turns = PrefixTurns(page_size)
        self._loop = BatchLoop(
            self._batch,
            Iterations(executor, changed.set, followers),
            PromptChunks(PromptBudget(predictors, chunk_limits)),
            pauses,
            held_tokens,
            self.meter,
            changed,
            self._recheck,
            lambda iteration: self._module_moves.iteration_ended(iteration),
            emit,
        )
        self._module_moves = ModuleMoves(
            pool.address.instance,
            fingerprint,
            executor,
            self._batch,
            transfers,
            self._loop,
            chunk_limits.most + max_batch,
            max_batch,
            helpers,
            lambda: self.most_pages,
            prompts,
            is_prefill_only,
            self._call_off,
        )
        self._source = MigrationSource(self._batch, self._blocks, self._sequences, changed, pool.closed, send)
        self._runs = SequenceRuns(
            self._batch,
            self._blocks,
            self._source,
            held_tokens,
            prefix_turns,
            self.meter,
            self._sequences,
            changed,
            pool.closed,
            send,
            emit,
            self._record,
        )
        self._arrivals = Arrivals(
            executor,
            self._batch,
            self._blocks,
            self._runs,
            self._double_check,
            held_tokens,
            pauses,
            self._reserving,
            prefix_turns,
            self.meter,
            self._sequences,
            send,
            emit,
        )
        self._destination = MigrationDestination(executor, self._batch, self._blocks, self._runs, send)

    @property
    def num_waiting(self) -> int:
        """The number of requests that are not in the batch."""
        return len(self._sequences) - self._batch.num_running

    @property
    def num_running(self) -> int:
        """The number of requests in the batch."""
        return self._batch.num_running

    @property
    def modules(self) -> ModulesPlace:
        """The place of this instance's modules, with the outcome of the latest order."""
        return self._module_moves.place

    @property
    def why_no_prompts(self) -> str:
        """The reason why this instance can carry out no `Prefill` order; empty if it can.

        An instance that decodes cannot while modules are at a helper, or move: the helper takes iterations
        of the batch alone. Prompts that are inlined there pass through the helper.
        """
        helper = "" if self._is_prefill_only() else self.modules.helper
        return f"modules of it are at {helper}, or move" if helper else ""

    def helper_lost(self) -> None:
        """Take all modules back, because a pass over prompts has shown that their helper is lost."""
        self._module_moves.lost()

    @property
    def moves(self) -> MovesStats:
        """Totals of the moves of modules."""
        return self._module_moves.meter.stats

    @property
    def most_pages(self) -> int:
        """The most device pages that any request on this instance can need before its end."""
        return max(
            (
                sequence.most_pages(self._page_size)
                for sequence in self._sequences.values()
                if sequence.finish_reason is None
            ),
            default=0,
        )

    @property
    def load(self) -> DecodeLoad:
        """The load of this instance. Requests that are reserved or wait are included."""
        return self._double_check.load(self._sequences.values())

    def take_held(self) -> list[Held]:
        """Return the requests that go on under another Conductor, and stop the others.

        Requests that migrate to this instance stop, because their sources go on decoding them. Requests
        whose grammar is still being compiled stop too; requests that wait for pool pages go on.
        """
        held, prepared = list[Held](), self._destination.prepared
        for ref in self._jobs.going_on:
            sequence = self._sequences.get(ref)
            if sequence is None or ref in prepared:
                self._jobs.cancel(ref)
            elif sequence.held_as is not None:
                held.append(Held(ref, sequence.held_as))
        return held

    def take_joining(self) -> list[Joining]:
        """Return how long requests have waited on their way into the batch, as known since the last call."""
        return self._runs.take_joining()

    def reserve(self, order: Reserve) -> None:
        """Begin a request by reserving its pool pages."""
        self._jobs.start(order.ref, lambda: self._answered(order.ref, self._arrivals.serve(order)))

    def decode(self, order: Decode) -> None:
        """Continue a reserved request whose prefill is done."""
        self._arrivals.decode(order)

    def migrate(self, order: MigrationOrder) -> None:
        """Carry out an order to the source or the destination of a migration.

        An order for an unknown request is dropped, because the request has just ended, failed or been
        aborted. Only `Prepare` begins a migration here.
        """
        match order:
            case PreCopy():
                self._source.pre_copy(order)
            case HandOver():
                self._source.hand_over(order)
            case Prepare() | TakeOver() if self._destination.follow_up(order):
                pass  # the request's own task carries the order out
            case Prepare():
                self._jobs.start(order.ref, lambda: self._answered(order.ref, self._destination.serve(order)))

    def place_modules(self, order: PlaceModules) -> None:
        """Move modules to a helper, or back. The property `modules` shows the result."""
        self._module_moves.order(order)

    async def run(self) -> None:
        """Run the batch until cancelled."""
        try:
            # Both are cancelled at once: the loop's end may wait for an iteration that waits for a helper.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._module_moves.run())
                group.create_task(self._loop.run())
        finally:
            for sequence in self._sequences.values():
                sequence.in_flight_until = None
                sequence.note_left()
            self._blocks.close()

    def _record(self, sequence: Sequence, error: str) -> None:
        request = sequence.request
        if self._tracer is not None and request.is_traced:
            self._tracer.record(sequence_span(sequence, self._pool.address.instance, error), request.span)

    def _recheck(self) -> None:
        self._double_check.recheck()
        self._reserving.recheck()
        self._module_moves.recheck()

    async def _call_off(self, sequence: Sequence) -> None:
        """Give up a request that was to migrate to this instance. Its source goes on decoding it."""
        if sequence.ref in self._jobs.going_on:
            self._jobs.cancel(sequence.ref)
            reason = "the pages that it has here go, as modules come back"
            await self._send(WorkFailed(sequence.ref, reason, retryable=True))

    async def _answered(self, ref: Ref, serving: Coroutine[None, None, None]) -> None:
        """Serve a request, and report to the Conductor if the request fails."""
        try:
            await serving
        except TooSlowError as refusal:
            self.meter.num_refusals += 1
            await self._send(DecodeRefused(ref, str(refusal), refusal.batch_size, refusal.predicted_tbt_s))
        except SessionLostError:
            raise  # another rank is gone: this worker's session ends, and its requests are placed again
        except NoRoomError as error:
            log.info("%s does not go on here: %s", ref.request_id, error)
            await self._beat()  # the Conductor learns the present number of pages before it tries again
            await self._send(report_of(ref, error))
        except MooncakeError as error:
            if self._pool.closed.is_set():
                return  # the session ends, and with it all that the Conductor has placed here
            log.warning("decode of %s failed: %s", ref.request_id, error)
            await self._send(report_of(ref, error))
