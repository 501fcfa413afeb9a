"""The course of a sequence through the batch: joining, preemption, end or move to another instance.

Each sequence has a task for all of these steps. Only this task frees the sequence's pages, so no page is
freed while it is copied. The one exception: between two iterations, `batching.division.end_division` replaces
full pages of running sequences that are not being stored.

Owns: the sequences of an instance, the order of events from the batch to the end. Does not know: how a
sequence's KVCache gets to this instance, iterations.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from mooncake.errors import PoolError
from mooncake.messages.heartbeats import TO_HOST, TO_POOL, Joining
from mooncake.messages.migration import FromMigration, HandedOver
from mooncake.messages.requests import Ref, Request
from mooncake.messages.workers import DecodeRefused, Finished, Prefilled, Reserved, WorkFailed
from mooncake.model.grammar import GrammarState
from mooncake.tracing.spans import why_ended
from workers.decode.batch_loop import Emit
from workers.decode.batching.batch import DecodeBatch
from workers.decode.blocks.group_blocks import GroupBlocks
from workers.decode.meter import DecodeMeter
from workers.decode.migration.source import MigrationSource
from workers.decode.sequence import Sequence, SequenceState
from workers.decode.tbt_slo.double_check import HeldTokens
from workers.errors import SessionLostError
from workers.execution.jobs import wait_to_end
from workers.kvcache.shared_prefixes import PrefixTurns

log = logging.getLogger(__name__)
Send = Callable[
    [Reserved | Prefilled | DecodeRefused | Finished | WorkFailed | FromMigration], Awaitable[None]
]
"""A callback that sends a message to the Conductor."""
Record = Callable[[Sequence, str], None]
"""A callback for each sequence that leaves the instance.

Its second argument is the reason for an early end, or an empty string.
"""


class SequenceRuns:
    """The sequences of one instance, each found by its attempt (`Ref`).

    `open` adds a sequence. The caller of `open` then makes the sequence enter or join the batch, and calls
    `complete`, which decodes the sequence to its end.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        blocks: GroupBlocks,
        source: MigrationSource,
        held_tokens: HeldTokens,
        prefix_turns: PrefixTurns,
        meter: DecodeMeter,
        sequences: dict[Ref, Sequence],
        changed: asyncio.Event,
        pool_closed: asyncio.Event,
        send: Send,
        emit: Emit,
        record: Record,
    ) -> None:
        """Prepare the sequences' shared parts. `record` is called when a sequence ends on this instance."""
        self._batch, self._blocks, self._source = batch, blocks, source
        self._held_tokens, self._prefix_turns, self._meter = held_tokens, prefix_turns, meter
        self._sequences, self._changed, self._pool_closed = sequences, changed, pool_closed
        self._send, self._emit, self._record = send, emit, record
        self._numbers = itertools.count()
        self._now_s = asyncio.get_running_loop().time
        self._joining: list[Joining] = []

    def take_joining(self) -> list[Joining]:
        """Return how long requests have waited on their way into the batch, as known since the last call."""
        joining, self._joining = self._joining, []
        return joining

    def note_joining(self, sequence: Sequence) -> None:
        """Record how long a sequence has waited so far on its way into the batch."""
        self._joining.append(Joining(sequence.ref, sequence.arrival_s, sequence.joining_s))

    @contextlib.asynccontextmanager
    async def open(
        self, ref: Ref, request: Request, grammar: GrammarState | None, tbt_slo_s: float | None
    ) -> AsyncIterator[Sequence]:
        """Make a context with a sequence for the request. Its pages and batch slot are released at the end.

        Raises NoRoomError if so many device pages are lent that the sequence's whole output would not fit.
        """
        tokens, now_s = list(request.token_ids), self._now_s()
        sequence = Sequence(next(self._numbers), ref, request, tokens, grammar=grammar, received_s=now_s)
        self._batch.check_loans(sequence)
        sequence.tbt_slo_s = tbt_slo_s
        self._sequences[ref] = sequence
        error = ""
        try:
            yield sequence
        except BaseException as failure:
            error = why_ended(failure)
            raise
        finally:
            self._record(sequence, error)
            self._prefix_turns.stored(ref)
            self._held_tokens.drop(sequence)
            try:
                await self._release_all(sequence)
            finally:
                del self._sequences[ref]
                self._changed.set()

    async def complete(self, sequence: Sequence) -> None:
        """Decode a sequence until it ends or is handed over, and report that to the Conductor.

        Then the sequence's blocks are sealed in the pool.
        """
        await self._generate(sequence)
        sequence.left_s, ref = self._now_s(), sequence.ref
        if sequence.finish_reason is not None:
            await self._send(
                Finished(
                    ref,
                    sequence.finish_reason,
                    sequence.num_output_tokens,
                    sequence.arrival_s,
                    sequence.joining_s,
                )
            )
        else:
            held = self._held_tokens.take(sequence)
            if held is not None:
                await self._emit([held])
            await self._send(HandedOver(ref, sequence.output))
        await self._seal(sequence)

    async def release(self, sequence: Sequence) -> None:
        """Release a sequence's pages in the pools."""
        await self._blocks.release(sequence)
        self._changed.set()

    async def _generate(self, sequence: Sequence) -> None:
        """Decode a sequence to its end, or until another instance is to continue it.

        The sequence can be preempted any number of times. Raises the sequence's error if it fails, and
        SessionLostError if the batch's loop has ended before.
        """
        while sequence.finish_reason is None:
            self._changed.set()
            if sequence.is_wanted_elsewhere:
                self._batch.leave(sequence)
            if sequence.state is SequenceState.WAITING:
                await self._source.copying_until(sequence.admitted, sequence)
            if sequence.state is SequenceState.LOADING:
                await self._join(sequence)
            await self._source.copying_until(sequence.left, sequence)
            if sequence.error is not None:
                raise sequence.error
            if sequence.is_wanted_elsewhere:
                return
            if sequence.finish_reason is None:
                await self._park(sequence)
                if sequence.state is not SequenceState.OUT:  # it was not preempted
                    raise SessionLostError("no iteration runs any more")
                self._batch.enter(sequence)

    async def _join(self, sequence: Sequence) -> None:
        """Load an admitted sequence, let it join the batch, and await an inlined prompt's first token."""
        awaits_prefill = sequence.is_inlined and not sequence.has_drawn
        await self._blocks.load(sequence)
        self._batch.join(sequence)
        if sequence.joined_s is None:
            sequence.joined_s = self._now_s()
            self.note_joining(sequence)
        await self.release(sequence)
        if awaits_prefill:
            await sequence.prefilled.wait()
            await self._end_prefill(sequence)

    async def _end_prefill(self, sequence: Sequence) -> None:
        """Report an inlined prompt's first token, and store the prompt's blocks for other requests."""
        if not sequence.has_drawn or sequence.error is not None:
            return
        sequence.prefilled_s = self._now_s()
        self._meter.inlined(sequence.num_tokens_by_source)
        first_token = sequence.tokens[len(sequence.request.token_ids)]
        await self._send(Prefilled(sequence.ref, first_token, sequence.num_cached_tokens))
        if sequence.finish_reason is None:
            with contextlib.suppress(PoolError):
                await self._blocks.store(sequence, is_parked=False)
            self._prefix_turns.stored(sequence.ref)

    async def _park(self, sequence: Sequence) -> None:
        """Move a preempted sequence's KVCache to the pool, or to host memory if the pool has no room."""
        sequence.num_preemptions += 1
        try:
            await self._blocks.store(sequence, is_parked=True)
            self._meter.num_preemptions[TO_POOL] += 1
        except PoolError:
            if self._pool_closed.is_set():
                raise
            await self.release(sequence)  # another rank may have had room
            await self._blocks.save_to_host(sequence)
            self._meter.num_preemptions[TO_HOST] += 1
        self._prefix_turns.stored(sequence.ref)
        self._batch.free(sequence)
        self._changed.set()

    async def _seal(self, sequence: Sequence) -> None:
        """Seal the sequence's blocks if the pool has room, so that later prompts can reuse them."""
        if sequence.pages:
            try:
                await self._blocks.store(sequence, is_parked=False)
                self._meter.num_sealed_blocks = self._blocks.num_sealed_blocks
            except PoolError as error:
                self._meter.num_unsealed += 1
                log.info("the answer of %s is not kept: %s", sequence.ref.request_id, error)

    async def _release_all(self, sequence: Sequence) -> None:
        self._batch.leave(sequence)
        self._changed.set()
        try:
            if sequence.is_in_flight:
                await wait_to_end(asyncio.ensure_future(sequence.left.wait()))
        finally:
            self._batch.free(sequence)
            await self.release(sequence)
