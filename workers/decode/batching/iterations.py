"""Iterations of decoding, one behind the other: while one runs, the next is planned.

When an iteration has ended, the device thread begins the next one with the drawn tokens, before the event
loop sees these tokens. Until it begins, a planned iteration can be cancelled and planned anew, with sequences
that were loaded meanwhile.

Where a helper has some of the layers, this instance and the helper form a pipeline: the batch is decoded in
two micro-batches, and while the helper has one of them, the device thread computes with the other one.

Owns: the tokens between one iteration and the next. Does not know: which sequences are decoded, and why.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from kernels.cpu.mailbox import HelperLost
from mooncake.messages.costs import prefill_quantities
from mooncake.messages.requests import TokenLogprobs
from workers.decode.sequence import Sequence
from workers.engine.batch import Batch, Chunk
from workers.engine.model import PassAtHelper
from workers.engine.tensor_parallel import RankLost
from workers.execution.draws import Drawn, Draws, Row
from workers.execution.executor import Executor
from workers.execution.jobs import wait_to_end
from workers.groups.followers import Followers
from workers.groups.rank_messages import DecodePass, PassChunk

_MOST_AT_HELPER = 2
"""The most iterations at a helper at the same time.

The helper computes one of them; the answer of the other one has not been taken yet.
"""
_PLANNING_S = 0.003
"""Seconds for which the device thread waits for a plan, before it waits for the helper instead."""


class PlannedChunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence in an iteration.

    The tokens are some of its prompt, or its newest token when the sequence is being decoded.
    """

    sequence: Sequence
    num_tokens: int
    of_prompt: bool

    @property
    def num_pairs(self) -> float:
        """The number of pairs (token of this chunk, earlier token that it attends to)."""
        return prefill_quantities(self.num_tokens, self.sequence.next_start)[1]


class Computed(NamedTuple):
    """The result of an iteration for one sequence: tokens before `end` have KVCache, and `token` was drawn.

    `token` is None before the end of the prompt. `logprobs` are those of the token, if the request wants
    them.
    """

    sequence: Sequence
    end: int
    token: int | None
    logprobs: TokenLogprobs | None


class Iteration:
    """One iteration over `planned` chunks.

    `before` is the iteration in flight that draws input tokens of this iteration. `beside` is an iteration in
    flight with other sequences. Either is None if there is no such iteration.
    """

    def __init__(
        self,
        planned: list[PlannedChunk],
        before: "Iteration | None",
        beside: "Iteration | None",
        executor: Executor,
        followers: Followers | None = None,
    ) -> None:
        self.sequences = [chunk.sequence for chunk in planned]
        self.ends = [chunk.sequence.next_start + chunk.num_tokens for chunk in planned]
        """The number of tokens of each sequence that have KVCache after the iteration."""
        decoded = [end for chunk, end in zip(planned, self.ends, strict=True) if not chunk.of_prompt]
        self.num_decoded, self.num_kv_tokens = len(decoded), sum(decoded)
        """The number of decoded sequences, and the number of their tokens that have KVCache afterwards."""
        self.num_decoded_beside = 0 if beside is None else beside.num_decoded
        self.num_kv_tokens_beside = 0 if beside is None else beside.num_kv_tokens
        self.num_prompt_tokens = sum(chunk.num_tokens for chunk in planned if chunk.of_prompt)
        """Tokens of inlined prompts in this iteration."""
        self.num_prompt_pairs = sum(chunk.num_pairs for chunk in planned if chunk.of_prompt)
        """Pairs (token of an inlined prompt in this iteration, earlier token that it attends to)."""
        self.began_s = self.forward_began_s = self.ended_s = self.forward_s = 0.0
        self._sent: PassAtHelper | None = None
        self.is_lost = False
        """Whether the iteration has no results, because a helper did not answer in it or in `before`."""
        self._tokens: list[int] = []
        """The drawn tokens, one for each draw; empty until the iteration has ended."""
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._executor, self._followers = executor, followers
        drawing = [
            row
            for row, (sequence, end) in enumerate(zip(self.sequences, self.ends, strict=True))
            if end == sequence.num_tokens_with_draw
        ]
        self._draw_of = {self.sequences[row]: draw for draw, row in enumerate(drawing)}
        self.before = before
        """The iteration that draws input tokens of this one; None if there is none, and after `begin`."""
        self._unknown = [row for row, sequence in enumerate(self.sequences) if sequence.draws_in_flight]
        """Rows whose input tokens are drawn by `before`."""
        self._batch = executor.prepare([_next_chunk(*chunk[:2]) for chunk in planned])
        self._draws = Draws([_row(self.sequences[row], self.ends[row]) for row in drawing], drawing)

    def begin(self) -> None:
        """Begin the iteration: fill in the tokens of `before`, which has ended.

        To be called on the device thread.
        """
        self.began_s = time.perf_counter()
        self.is_lost = self.before is not None and self.before.is_lost
        if self.before is not None and self._unknown and not self.is_lost:
            sequences = [self.sequences[row] for row in self._unknown]
            tokens = [self.before.token_of(sequence) for sequence in sequences]
            for sequence, token in zip(sequences, tokens, strict=True):
                self._draws.extend(self._draw_of[sequence], token)
            self._batch.fill_in(self._unknown, tokens)
        self.before = None
        self.forward_began_s = time.perf_counter()

    def send_to_helper(self) -> bool:
        """Compute the layers before the helper's layers, and send the pass to the helper.

        To be called after `begin`. Returns whether the pass was sent. If the pass was sent, `run` waits for
        the helper's answer, and can be called later. If it was not sent, `run` computes the whole iteration.
        """
        if self.is_lost:
            return False
        began_s = time.perf_counter()
        with self._computing():
            self._sent = self._executor.send_to_helper(self._batch)
        self.forward_s += time.perf_counter() - began_s
        return self._sent is not None

    def run(self) -> None:
        """Compute the iteration, after `begin` or `send_to_helper`, on the device thread.

        Tells the other ranks of the group to compute the iteration too. Sets `is_lost` if a helper is lost.
        """
        if self.is_lost:
            return
        began_s = time.perf_counter()
        try:
            with self._computing():
                if self._followers is not None:
                    self._followers.announce(_announced(self._batch))
                self._tokens, self._logprobs = self._drawn()
        except HelperLost:
            self.is_lost = True
        self.ended_s = time.perf_counter()
        self.forward_s += self.ended_s - began_s

    def _drawn(self) -> Drawn:
        if self._sent is None:
            return self._executor.decode(self._batch, self._draws)
        return self._executor.receive_from_helper(self._sent, self._batch, self._draws)

    def _computing(self) -> AbstractContextManager[None]:
        refs = [sequence.ref for sequence in self.sequences]
        return self._executor.record.computing(refs, expected=(RankLost, HelperLost))

    def draws(self, sequence: Sequence) -> bool:
        """Return whether the iteration draws a token for a sequence."""
        return sequence in self._draw_of

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the iteration has drawn; 0 until the iteration has ended."""
        return len(self._tokens)

    def token_of(self, sequence: Sequence) -> int:
        """Return the token that was drawn for a sequence."""
        return self._tokens[self._draw_of[sequence]]

    @property
    def results(self) -> Iterator[Computed]:
        """The results of an iteration that has ended, one for each sequence."""
        for sequence, end in zip(self.sequences, self.ends, strict=True):
            draw = self._draw_of.get(sequence)
            if draw is None:
                yield Computed(sequence, end, None, None)
            else:
                yield Computed(sequence, end, self._tokens[draw], self._logprobs.get(draw))


class Iterations:
    """The iterations of a batch.

    At most one is planned, and at most one runs. The planned one begins as soon as the running one has ended,
    so `receive` may return two. Where a helper has layers, up to `_MOST_AT_HELPER` other iterations are with
    the helper.
    """

    def __init__(
        self, executor: Executor, on_turn: Callable[[], None], followers: Followers | None = None
    ) -> None:
        """Make the iterations of one device.

        `on_turn` is called in the event loop when an iteration has begun, so that the next one can be
        planned, and when an iteration has ended and none is planned.
        """
        self._executor, self._followers = executor, followers
        self._on_turn = on_turn
        self._lock = threading.Condition()
        self._planned: Iteration | None = None
        self._is_closing = False
        self._in_flight: list[Iteration] = []
        """Iterations that have begun and that `receive` has not returned yet, in order."""
        self._at_helper: deque[Iteration] = deque()
        """Iterations in flight that are at the helper.

        Their remaining layers are computed when the helper has answered.
        """
        self._num_idle_calls = 0
        """The number of calls that are queued or run on the device thread, and have no iteration yet."""
        self._calls: deque[Future[Iteration | None]] = deque()

    def receive(self) -> list[Iteration]:
        """Return the iterations that have ended since the last call.

        A planned iteration that has not begun is cancelled. Raises the error of an iteration that has failed.
        """
        with self._lock:
            planned, self._planned = self._planned, None
        ended = []
        while self._calls and self._calls[0].done():
            iteration = self._calls.popleft().result()
            if iteration is not None:
                ended.append(iteration)
                _unset_in_flight(iteration)
        if planned is not None:
            _unset_in_flight(planned)
        with self._lock:
            self._in_flight = [iteration for iteration in self._in_flight if iteration not in ended]
            in_flight = list(self._in_flight)
        for iteration in in_flight:
            _set_in_flight(iteration)
        return ended

    @property
    def in_flight(self) -> list[Iteration]:
        """The iterations that have begun and whose tokens are unknown. Valid after `receive`."""
        return self._in_flight

    @property
    def is_running(self) -> bool:
        """Whether an iteration has begun whose tokens are unknown. Valid after `receive`."""
        return bool(self._in_flight)

    def turn(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the ready sequences that the next iteration shall have. To be called after `receive`.

        Where a helper has layers, these are half of the sequences, otherwise all.
        """
        if not self._executor.has_helper_for_layers:
            return ready
        newest = self._in_flight[-1] if self._in_flight else None
        others = [one for one in ready if newest is None or not newest.draws(one)]
        return (others or ready)[: -(-len(ready) // 2)]

    def plan(self, chunks: list[PlannedChunk]) -> None:
        """Plan the next iteration, with sequences that `turn` has returned. To be called after `receive`."""
        before = beside = None
        for iteration in self._in_flight:
            if any(iteration.draws(chunk.sequence) for chunk in chunks):
                before = iteration
            else:
                beside = iteration
        planned = Iteration(chunks, before, beside, self._executor, self._followers)
        _set_in_flight(planned)
        loop = asyncio.get_running_loop()
        with self._lock:
            self._planned = planned
            self._lock.notify()
            self._call(loop)

    async def close(self) -> None:
        """Wait until no iteration runs, even if the caller is cancelled."""
        with self._lock:
            self._planned, self._is_closing = None, True
            self._lock.notify()
        await wait_to_end(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        while running := [call for call in self._calls if not call.done()]:
            await asyncio.wait([asyncio.wrap_future(call) for call in running])

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        """Queue calls on the device thread: one for each iteration that is to begin or go on.

        The caller holds the lock.
        """
        for _ in range(self._num_idle_calls, len(self._at_helper) + (self._planned is not None)):
            self._num_idle_calls += 1
            call = self._executor.submit(lambda: self._begin_or_go_on(loop))
            self._calls.append(call)
            call.add_done_callback(lambda ended: self._after_call(ended, loop))

    def _begin_or_go_on(self, loop: asyncio.AbstractEventLoop) -> Iteration | None:
        """Begin the planned iteration, or go on with the oldest one at the helper.

        Returns an iteration that has ended; None if none has.
        """
        with self._lock:
            if 0 < len(self._at_helper) < _MOST_AT_HELPER:
                self._lock.wait_for(lambda: self._planned is not None or self._is_closing, _PLANNING_S)
            self._num_idle_calls -= 1
            iteration = self._planned
            if iteration is not None and self._may_begin(iteration):
                self._planned = None
                self._in_flight.append(iteration)
            else:
                iteration = None
        if iteration is not None:
            iteration.begin()
            loop.call_soon_threadsafe(self._on_turn)
            if iteration.send_to_helper():
                with self._lock:
                    self._at_helper.append(iteration)
                    self._call(loop)
                return None
        elif self._at_helper:
            iteration = self._at_helper[0]
        if iteration is not None:
            iteration.run()
            with self._lock:
                if self._at_helper and self._at_helper[0] is iteration:
                    self._at_helper.popleft()
        return iteration

    def _may_begin(self, iteration: Iteration) -> bool:
        return len(self._at_helper) < _MOST_AT_HELPER and iteration.before not in self._at_helper

    def _after_call(self, call: "Future[Iteration | None]", loop: asyncio.AbstractEventLoop) -> None:
        """Call `on_turn` if no iteration is planned, or if the call has failed.

        `receive` raises the call's error. In other cases the planned iteration begins now, and must not be
        cancelled.
        """
        if self._planned is None or call.exception() is not None:
            loop.call_soon_threadsafe(self._on_turn)


def _next_chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    """Return the sequence's next tokens without KVCache.

    A token that the iteration in flight draws is not known yet; the chunk then has a placeholder.
    """
    start = sequence.next_start
    if sequence.draws_in_flight:
        return Chunk(sequence.tokens[-1:], start, sequence.pages)
    return Chunk(sequence.tokens[start : start + num_tokens], start, sequence.pages)


def _announced(batch: Batch) -> DecodePass:
    tokens = np.split(batch.host.token_ids, batch.host.last_rows[:-1] + 1)
    chunks = []
    for token_ids, kv_len, pages in zip(tokens, batch.kv_lens, batch.page_tables, strict=True):
        num_pages = -(-kv_len // batch.page_size)
        chunks.append(PassChunk(token_ids.tolist(), kv_len - len(token_ids), pages[:num_pages].tolist()))
    return DecodePass(chunks)


def _row(sequence: Sequence, position: int) -> Row:
    """Return the input of a sequence's next draw. The output is included only if the draw's rules need it."""
    rules = sequence.rules
    output = sequence.output if rules is not None else ()
    return Row(sequence.request.sampling, position, rules, output)


def _set_in_flight(iteration: Iteration) -> None:
    for sequence, end in zip(iteration.sequences, iteration.ends, strict=True):
        sequence.in_flight_until = end


def _unset_in_flight(iteration: Iteration) -> None:
    for sequence in iteration.sequences:
        sequence.in_flight_until = None
