"""Iterations of decoding, one behind the other: the next one is planned while one runs.

The device thread begins an iteration as soon as the previous one has ended, with its tokens, before anybody
else has seen them. Until it begins, it can be taken back and planned anew, for sequences that were loaded
meanwhile.

Owns: the way of tokens from one iteration to the next. Does not know: which sequences are decoded, and why.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from mooncake.messages.requests import TokenLogprobs
from workers.decode.sequence import Sequence
from workers.engine.batch import Batch, Chunk
from workers.engine.tensor_parallel import RankLost
from workers.execution.draws import Draws, Row
from workers.execution.executor import Executor
from workers.execution.jobs import wait_to_end
from workers.groups.followers import Followers
from workers.groups.rank_messages import DecodePass, PassChunk


class Iteration:
    """One iteration over `sequences`. `before` is in flight: its tokens are not known yet."""

    def __init__(
        self,
        sequences: list[Sequence],
        before: "Iteration | None",
        executor: Executor,
        followers: Followers | None = None,
    ) -> None:
        self.sequences = sequences
        self.tokens: list[int] = []
        """Drawn tokens, one a sequence; empty until the iteration has ended."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        """Logprobs of the drawn tokens by row, for requests that want them."""
        self.began_s = self.forward_began_s = self.ended_s = 0.0
        self._before = before
        self._executor, self._followers = executor, followers
        row_before = {sequence: row for row, sequence in enumerate(before.sequences)} if before else {}
        self._rows = [row for row, sequence in enumerate(sequences) if sequence in row_before]
        self._rows_before = [row_before[sequences[row]] for row in self._rows]
        chunks = [_next_chunk(sequence) for sequence in sequences]
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        self.num_kv_tokens = sum(ends)
        self.num_prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks) - len(chunks)
        """Tokens of inlined prompts in this iteration."""
        self._batch = executor.prepare(chunks)
        self._draws = Draws([_row(sequence, end) for sequence, end in zip(sequences, ends, strict=True)])

    def begin(self) -> None:
        """Fill in the tokens of `before`, which has ended. Runs on the device thread."""
        self.began_s = time.perf_counter()
        if self._before is not None and self._rows:
            drawn = [self._before.tokens[row] for row in self._rows_before]
            for row, token in zip(self._rows, drawn, strict=True):
                self._draws.extend(row, token)
            self._batch.fill_in(self._rows, drawn)
        self._before = None
        self.forward_began_s = time.perf_counter()

    def run(self) -> None:
        """Compute, after `begin`, on the device thread. The other ranks begin when they hear of it."""
        refs = [sequence.ref for sequence in self.sequences]
        with self._executor.record.computing(refs, expected=RankLost):
            if self._followers is not None:
                self._followers.announce(_announced(self._batch))
            self.tokens, self.logprobs = self._executor.decode(self._batch, self._draws)
        self.ended_s = time.perf_counter()


class Iterations:
    """The iterations of a batch: at most one is in flight or not received, and at most one is planned."""

    def __init__(
        self, executor: Executor, on_turn: Callable[[], None], followers: Followers | None = None
    ) -> None:
        """`on_turn` is called in the event loop when an iteration has begun, so that the next one can be
        planned, and when one has ended and none is behind it."""
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
                _set_in_flight(iteration, False)
        if planned is not None:
            _set_in_flight(planned, False)
        if ended and ended[-1] is self._in_flight:
            self._in_flight = None
        if self._in_flight is not None:
            _set_in_flight(self._in_flight, True)
        return ended

    @property
    def is_running(self) -> bool:
        """Whether an iteration has begun whose tokens are not known; to be asked after `receive`."""
        return self._in_flight is not None

    def plan(self, sequences: list[Sequence]) -> None:
        """Plan the next iteration; to be called after `receive`."""
        planned = Iteration(sequences, self._in_flight, self._executor, self._followers)
        _set_in_flight(planned, True)
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


def _next_chunk(sequence: Sequence) -> Chunk:
    """Return the tokens without KVCache: the newest, or the place of one that is in flight."""
    start = sequence.num_planned_tokens - 1 if sequence.is_in_flight else sequence.num_kv_tokens
    return Chunk(sequence.tokens[min(start, len(sequence.tokens) - 1) :], start, sequence.pages)


def _announced(batch: Batch) -> DecodePass:
    tokens = np.split(batch.host.token_ids, batch.host.last_rows[:-1] + 1)
    chunks = []
    for token_ids, kv_len, pages in zip(tokens, batch.kv_lens, batch.page_tables, strict=True):
        num_pages = -(-kv_len // batch.page_size)
        chunks.append(PassChunk(token_ids.tolist(), kv_len - len(token_ids), pages[:num_pages].tolist()))
    return DecodePass(chunks)


def _row(sequence: Sequence, position: int) -> Row:
    """Return a sequence's next draw. Its output is needed for rules only."""
    rules = sequence.rules
    output = sequence.tokens[sequence.request.num_prompt_tokens :] if rules is not None else ()
    return Row(sequence.request.sampling, position, rules, output)


def _set_in_flight(iteration: Iteration, value: bool) -> None:
    for sequence in iteration.sequences:
        sequence.is_in_flight = value
