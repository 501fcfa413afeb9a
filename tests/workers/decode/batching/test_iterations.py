"""The next iteration is planned while one runs, and can be planned anew until it begins."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import msgspec
import pytest
import torch

from kernels.cpu.mailbox import HelperLost
from mooncake.messages.requests import Ref, Request, SamplingParams
from tests.kvstore.nodes import DEADLINE_S
from tests.workers.planned import decoded
from workers.decode.batching import iterations
from workers.decode.batching.iterations import Iterations, PlannedChunk
from workers.decode.sequence import Sequence as DecodedSequence
from workers.engine.batch import Chunk
from workers.execution.draws import Drawn, Draws
from workers.execution.executor import Executor
from workers.execution.pass_record import PassRecord

T = TypeVar("T")


class FakeBatch:
    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.token_ids = [chunk.token_ids[-1] for chunk in chunks]
        self.starts = [chunk.start for chunk in chunks]

    def fill_in(self, chunks: Sequence[int], token_ids: Sequence[int]) -> None:
        for chunk, token in zip(chunks, token_ids, strict=True):
            self.token_ids[chunk] = token


class FakeExecutor:
    """A device whose next token is one more than the last, if not that then five more, and which waits to be
    told to go on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.record = PassRecord()
        self.may_go_on = threading.Semaphore(0)
        self.loses_helper = self.fails = False
        self.sent: list[list[int]] | None = None
        """Tokens of the passes that a helper of some layers has got; None without one."""
        self.batches: list[tuple[list[int], list[int]]] = []
        """tokens and positions that were computed"""

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        return self._thread.submit(call)

    def prepare(self, chunks: Sequence[Chunk]) -> FakeBatch:
        return FakeBatch(chunks)

    @property
    def has_helper_for_layers(self) -> bool:
        return self.sent is not None

    def send_to_helper(self, batch: FakeBatch) -> object | None:
        if self.sent is not None:
            self.sent.append(batch.token_ids)
        return self.sent

    def receive_from_helper(self, sent: object, batch: FakeBatch, draws: Draws) -> Drawn:
        return self.decode(batch, draws)

    def decode(self, batch: FakeBatch, draws: Draws) -> Drawn:
        self.batches.append((batch.token_ids, batch.starts))
        assert self.may_go_on.acquire(timeout=DEADLINE_S)
        if self.loses_helper:
            raise HelperLost
        if self.fails:
            raise MemoryError
        tokens = torch.tensor(batch.token_ids)
        rows = torch.arange(len(tokens))
        logits = torch.zeros(len(tokens), 100)
        logits[rows, tokens + 1] = 2.0
        logits[rows, tokens + 5] = 1.0
        return draws.draw(logits)


def sequence(number: int, *tokens: int, **wishes: Any) -> DecodedSequence:
    sampling = SamplingParams(100, temperature=0, **wishes)
    request = Request(str(number), [tokens[0]], [], sampling, "front")
    return DecodedSequence(number, Ref(1, str(number), 1), request, list(tokens))


class Lab:
    def __init__(self) -> None:
        self.executor = FakeExecutor()
        self.turn = asyncio.Event()
        self.iterations = Iterations(cast(Executor, self.executor), self.turn.set)

    async def until_computing(self, num_batches: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.executor.batches) < num_batches:
                await asyncio.sleep(0.001)

    async def until_sent(self, num_passes: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.executor.sent or ()) < num_passes:
                await asyncio.sleep(0.001)

    async def receive(self) -> list[list[int | None]]:
        """Tokens of the iterations that have ended, at least one; None of those whose prompt goes on."""
        async with asyncio.timeout(DEADLINE_S):
            while not (ended := self.iterations.receive()):
                await self.turn.wait()
                self.turn.clear()
        results = [list(iteration.results) for iteration in ended]
        for sequence, end, token, _ in itertools.chain.from_iterable(results):
            if token is None:
                sequence.num_computed_tokens = end
            else:
                sequence.tokens.append(token)
        return [[result.token for result in of_iteration] for of_iteration in results]


async def test_an_iteration_begins_with_tokens_that_nobody_has_received_yet() -> None:
    lab, a, b = Lab(), sequence(0, 10, 20), sequence(1, 10, 10, 70)
    lab.iterations.plan(decoded(a, b))
    await lab.until_computing(1)
    assert lab.iterations.receive() == []
    lab.iterations.plan(decoded(b, a))
    lab.executor.may_go_on.release(1)
    await lab.until_computing(2)
    assert lab.executor.batches == [([20, 70], [1, 2]), ([71, 21], [3, 2])]
    assert (a.tokens, b.tokens) == ([10, 20], [10, 10, 70])
    assert await lab.receive() == [[21, 71]]
    lab.executor.may_go_on.release(1)
    assert await lab.receive() == [[72, 22]]
    assert not a.is_in_flight
    await lab.iterations.close()


async def test_rules_see_tokens_that_nobody_has_received_yet() -> None:
    lab = Lab()
    plain, worded = sequence(0, 10, 20), sequence(1, 10, 30, bad_words=((31, 32),), num_logprobs=0)
    penalized = sequence(2, 10, 40, frequency_penalty=1.7, repetition_penalty=1.1, logit_bias={46: 4.0})
    lab.iterations.plan(decoded(plain, worded, penalized))
    await lab.until_computing(1)
    assert lab.iterations.receive() == []
    lab.iterations.plan(decoded(penalized, worded, plain))
    lab.executor.may_go_on.release(1)
    await lab.until_computing(2)
    assert await lab.receive() == [[21, 31, 46]]
    lab.executor.may_go_on.release(1)
    # 32 is forbidden after 31 only; 46 has been drawn: 4 / 1.1 - 1.7 is less than 2.
    assert await lab.receive() == [[47, 36, 22]]
    await lab.iterations.close()


async def test_says_when_the_next_one_can_be_planned() -> None:
    lab, a = Lab(), sequence(0, 10, 20)
    lab.iterations.plan(decoded(a))
    async with asyncio.timeout(DEADLINE_S):
        await lab.turn.wait()  # it runs
    assert lab.iterations.receive() == []
    lab.turn.clear()
    lab.iterations.plan(decoded(a))
    lab.executor.may_go_on.release(1)
    async with asyncio.timeout(DEADLINE_S):
        await lab.turn.wait()
    assert len(lab.iterations.receive()) == 1
    assert a.is_in_flight  # with the second one, which was not taken back
    lab.executor.may_go_on.release(1)
    await lab.iterations.close()


async def test_a_prompt_goes_on_where_its_chunk_in_flight_ends_and_draws_behind_its_last_one() -> None:
    lab, decoding = Lab(), sequence(0, 10, 20)
    prompt = DecodedSequence(1, Ref(1, "1", 1), decoding.request, [30, 31, 32, 33, 34], is_inlined=True)
    prompt.request = msgspec.structs.replace(prompt.request, token_ids=list(prompt.tokens))
    sizes = (2, 2, 1)
    for number, num_tokens in enumerate(sizes):
        assert prompt.num_tokens_to_plan == sum(sizes[number:])
        chunk = PlannedChunk(prompt, num_tokens, of_prompt=True)
        lab.iterations.plan([chunk, *decoded(decoding)])
        await lab.until_computing(number + 1)
        assert lab.iterations.receive() == []
        if number < len(sizes) - 1:
            assert not prompt.draws_in_flight
            lab.executor.may_go_on.release()
            assert await lab.receive() == [[None, 21 + number]]
            assert prompt.num_kv_tokens == sum(sizes[: number + 1])
    assert prompt.draws_in_flight
    assert prompt.num_tokens_to_plan == 0
    lab.iterations.plan(decoded(decoding, prompt))
    lab.executor.may_go_on.release()
    await lab.until_computing(4)
    assert await lab.receive() == [[35, 23]]
    lab.executor.may_go_on.release()
    assert await lab.receive() == [[24, 36]]
    assert [starts for _, starts in lab.executor.batches] == [[0, 1], [2, 2], [4, 3], [4, 5]]
    await lab.iterations.close()


async def test_an_iteration_of_unfinished_prompts_draws_nothing() -> None:
    lab, prompt = Lab(), sequence(0, 10, frequency_penalty=1.0, num_logprobs=2)
    prompt.tokens = [10, 11, 12]
    prompt.request = msgspec.structs.replace(prompt.request, token_ids=[10, 11, 12])
    lab.iterations.plan([PlannedChunk(prompt, 2, of_prompt=True)])
    await lab.until_computing(1)
    lab.executor.may_go_on.release()
    assert await lab.receive() == [[None]]
    lab.iterations.plan([PlannedChunk(prompt, 1, of_prompt=True)])
    await lab.until_computing(2)
    lab.executor.may_go_on.release()
    assert await lab.receive() == [[13]]
    await lab.iterations.close()


async def test_who_comes_while_one_runs_is_part_of_the_next() -> None:
    lab, old, gone, new = Lab(), sequence(0, 10, 20), sequence(1, 10, 40), sequence(2, 10, 70)
    lab.iterations.plan(decoded(old, gone))
    await lab.until_computing(1)
    assert lab.iterations.receive() == []
    lab.iterations.plan(decoded(old, gone))
    assert lab.iterations.receive() == []  # takes that back
    assert (old.is_in_flight, gone.is_in_flight, new.is_in_flight) == (True, True, False)
    lab.iterations.plan(decoded(old, new))
    lab.executor.may_go_on.release(2)
    await lab.until_computing(2)
    assert lab.executor.batches[1] == ([21, 70], [2, 1])
    await lab.receive()
    assert not gone.is_in_flight
    await lab.iterations.close()


async def test_what_is_taken_back_leaves_nothing_in_flight() -> None:
    lab, a = Lab(), sequence(0, 10, 20)
    lab.iterations.plan(decoded(a))
    await lab.until_computing(1)
    lab.iterations.receive()
    lab.iterations.plan(decoded(a))
    lab.iterations.receive()
    lab.executor.may_go_on.release(1)
    assert await lab.receive() == [[21]]
    assert not a.is_in_flight
    lab.iterations.plan(decoded(a))
    await lab.until_computing(2)
    lab.executor.may_go_on.release(1)
    assert await lab.receive() == [[22]]
    assert [tokens for tokens, _ in lab.executor.batches] == [[20], [21]]
    await lab.iterations.close()


async def test_an_iteration_without_its_helper_and_the_next_one_have_no_results() -> None:
    lab, a = Lab(), sequence(0, 10, 20)
    lab.executor.loses_helper = True
    lab.iterations.plan(decoded(a))
    await lab.until_computing(1)
    lab.iterations.receive()
    lab.iterations.plan(decoded(a))  # from the token of the first one, which never comes
    lab.executor.may_go_on.release(1)
    await asyncio.wrap_future(lab.executor.submit(lambda: None))  # behind both of them
    ended = lab.iterations.receive()
    assert [iteration.is_lost for iteration in ended] == [True, True]
    assert not a.is_in_flight
    lab.executor.loses_helper = False
    lab.iterations.plan(decoded(a))
    await lab.until_computing(2)
    lab.executor.may_go_on.release(1)
    assert await lab.receive() == [[21]]
    await lab.iterations.close()


async def test_two_halves_of_a_batch_take_turns_where_a_helper_has_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iterations, "_PLANNING_S", DEADLINE_S)
    lab, sequences = Lab(), [sequence(number, 10, 20 * number) for number in range(1, 4)]
    lab.executor.sent = []

    async def plan(expected: list[DecodedSequence], num_sent: int) -> None:
        assert lab.iterations.receive() == []
        turn = lab.iterations.turn(sequences)
        assert turn == expected
        lab.iterations.plan(decoded(*turn))
        if num_sent > 2:
            lab.executor.may_go_on.release()  # the helper's answer, with the tokens that the next half needs
        await lab.until_sent(num_sent)

    halves = sequences[:2], sequences[2:]
    await plan(halves[0], 1)
    await plan(halves[1], 2)  # at once, while the helper has the other half
    for number, tokens in enumerate(([21, 41], [61], [22, 42], [62])):
        await plan(halves[number % 2], 3 + number)
        assert await lab.receive() == [tokens]
    assert lab.executor.sent == [[20, 40], [60], [21, 41], [61], [22, 42], [62]]
    lab.executor.may_go_on.release(2)
    await lab.iterations.close()
    assert [len(iteration.sequences) for iteration in lab.iterations.receive()] == [2, 1]


async def test_an_iteration_that_fails_is_received_although_the_planned_one_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iterations, "_PLANNING_S", DEADLINE_S)
    lab, a, b = Lab(), sequence(0, 10, 20), sequence(1, 10, 40)
    lab.executor.sent, lab.executor.fails = [], True
    for number, one in enumerate((a, b)):
        assert lab.iterations.receive() == []
        lab.iterations.plan(decoded(one))
        await lab.until_sent(1 + number)
    await lab.until_computing(1)
    assert lab.iterations.receive() == []
    lab.iterations.plan(decoded(a))
    lab.turn.clear()
    lab.executor.may_go_on.release(9)
    await asyncio.wait_for(lab.turn.wait(), DEADLINE_S)
    with pytest.raises(MemoryError):
        lab.iterations.receive()
    await lab.iterations.close()


async def test_the_only_sequence_waits_for_its_token_from_the_helper() -> None:
    lab, a = Lab(), sequence(0, 10, 20)
    lab.executor.sent = []
    lab.iterations.plan(decoded(a))
    for number in range(3):
        await lab.until_sent(1 + number)
        assert lab.iterations.receive() == []
        assert lab.iterations.turn([a]) == [a]
        lab.iterations.plan(decoded(a))
        lab.executor.may_go_on.release()
        await lab.until_sent(2 + number)
        assert await lab.receive() == [[21 + number]]
    lab.executor.may_go_on.release()
    await lab.iterations.close()
    assert lab.executor.sent == [[20], [21], [22], [23]]
