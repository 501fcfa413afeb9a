"""Prompts that a decode instance computes in chunks, beside sequences that are decoded."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from mooncake.messages.costs import TBT_SLO_SHARE
from mooncake.messages.requests import SamplingParams
from mooncake.messages.workers import FromWorker, Prefilled
from tests.kvstore.nodes import DEADLINE_S
from tests.kvstore.nodes import until as pool_until
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import IM_END_ID
from tests.workers.gate import Brake
from tests.workers.mini_cluster import Answer, MiniCluster, Sizes, StartCluster, mini_cluster, tokens_of
from tests.workers.references import Reference, greedy_tokens, prompt_of
from tests.workers.test_grammars import GRAMMAR
from workers.decode.sequence import Sequence, SequenceState
from workers.engine.batch import Batch, Chunk
from workers.execution.draws import Drawn, Draws

INLINED = Sizes(inline=True, mixed_chunk_tokens=8, prefill_chunk=24)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def sequence_of(cluster: MiniCluster, name: str) -> Sequence | None:
    sequences = cluster.instances[1].decode._sequences
    return next((of for ref, of in sequences.items() if ref.request_id == name), None)


def prefilled_of(cluster: MiniCluster) -> list[Prefilled]:
    """What the Conductor is told of ends of prefill, as it is told."""
    told: list[Prefilled] = []
    handle = cluster.conductor.handle

    def noted(sender: bytes, message: FromWorker, now_s: float) -> object:
        if isinstance(message, Prefilled):
            told.append(message)
        return handle(sender, message, now_s)

    cluster.conductor.handle = noted  # type: ignore[method-assign,assignment]
    return told


async def test_the_next_turn_is_computed_where_its_history_is(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompt = prompt_of(7, 44)
    async with start_cluster(INLINED) as cluster:
        [prefill, decode] = cluster.instances
        told = prefilled_of(cluster)
        first = await tokens_of(cluster.submit("first", prompt, greedy(30)))
        assert first == reference(prompt, 30)
        await cluster.idle()
        turn = [*prompt, *first, *prompt_of(8, 9)]
        second = cluster.submit("second", turn, greedy(20))
        assert await tokens_of(second) == reference(turn, 20)
        assert second.num_cached_tokens == 72
        await cluster.assert_nothing_is_held()
        meter = decode.decode.meter
        assert (meter.num_inlined, meter.num_not_inlined) == (2, 0)
        assert meter.num_prompt_tokens == {"dram": 72, "computed": 44 + len(turn) - 72}
        assert meter.stats.mixed.num_prompt_tokens == 44 + len(turn) - 72
        assert not prefill.prefill.num_tokens
        assert [(of.ref.request_id, of.first_token, of.num_cached_tokens) for of in told] == [
            ("first", first[0], 0),
            ("second", second.tokens[0], 72),
        ]


# -- the same answers -------------------------------------------------------------------------------


def wishes(index: int) -> SamplingParams:
    """Greedy, seeded, under penalties, with logprobs, in a grammar."""
    return (
        greedy(20),
        SamplingParams(20, temperature=1.1, top_p=0.95, seed=4),
        SamplingParams(20, temperature=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.4),
        SamplingParams(20, temperature=1.3, seed=6, num_logprobs=3),
        SamplingParams(40, temperature=1.5, seed=3, stop_token_ids=(IM_END_ID,), grammar=GRAMMAR),
    )[index % 5]


@pytest.mark.parametrize(
    "sizes",
    [
        INLINED,
        Sizes(inline=True, mixed_chunk_tokens=5, prefill_chunk=7),
        Sizes(inline=True, tbt_slo_s=3600.0),
        Sizes(inline=True, block_size=32, max_batch=3),
    ],
    ids=["in pages", "across pages", "by the SLO", "three at a time"],
)
async def test_answers_are_those_of_a_prefill_instance(start_cluster: StartCluster, sizes: Sizes) -> None:
    prompts = [prompt_of(length, length) for length in (1, 7, 8, 9, 24, 25, 41, 64, 79, 100)]
    num_pages = 256
    drawn, logprobs = [], []
    for of in (Sizes(), sizes):
        of = dataclasses.replace(of, num_pool_pages=num_pages, num_device_pages=num_pages)
        async with start_cluster(of) as cluster:
            decoded = [
                cluster.submit(f"decoded-{index}", prompt_of(200 + index, 12), greedy(150))
                for index in range(3)
            ]
            for answer in decoded:
                await until(lambda: len(answer.tokens) > 2)  # noqa: B023
            answers = [
                cluster.submit(str(index), prompt, wishes(index)) for index, prompt in enumerate(prompts)
            ]
            drawn.append([await tokens_of(answer) for answer in (*answers, *decoded)])
            logprobs.append([of.logprob for answer in answers for of in answer.logprobs])
            await cluster.assert_nothing_is_held()
    assert drawn[0] == drawn[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert len(logprobs[0]) == 2 * 20


async def test_chunks_fill_the_time_that_the_slo_of_others_leaves(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompts = prompt_of(1, 10), prompt_of(2, 100), prompt_of(3, 30)
    async with start_cluster(Sizes(inline=True, tbt_slo_s=0.1, prefill_chunk=1000)) as cluster:
        decode = cluster.instances[1]
        predictors = decode.decode.meter.predictors
        predictors.tbt = Constant(TBT_SLO_SHARE * 0.1 - 0.04)  # type: ignore[assignment]
        predictors.prompt_cost.observe(100, 5000, 0.1)
        quantities: list[tuple[int, float]] = []
        predictors.prompt_cost.observe = lambda *of: quantities.append(of[:2])  # type: ignore[method-assign]
        predictors.error.observe = lambda *_: None  # type: ignore[method-assign]
        chunks: list[list[int]] = []
        prepare = decode.executor.prepare

        def noted(of_batch: list[Chunk]) -> Batch:
            chunks.append([len(chunk.token_ids) for chunk in of_batch])
            return prepare(of_batch)

        decode.executor.prepare = noted  # type: ignore[method-assign,assignment]
        running = cluster.submit("running", prompts[0], greedy(300))
        await until(lambda: len(running.tokens) > 2)
        assert chunks[0] == [10], "nothing else is decoded"
        brake = Brake(decode.executor)
        with brake.on():
            first = cluster.submit("first", prompts[1], greedy(5))
            second = cluster.submit("second", prompts[2], greedy(5))
            await until(lambda: decode.decode.num_running == 3)
        assert await tokens_of(first) == reference(prompts[1], 5)
        assert await tokens_of(second) == reference(prompts[2], 5)
        of_prompts = [sum(chunk for chunk in of_batch if chunk > 1) for of_batch in chunks[1:]]
        assert max(of_prompts) == 40
        assert [1, 20, 20] in chunks, "the rest of the first prompt, and what is left for the next"
        await until(lambda: sum(num_tokens for num_tokens, _ in quantities) == 140)
        num_pairs = sum(len(prompt) ** 2 / 2 for prompt in prompts)
        assert sum(pairs for _, pairs in quantities) == num_pairs, "each token attends to those before it"
        cluster.cancel("running")
        await cluster.assert_nothing_is_held()


class Constant:
    """A prediction that no measurement changes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def observe(self, *_: object) -> None:
        pass

    def predict_s(self, *_: object) -> float:
        return self._seconds


# -- in the middle of a prompt ----------------------------------------------------------------------


class Held:
    """Iterations that wait until a test opens them, from one with a chunk that ends behind `end` on."""

    def __init__(self, cluster: MiniCluster, end: int) -> None:
        self._may_go_on, self.has_begun = threading.Event(), threading.Event()
        executor = cluster.instances[1].executor
        compute = executor.decode

        def held(batch: Batch, draws: Draws) -> Drawn:
            if any(
                length > 1 and kv_len > end
                for length, kv_len in zip(batch.query_lens, batch.kv_lens, strict=True)
            ):
                self.has_begun.set()
                assert self._may_go_on.wait(DEADLINE_S)
            return compute(batch, draws)

        executor.decode = held  # type: ignore[method-assign]

    def open(self) -> None:
        self._may_go_on.set()


async def held_in_the_middle(
    cluster: MiniCluster, prompt: list[int], tenant: str = ""
) -> tuple[Held, Answer, Sequence]:
    """A prompt of which 16 tokens are computed, and more in an iteration that is held."""
    held = Held(cluster, 16)
    answer = cluster.submit("prompt", prompt, greedy(12), tenant=tenant)
    async with asyncio.timeout(DEADLINE_S):
        while (sequence := sequence_of(cluster, "prompt")) is None or sequence.num_computed_tokens < 16:
            await asyncio.sleep(0.001)
    await until(held.has_begun.is_set)  # until it has begun, the iteration may be planned anew
    assert sequence.num_computed_tokens == 16
    return held, answer, sequence


async def test_cancel_in_the_middle_of_a_prompt(start_cluster: StartCluster, reference: Reference) -> None:
    prompts = prompt_of(1, 10), prompt_of(2, 60)
    async with start_cluster(INLINED) as cluster:
        told = prefilled_of(cluster)
        running = cluster.submit("running", prompts[0], greedy(200))
        await until(lambda: len(running.tokens) > 2)
        held, _, sequence = await held_in_the_middle(cluster, prompts[1])
        cluster.cancel("prompt")
        held.open()
        await until(lambda: not sequence.pages)
        await until(lambda: sequence_of(cluster, "prompt") is None)
        assert not sequence.has_drawn
        again = cluster.submit("again", prompts[1], greedy(12))
        assert await tokens_of(again) == reference(prompts[1], 12)
        assert await tokens_of(running) == reference(prompts[0], 200)
        await cluster.assert_nothing_is_held()
        assert [of.ref.request_id for of in told] == ["running", "again"]


@pytest.mark.parametrize("place", ["pool", "host"])
async def test_a_prompt_that_is_preempted_goes_on_from_where_it_was(
    start_cluster: StartCluster, reference: Reference, place: str
) -> None:
    prompts = prompt_of(1, 10), prompt_of(2, 60), prompt_of(3, 20)
    async with start_cluster(dataclasses.replace(INLINED, max_batch=2)) as cluster:
        decode, told = cluster.instances[1], prefilled_of(cluster)
        running = cluster.submit("running", prompts[0], greedy(200), tenant="a")
        await pool_until(decode.pool, lambda stats: stats.num_sealed == 1 and stats.num_reservations == 0)
        held, answer, sequence = await held_in_the_middle(cluster, prompts[1], tenant="a")
        other = cluster.submit("other", prompts[2], greedy(5), tenant="b")
        await until(lambda: decode.decode.num_running == 2 and sequence.state is SequenceState.LEAVING)
        if place == "host":
            stats = await pool_until(decode.pool, lambda stats: stats.num_reservations == 0)
            taken = await decode.pool.reserve([], stats.num_pages)
            held.open()
            await until(lambda: bool(decode.decode.meter.num_preemptions["host"]))
            await decode.pool.release(taken.reservation_id)
        held.open()
        assert await tokens_of(other) == reference(prompts[2], 5)
        assert await tokens_of(answer) == reference(prompts[1], 12)
        assert await tokens_of(running) == reference(prompts[0], 200)
        await cluster.assert_nothing_is_held()
        stats = decode.decode.meter.stats
        assert stats.num_preemptions == {place: 1}
        assert stats.mixed.num_prompt_tokens == sum(map(len, prompts)), "nothing is computed twice"
        assert [of.ref.request_id for of in told] == ["running", "other", "prompt"]


# -- for others -------------------------------------------------------------------------------------


async def test_a_prompts_blocks_are_found_while_it_is_answered(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompt = prompt_of(1, 45)
    async with start_cluster(INLINED) as cluster:
        decode = cluster.instances[1]
        brake = Brake(decode.executor)
        answer = cluster.submit("answer", prompt, greedy(300))
        await until(lambda: len(answer.tokens) > 2)
        with brake.on():
            await pool_until(decode.pool, lambda stats: stats.num_sealed == 5)
            same = cluster.submit("same", prompt, greedy(12))
            await until(lambda: decode.decode.num_running == 2)
        assert await tokens_of(same) == reference(prompt, 12)
        assert same.num_cached_tokens == 40
        assert await tokens_of(answer) == reference(prompt, 300)
        await cluster.assert_nothing_is_held()


# -- a burst with one new prefix ---------------------------------------------------------------------

NUM_SHARED = 160
BURST = [prompt_of(20, NUM_SHARED) + prompt_of(seed, 4 + seed) for seed in range(3)]
ROOMY = dataclasses.replace(INLINED, num_pool_pages=256, num_device_pages=256)


def submit_burst(cluster: MiniCluster, prompts: list[list[int]], tenant: str = "") -> list[Answer]:
    return [
        cluster.submit(f"burst-{index}", prompt, greedy(12), tenant=tenant)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_new_prefix_of_a_burst_is_computed_once(
    model: transformers.PreTrainedModel, tmp_path: Path, num_ranks: int
) -> None:
    if num_ranks > 1:  # two cannot share three KV heads out evenly
        model = tiny_model("smollm2", num_key_value_heads=3, num_hidden_layers=2)
    sizes = dataclasses.replace(ROOMY, num_ranks=num_ranks)
    async with mini_cluster(model, tmp_path, sizes) as cluster:
        answers = submit_burst(cluster, BURST)
        for answer, prompt in zip(answers, BURST, strict=True):
            assert await tokens_of(answer) == greedy_tokens(model, prompt, 12)
        await cluster.assert_nothing_is_held()
        assert cluster.instances[1].decode.meter.num_prompt_tokens == {
            "computed": sum(map(len, BURST)) - 2 * NUM_SHARED,
            "dram": 2 * NUM_SHARED,
        }


async def test_prompt_is_computed_when_one_that_it_waited_for_is_cancelled(
    start_cluster: StartCluster, reference: Reference
) -> None:
    beside = prompt_of(1, 10)
    async with start_cluster(ROOMY) as cluster:
        decode = cluster.instances[1]
        running = cluster.submit("running", beside, greedy(200))
        await pool_until(decode.pool, lambda stats: stats.num_sealed == 1 and stats.num_reservations == 0)
        held, _, _ = await held_in_the_middle(cluster, BURST[0])
        [answer] = submit_burst(cluster, BURST[1:2])
        await until(lambda: sequence_of(cluster, "burst-0") is not None)
        stats = await decode.pool.stats()  # a reservation would have been asked for before
        assert stats.num_reservations == 0
        cluster.cancel("prompt")
        held.open()
        assert await tokens_of(answer) == reference(BURST[1], 12)
        assert await tokens_of(running) == reference(beside, 200)
        await cluster.assert_nothing_is_held()


async def test_prompt_goes_on_behind_the_blocks_of_one_that_is_preempted(
    start_cluster: StartCluster, reference: Reference
) -> None:
    others = prompt_of(1, 10), prompt_of(3, 20)
    async with start_cluster(dataclasses.replace(ROOMY, max_batch=2)) as cluster:
        decode = cluster.instances[1]
        running = cluster.submit("running", others[0], greedy(200), tenant="a")
        await pool_until(decode.pool, lambda stats: stats.num_sealed == 1 and stats.num_reservations == 0)
        held, first, sequence = await held_in_the_middle(cluster, BURST[0], tenant="a")
        [waiting] = submit_burst(cluster, BURST[1:2], tenant="a")
        other = cluster.submit("other", others[1], greedy(5), tenant="b")
        await until(lambda: decode.decode.num_running == 2 and sequence.state is SequenceState.LEAVING)
        held.open()
        assert await tokens_of(waiting) == reference(BURST[1], 12)
        assert waiting.num_cached_tokens is not None
        assert 16 <= waiting.num_cached_tokens < NUM_SHARED
        assert await tokens_of(first) == reference(BURST[0], 12)
        assert await tokens_of(other) == reference(others[1], 5)
        assert await tokens_of(running) == reference(others[0], 200)
        await cluster.assert_nothing_is_held()
