"""The admission of requests to a decode instance (Mooncake, section 3, step 4).

A request first gets pool pages for its prompt. Then its prompt is prefilled, and its KVCache arrives.

Owns: the order of events until the sequence enters the batch. Does not know: how requests are placed, how
bytes travel, what the batch does with the sequence.
"""

import asyncio

from mooncake.messages.requests import Ref
from mooncake.messages.workers import Decode, Reserve, Reserved
from workers.decode.batch_loop import Emit
from workers.decode.batching.batch import DecodeBatch
from workers.decode.blocks.group_blocks import GroupBlocks
from workers.decode.blocks.reserving_turns import ReservingTurns
from workers.decode.meter import DecodeMeter
from workers.decode.sequence import Sequence
from workers.decode.sequence_runs import Send, SequenceRuns
from workers.decode.tbt_slo.double_check import DoubleCheck, HeldTokens
from workers.decode.tbt_slo.pauses import DecodePauses
from workers.execution.executor import Executor
from workers.kvcache.shared_prefixes import PrefixTurns


class Arrivals:
    """The requests that are placed on this decode instance.

    `serve` takes a request's `Reserve` order, and `decode` its later `Decode` order.
    """

    def __init__(
        self,
        executor: Executor,
        batch: DecodeBatch,
        blocks: GroupBlocks,
        runs: SequenceRuns,
        double_check: DoubleCheck,
        held_tokens: HeldTokens,
        pauses: DecodePauses,
        reserving: ReservingTurns,
        prefix_turns: PrefixTurns,
        meter: DecodeMeter,
        sequences: dict[Ref, Sequence],
        send: Send,
        emit: Emit,
    ) -> None:
        self._executor, self._batch, self._blocks, self._runs = executor, batch, blocks, runs
        self._double_check, self._held_tokens, self._pauses = double_check, held_tokens, pauses
        self._reserving, self._prefix_turns, self._meter = reserving, prefix_turns, meter
        self._sequences = sequences
        self._send, self._emit = send, emit
        self._orders: dict[Ref, asyncio.Future[Decode]] = {}
        self._now_s = asyncio.get_running_loop().time

    def decode(self, order: Decode) -> None:
        """Continue a reserved request whose prefill is done.

        An order for an unknown request is dropped, because the request has just been aborted.
        """
        future = self._orders.get(order.ref)
        if future is not None and not future.done():
            future.set_result(order)

    async def serve(self, order: Reserve) -> None:
        """Serve a request from the reservation of its pages to its end.

        Raises TooSlowError if the instance refuses the request, and any error that makes the request fail.
        """
        ref, request = order.ref, order.request
        grammar = await self._executor.follow(request.sampling.grammar)
        async with self._runs.open(ref, request, grammar, order.tbt_slo_s) as sequence:
            sequence.must_be_alone, sequence.is_inlined = order.alone, order.inline
            self._orders[ref] = asyncio.get_running_loop().create_future()
            try:
                await self._enter(sequence, order)
            finally:
                del self._orders[ref]
            await self._runs.complete(sequence)

    async def _enter(self, sequence: Sequence, order: Reserve) -> None:
        """Reserve pool pages for a sequence, and enter the sequence into the batch.

        An inlined prompt enters at once, any other prompt when its KVCache has arrived.
        """
        num_tokens, page_size = len(order.request.token_ids), self._executor.kv.page_size
        if order.inline:
            await self._prefix_turns.wait(order.ref, sequence.rank, order.request.block_keys)
        async with self._reserving.turn(order.request.flow, -(-num_tokens // page_size)):
            reserved = await self._blocks.reserve(sequence)
        sequence.reserved_s = self._now_s()
        if order.inline:
            self._prefix_turns.reserved(order.ref, len(reserved.cached_tiers))
            sequence.num_cached_tokens = min(len(reserved.cached_tiers) * page_size, num_tokens - 1)
            sequence.num_tokens_by_source = reserved.num_tokens_by_source(num_tokens, page_size)
            self._batch.enter(sequence)
            await self._send(Reserved(order.ref, reserved.grant))
            return
        self._meter.num_not_inlined += 1
        with self._pauses.prefill(shares_cores=order.shares_cores):
            await self._send(Reserved(order.ref, reserved.grant))
            decode = await self._orders[order.ref]
        await self._receive_kvcache(sequence, decode, may_refuse=order.may_refuse)

    async def _receive_kvcache(self, sequence: Sequence, decode: Decode, *, may_refuse: bool) -> None:
        """Receive a prompt's KVCache and first token from the prefill instance, and enter the batch.

        If `may_refuse`, the TBT is checked before the first token leaves (section 3), with the actual batch,
        which the Conductor could only predict. If the request has a TTFT and a TBT SLO, the first token is
        held while the KVCache arrives. Raises TooSlowError or TransferError.
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
            sequence.first_sent_s = self._now_s()
        else:
            self._held_tokens.hold(sequence, due_s - sequence.turn_s)
        await self._blocks.wait_arrived(sequence)
        sequence.arrived_s = self._now_s()
        self._runs.note_joining(sequence)
        if sequence.finish_reason is None:
            self._batch.enter(sequence)

    @property
    def _begun_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.has_begun]
