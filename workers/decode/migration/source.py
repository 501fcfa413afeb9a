"""The source of migrations: a sequence's blocks are stored in the pool while it is decoded, then it leaves.

Orders come at any time. The sequence's own task copies its pages: the task waits in `copying_until` while the
sequence is in the batch or waits to be admitted, and carries out orders there. An order for a sequence whose
KVCache is not complete waits until it is.

Owns: the answers to `PreCopy`, when a sequence leaves. Does not know: destinations, what is handed over.
"""

import asyncio
from collections.abc import Awaitable, Callable

from mooncake.errors import PoolError
from mooncake.messages.migration import HandOver, PreCopied, PreCopy
from mooncake.messages.requests import Ref
from workers.decode.batching.batch import DecodeBatch
from workers.decode.blocks.group_blocks import GroupBlocks
from workers.decode.sequence import PRE_COPY, CopyTimes, Sequence


class MigrationSource:
    """The handler of the migration orders to one instance.

    An order for an unknown sequence is dropped, because the sequence has just ended.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        blocks: GroupBlocks,
        sequences: dict[Ref, Sequence],
        changed: asyncio.Event,
        pool_closed: asyncio.Event,
        send: Callable[[PreCopied], Awaitable[None]],
    ) -> None:
        self._batch, self._blocks, self._sequences = batch, blocks, sequences
        self._changed, self._pool_closed, self._send = changed, pool_closed, send
        self._now_s = asyncio.get_running_loop().time

    def pre_copy(self, order: PreCopy) -> None:
        """Store the sequence's full blocks that the pool lacks, once it has `order.num_tokens` tokens."""
        sequence = self._sequences.get(order.ref)
        if sequence is not None:
            sequence.copy_at = order.num_tokens
            sequence.check_copy()

    def hand_over(self, order: HandOver) -> None:
        """Let a sequence leave the batch, or the wait queue.

        An iteration that is running is the sequence's last one here.
        """
        sequence = self._sequences.get(order.ref)
        if sequence is not None:
            sequence.is_wanted_elsewhere = True
            self._batch.leave(sequence)
            self._changed.set()

    async def copying_until(self, event: asyncio.Event, sequence: Sequence) -> None:
        """Wait for `event`. Meanwhile carry out orders to store the sequence's blocks."""
        while not event.is_set():
            await _first_set(event, sequence.copy_due)
            if not event.is_set():
                sequence.copy_at = None
                sequence.copy_due.clear()
                await self._pre_copy(sequence)

    async def _pre_copy(self, sequence: Sequence) -> None:
        """Store the full blocks of a sequence that is running or was preempted, and answer with `PreCopied`.

        A pool without room is no failure: the destination then finds fewer blocks.
        """
        output, num_tokens = sequence.output, sequence.num_kv_tokens
        sequence.copies.append(CopyTimes(PRE_COPY, self._now_s()))
        if sequence.pages:
            try:
                await self._blocks.store(sequence, is_parked=False)
            except PoolError:
                if self._pool_closed.is_set():
                    raise
        sequence.copies[-1] = sequence.copies[-1].ended(self._now_s(), num_tokens)
        if sequence.finish_reason is None and sequence.error is None:
            await self._send(PreCopied(sequence.ref, output))


async def _first_set(*events: asyncio.Event) -> None:
    """Return when one of these events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
