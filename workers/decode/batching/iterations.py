"""Iterations of decoding, one behind the other: the next one is planned while one runs.

The device thread begins an iteration with the tokens of the previous one as soon as that has ended, before
the event loop sees these tokens. Until then the planned iteration can be taken back and planned anew, with
sequences that were loaded meanwhile.

Owns: the way of tokens from one iteration to the next. Does not know: which sequences are decoded, and why.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from kernels.cpu.mailbox import HelperLost
from mooncake.messages.requests import TokenLogprobs
from workers.decode.sequence import Sequence
from workers.engine.batch import Batch, Chunk
from workers.engine.tensor_parallel import RankLost
from workers.execution.draws import Draws, Row
from workers.execution.executor import Executor
from workers.execution.jobs import wait_to_end
from workers.groups.followers import Followers
from workers.groups.rank_messages import DecodePass, PassChunk


class PlannedChunk(NamedTuple):
    """The next `num_tokens` of a sequence: tokens of its prompt, or the newest token, from which it
    decodes."""

    sequence: Sequence
    num_tokens: int
    of_prompt: bool


class Computed(NamedTuple):
    """Result of an iteration for one sequence: its tokens before `end` have KVCache, and `token` was drawn.

    No token is drawn before the end of the prompt. `logprobs` are those of the token, if the request wants
    them.
    """

    sequence: Sequence
    end: int
    token: int | None
    logprobs: TokenLogprobs | None


class Iteration:
    """One iteration over `planned` chunks. `before` is in flight: its tokens are not known yet."""

    def __init__(
        self,
        planned: list[PlannedChunk],
        before: "Iteration | None",
        executor: Executor,
        followers: Followers | None = None,
    ) -> None:
        self.sequences = [chunk.sequence for chunk in planned]
        self.ends = [chunk.sequence.next_start + chunk.num_tokens for chunk in planned]
        """Number of tokens of each sequence that have KVCache after the iteration."""
        decoded = [end for chunk, end in zip(planned, self.ends, strict=True) if not chunk.of_prompt]
        self.num_decoded, self.num_kv_tokens = len(decoded), sum(decoded)
        """Sequences that are decoded, and their tokens with KVCache."""
        self.num_prompt_tokens = sum(chunk.num_tokens for chunk in planned if chunk.of_prompt)
        """Tokens of inlined prompts in this iteration."""
        self.began_s = self.forward_began_s = self.ended_s = 0.0
        self.is_lost = False
        """Whether the iteration has no results, as the helper that has some of the heads did not answer."""
        self._tokens: list[int] = []
        """Drawn tokens by draw; empty until the iteration has ended."""
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._executor, self._followers = executor, followers
        drawing = [
            row
            for row, (sequence, end) in enumerate(zip(self.sequences, self.ends, strict=True))
            if end == sequence.num_planned_tokens
        ]
        self._draw_of = {self.sequences[row]: draw for draw, row in enumerate(drawing)}
        self._before = before
        self._unknown = [row for row, sequence in enumerate(self.sequences) if sequence.draws_in_flight]
        """Rows whose input tokens `before` draws."""
        self._batch = executor.prepare([_next_chunk(*chunk[:2]) for chunk in planned])
        self._draws = Draws([_row(self.sequences[row], self.ends[row]) for row in drawing], drawing)

    def begin(self) -> None:
        """Fill in the tokens of `before`, which has ended. Runs on the device thread."""
        self.began_s = time.perf_counter()
        self.is_lost = self._before is not None and self._before.is_lost
        if self._before is not None and self._unknown and not self.is_lost:
            sequences = [self.sequences[row] for row in self._unknown]
            tokens = [self._before.token_of(sequence) for sequence in sequences]
            for sequence, token in zip(sequences, tokens, strict=True):
                self._draws.extend(self._draw_of[sequence], token)
            self._batch.fill_in(self._unknown, tokens)
        self._before = None
        self.forward_began_s = time.perf_counter()

    def run(self) -> None:
        """Compute, after `begin`, on the device thread. The other ranks begin when they are told."""
        if self.is_lost:
            return
        refs = [sequence.ref for sequence in self.sequences]
        try:
            with self._executor.record.computing(refs, expected=(RankLost, HelperLost)):
                if self._followers is not None:
                    self._followers.announce(_announced(self._batch))
                self._tokens, self._logprobs = self._executor.decode(self._batch, self._draws)
        except HelperLost:
            self.is_lost = True
        self.ended_s = time.perf_counter()

    @property
    def num_tokens(self) -> int:
        """Number of drawn tokens."""
        return len(self._tokens)

    def token_of(self, sequence: Sequence) -> int:
        """Return the token that was drawn for a sequence."""
        return self._tokens[self._draw_of[sequence]]

    @property
    def results(self) -> Iterator[Computed]:
        """The results of an iteration that has ended, one a sequence."""
        for sequence, end in zip(self.sequences, self.ends, strict=True):
            draw = self._draw_of.get(sequence)
            if draw is None:
                yield Computed(sequence, end, None, None)
            else:
                yield Computed(sequence, end, self._tokens[draw], self._logprobs.get(draw))


class Iterations:
    """The iterations of a batch. At most one is planned, and at most one is running or has results that were
    not received."""

    def __init__(
        self, executor: Executor, on_turn: Callable[[], None], followers: Followers | None = None
    ) -> None:
        """Make the iterations of one device.

        `on_turn` is called in the event loop when an iteration has begun, so that the next one can be
        planned, and when an iteration has ended and none is planned.
        """
        self._executor, self._followers = executor, followers
        self._on_turn = on_turn
        self._lock = threading.Lock()
        self._planned: Iteration | None = None
        self._in_flight: Iteration | None = None
        self._num_idle_calls = 0
        """Calls to the device thread that have not looked for a planned iteration yet."""
        self._calls: deque[Future[Iteration | None]] = deque()

    def receive(self) -> list[Iteration]:
        """Return iterations that have ended since the last call. A plan that has not begun is taken back."""
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
        if ended and ended[-1] is self._in_flight:
            self._in_flight = None
        if self._in_flight is not None:
            _set_in_flight(self._in_flight)
        return ended

    @property
    def is_running(self) -> bool:
        """Whether an iteration has begun whose tokens are not known. Valid after `receive`."""
        return self._in_flight is not None

    def plan(self, chunks: list[PlannedChunk]) -> None:
        """Plan the next iteration; to be called after `receive`."""
        planned = Iteration(chunks, self._in_flight, self._executor, self._followers)
        _set_in_flight(planned)
        with self._lock:
            self._planned = planned
            must_call = not self._num_idle_calls
            self._num_idle_calls += must_call
        if must_call:
            loop = asyncio.get_running_loop()
            call = self._executor.submit(lambda: self._run_planned(loop))
            self._calls.append(call)
            call.add_done_callback(lambda _: self._after_call(loop))

    async def close(self) -> None:
        """Wait until no iteration runs, however often the caller is cancelled."""
        with self._lock:
            self._planned = None
        if self._calls:
            waiting = asyncio.wait([asyncio.wrap_future(call) for call in self._calls])
            await wait_to_end(asyncio.ensure_future(waiting))

    def _run_planned(self, loop: asyncio.AbstractEventLoop) -> Iteration | None:
        with self._lock:
            self._num_idle_calls -= 1
            iteration, self._planned = self._planned, None
            if iteration is not None:
                self._in_flight = iteration
        if iteration is not None:
            iteration.begin()
            loop.call_soon_threadsafe(self._on_turn)
            iteration.run()
        return iteration

    def _after_call(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._planned is None:  # else it begins now, and must not be taken back
            loop.call_soon_threadsafe(self._on_turn)


def _next_chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    """Return the next tokens without KVCache, or a placeholder for a token that the iteration in flight
    draws."""
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
    """Return the parameters of a sequence's next draw. The output is included only if rules of the draw need
    it."""
    rules = sequence.rules
    output = sequence.output if rules is not None else ()
    return Row(sequence.request.sampling, position, rules, output)


def _set_in_flight(iteration: Iteration) -> None:
    for sequence, end in zip(iteration.sequences, iteration.ends, strict=True):
        sequence.in_flight_until = end


def _unset_in_flight(iteration: Iteration) -> None:
    for sequence in iteration.sequences:
        sequence.in_flight_until = None
