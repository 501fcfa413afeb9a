"""The destination of migrations: batch slot, device pages and KVCache for a sequence that its source decodes.

The full blocks come through the pools, in rounds: each round loads the blocks behind those that are on the
device already. The tokens behind the last full block are computed here, in the first iteration.

Owns: prepared sequences. Does not know: sources, why a request moves, what the batch does with the sequence.
"""

import asyncio

from mooncake.errors import PoolFullError, TransferError
from mooncake.messages.migration import Prepare, Prepared, TakeOver
from mooncake.messages.requests import Ref
from workers.decode.batching.batch import DecodeBatch
from workers.decode.blocks.group_blocks import GroupBlocks
from workers.decode.sequence import PREPARE, CopyTimes, Sequence
from workers.decode.sequence_runs import Send, SequenceRuns
from workers.errors import NoRoomError
from workers.execution.executor import Executor


class MigrationDestination:
    """The sequences that migrate to one instance. `serve` runs for each of them, from its first order on."""

    def __init__(
        self,
        executor: Executor,
        batch: DecodeBatch,
        blocks: GroupBlocks,
        runs: SequenceRuns,
        send: Send,
    ) -> None:
        self._executor, self._batch, self._blocks, self._runs = executor, batch, blocks, runs
        self._send = send
        self._orders: dict[Ref, asyncio.Queue[Prepare | TakeOver]] = {}
        """The queued orders of each sequence that has come here."""
        self._taken_over: set[Ref] = set()
        self._now_s = asyncio.get_running_loop().time

    @property
    def prepared(self) -> set[Ref]:
        """The sequences that came here by a `Prepare` order and are not taken over yet."""
        return self._orders.keys() - self._taken_over

    def follow_up(self, order: Prepare | TakeOver) -> bool:
        """Pass on a further order about a sequence. Returns whether the sequence is known here."""
        orders = self._orders.get(order.ref)
        if orders is None:
            return False
        orders.put_nowait(order)
        return True

    async def serve(self, first: Prepare) -> None:
        """Prepare a sequence, in as many rounds as are ordered, take it over, and decode it to its end.

        Raises NoRoomError if a batch slot, device pages or pool pages are missing; TransferError if blocks do
        not arrive in time; PoolError if blocks are damaged.
        """
        orders = self._orders[first.ref] = asyncio.Queue[Prepare | TakeOver]()
        orders.put_nowait(first)
        try:
            grammar = await self._executor.follow(first.request.sampling.grammar)
            async with self._runs.open(first.ref, first.request, grammar, first.tbt_slo_s) as sequence:
                while isinstance(order := await orders.get(), Prepare):
                    await self._prepare(sequence, order)
                self._take_over(sequence, order)
                await self._runs.complete(sequence)
        finally:
            del self._orders[first.ref]
            self._taken_over.discard(first.ref)

    async def _prepare(self, sequence: Sequence, order: Prepare) -> None:
        sequence.copies.append(CopyTimes(PREPARE, self._now_s()))
        sequence.continue_behind(order.request)
        if not self._batch.prepare(sequence):
            raise NoRoomError(
                "the batch has no slot, or not enough pages, for a request that is to move here"
            )
        try:
            async with asyncio.timeout(order.timeout_s):
                await self._load(sequence, order)
        except TimeoutError:
            raise TransferError(f"its KVCache did not come within {order.timeout_s:g} s") from None
        except PoolFullError as full:
            raise NoRoomError(f"the pool has no room for a request that is to move here: {full}") from None
        sequence.copies[-1] = sequence.copies[-1].ended(self._now_s(), sequence.num_cached_tokens)
        await self._send(Prepared(sequence.ref, sequence.num_cached_tokens))

    async def _load(self, sequence: Sequence, order: Prepare) -> None:
        """Fetch and load the full blocks that are not loaded yet, as many as can be fetched.

        The newest token has no KVCache yet, so its block is not full.
        """
        page_size = self._executor.kv.page_size
        first, end = sequence.num_cached_tokens // page_size, (len(sequence.tokens) - 1) // page_size
        keys = order.request.block_keys[first:end]
        if keys:
            num_blocks = await self._blocks.fetch(sequence, keys, order.shards)
            await self._blocks.load_to(sequence, sequence.pages[first : first + num_blocks])
            await self._runs.release(sequence)
            sequence.num_cached_tokens += num_blocks * page_size

    def _take_over(self, sequence: Sequence, order: TakeOver) -> None:
        self._taken_over.add(order.ref)
        sequence.continue_behind(order.request)
        sequence.joined_s = self._now_s()
        self._batch.join(sequence)
