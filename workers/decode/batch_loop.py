"""The loop of a decode batch: receive tokens, plan the next iteration, send the tokens while it runs.

Owns: the loop. Does not know: how a sequence gets into the batch, what happens to a sequence that has left.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from mooncake.errors import GrammarError
from mooncake.messages.fronts import TokenOutput
from workers.decode.batching.batch import DecodeBatch
from workers.decode.batching.iterations import Iteration, Iterations
from workers.decode.meter import DecodeMeter
from workers.decode.tbt_slo.double_check import HeldTokens
from workers.decode.tbt_slo.inlining import PromptChunks
from workers.decode.tbt_slo.pauses import DecodePauses

Emit = Callable[[list[tuple[str, TokenOutput]]], Awaitable[None]]
"""A callback that sends the outputs of one iteration, as pairs of a front's endpoint and an output."""


class BatchLoop:
    """The loop of one batch.

    A turn begins when `changed` is set, for example because an iteration has begun or ended, a sequence has
    come or must leave, pages are free, or tokens may be sent.

    `recheck` is called in each turn, to check again the requests that wait for a smaller batch or for pages.
    `on_ended` is called with each iteration that has ended. If a helper has not answered, the iteration has
    no results, and `on_ended` calls `hold`.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        iterations: Iterations,
        chunks: PromptChunks,
        pauses: DecodePauses,
        held_tokens: HeldTokens,
        meter: DecodeMeter,
        changed: asyncio.Event,
        recheck: Callable[[], None],
        on_ended: Callable[[Iteration], None],
        emit: Emit,
    ) -> None:
        self._batch, self._iterations, self._chunks, self._pauses = batch, iterations, chunks, pauses
        self._held_tokens, self._meter = held_tokens, meter
        self._changed, self._recheck, self._emit = changed, recheck, emit
        self._on_ended = on_ended
        self._is_held, self._is_quiet = False, asyncio.Event()
        self._resumption: asyncio.TimerHandle | None = None
        """Timer that ends a pause between two iterations."""

    async def run(self) -> None:
        """Run the loop until cancelled. No iteration runs when this returns."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                with self._meter.host_time():
                    outputs = self._receive()
                    self._recheck()
                    self._plan()
                    if outputs:
                        await self._emit(outputs)
                    self._batch.release_left()
        finally:
            await self._iterations.close()

    def hold(self) -> None:
        """Begin no further iteration until `resume`."""
        self._is_held = True
        self._is_quiet.clear()
        self._changed.set()

    def take_turn(self) -> None:
        """Make the loop take a turn. To be called when another task has taken sequences out of the batch."""
        self._changed.set()

    async def quiet(self) -> None:
        """Wait until no iteration runs. To be called after `hold`."""
        await self._is_quiet.wait()

    def resume(self) -> None:
        """Begin iterations again."""
        self._is_held = False
        self._changed.set()

    def _receive(self) -> list[tuple[str, TokenOutput]]:
        """Return the first tokens that are no longer held, then the tokens of iterations that have ended."""
        ended = self._iterations.receive()
        for iteration in (*ended, *self._iterations.in_flight):
            self._held_tokens.begun(iteration.sequences)
        outputs = self._held_tokens.take_released()
        for iteration in ended:
            self._on_ended(iteration)
            if iteration.is_lost:
                continue
            self._meter.ended(iteration)
            self._pauses.ended(iteration.ended_s)
            for sequence, end, token, logprobs in iteration.results:
                if sequence.finish_reason is not None:
                    continue  # the iteration was planned before the sequence's last token was known
                if token is None:
                    sequence.num_computed_tokens = end - sequence.num_cached_tokens
                    continue
                sequence.tokens.append(token)
                sequence.prefilled.set()
                sequence.check_copy()
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
        if self._is_held:
            if not self._iterations.is_running:
                self._meter.idle()
                self._is_quiet.set()
            return
        ready = self._batch.plan()
        chunks = self._chunks.plan(ready, self._iterations.turn(ready))
        if not chunks:
            self._meter.idle()
            return
        is_running = self._iterations.is_running
        left_s = self._pauses.remaining_s(chunks, time.perf_counter(), is_running=is_running)
        if not left_s:
            self._iterations.plan(chunks)
        elif not is_running:
            self._meter.pauses()
            self._resumption = asyncio.get_running_loop().call_later(left_s, self._changed.set)
