"""Decoding beside loads, seals, preemptions and refusals, with real messengers."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

from mooncake.messages.heartbeats import Joining
from mooncake.messages.requests import Ref, SamplingParams
from mooncake.messages.workers import Decode, Reserve, ToWorker
from tests.kvstore.nodes import DEADLINE_S
from tests.kvstore.nodes import until as pool_until
from tests.workers.gate import Brake, Gate
from tests.workers.mini_cluster import (
    Answer,
    InstanceUnderTest,
    MiniCluster,
    Sizes,
    StartCluster,
    tokens_of,
)
from tests.workers.references import Reference, prompt_of
from workers.engine.batch import Batch, Chunk
from workers.execution.draws import Drawn, Draws

pytestmark = pytest.mark.cluster

MAX_PLANNED = 2
"""iterations: one in flight and one behind it"""


def greedy(max_tokens: int, *stop_token_ids: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0, stop_token_ids=stop_token_ids)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def more_tokens(answer: Answer, num_tokens: int = 10) -> None:
    """The batch goes on."""
    goal = len(answer.tokens) + num_tokens
    await until(lambda: len(answer.tokens) >= goal)


def decode_of(cluster: MiniCluster) -> InstanceUnderTest:
    return cluster.instances[1]


# -- beside the batch -------------------------------------------------------------------------------


async def test_batch_goes_on_while_a_request_is_loaded(
    start_cluster: StartCluster, reference: Reference
) -> None:
    gate, prompts = Gate(load=1), [prompt_of(1, 20), prompt_of(2, 30)]
    async with start_cluster(decode_copies=gate.make) as cluster:
        gate.open()
        brake = Brake(decode_of(cluster).executor)
        running = cluster.submit("running", prompts[0], greedy(300))
        await more_tokens(running)
        gate.close()
        with brake.on():
            joining = cluster.submit("joining", prompts[1], greedy(12))
            await gate.reached()
        await more_tokens(running)
        assert len(joining.tokens) == 1  # prefill's
        gate.open()
        assert await tokens_of(joining) == reference(prompts[1], 12)
        assert await tokens_of(running) == reference(prompts[0], 300)
        await cluster.assert_nothing_is_held()


async def test_what_has_become_of_a_request_on_its_way_into_the_batch_is_told_once(
    start_cluster: StartCluster, reference: Reference
) -> None:
    async with start_cluster() as cluster:
        answer = cluster.submit("r", prompt_of(1, 20), greedy(300))
        await more_tokens(answer)
        arrived, joined = decode_of(cluster).decode.take_joining()
        assert arrived == Joining(Ref(1, "r", 1), arrived.arrival_s, None)
        assert arrived.arrival_s is not None
        assert joined.joining_s is not None
        assert joined == Joining(Ref(1, "r", 1), arrived.arrival_s, joined.joining_s)
        assert await tokens_of(answer) == reference(prompt_of(1, 20), 300)
        assert decode_of(cluster).decode.take_joining() == []


async def test_the_first_iteration_of_a_suspect_is_shared_with_nobody(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompts = {"running": prompt_of(1, 10), "suspect": prompt_of(2, 70)}
    passes: list[list[bool]] = []
    """of each, whether its rows are the suspect's"""

    async with start_cluster() as cluster:
        decode, may_go_on = decode_of(cluster), threading.Event()
        compute, obey = decode.executor.decode, decode.obey

        def noted(batch: Batch, draws: Draws) -> Drawn:
            passes.append([kv_len > 60 for kv_len in batch.kv_lens])
            assert may_go_on.wait(DEADLINE_S)
            return compute(batch, draws)

        def obey_suspiciously(message: ToWorker) -> None:
            if isinstance(message, Reserve) and message.ref.request_id == "suspect":
                message = msgspec.structs.replace(message, alone=True)
            obey(message)

        decode.executor.decode, decode.obey = noted, obey_suspiciously  # type: ignore[method-assign]
        running = cluster.submit("running", prompts["running"], greedy(40))
        await until(lambda: bool(passes))
        suspect = cluster.submit("suspect", prompts["suspect"], greedy(10))
        await until(lambda: decode.decode.num_running == 2)
        may_go_on.set()
        assert await tokens_of(suspect) == reference(prompts["suspect"], 10)
        assert await tokens_of(running) == reference(prompts["running"], 40)
        await cluster.assert_nothing_is_held()
    [first, *others] = [rows for rows in passes if True in rows]
    assert first == [True]
    assert sorted(others[0]) == [False, True], "then it is one of the batch"


async def test_batch_goes_on_while_an_answer_is_sealed(
    start_cluster: StartCluster, reference: Reference
) -> None:
    gate, prompts = Gate(store=1), [prompt_of(1, 20), prompt_of(2, 30)]
    async with start_cluster(decode_copies=gate.make) as cluster:
        brake = Brake(decode_of(cluster).executor)
        running = cluster.submit("running", prompts[0], greedy(300))
        await more_tokens(running)
        with brake.on():
            ended = cluster.submit("ended", prompts[1], greedy(12))
            await until(lambda: decode_of(cluster).decode.num_running == 2)
        assert await tokens_of(ended) == reference(prompts[1], 12)
        with brake.on():
            await gate.reached()
        await more_tokens(running)
        gate.open()
        assert await tokens_of(running) == reference(prompts[0], 300)
        await cluster.assert_nothing_is_held()


async def test_another_tenants_answer_ends_while_one_tenant_wants_all_slots(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompts = [prompt_of(seed, 20) for seed in range(4)]
    async with start_cluster(Sizes(max_batch=2, num_pool_pages=256)) as cluster:
        executor, may_go_on, are_many = decode_of(cluster).executor, threading.Event(), threading.Event()
        compute, prepare, numbers = executor.decode, executor.prepare, itertools.count()

        def slow(batch: Batch, draws: Draws) -> Drawn:
            if next(numbers) == 8:
                may_go_on.clear()  # until the short one has its slot
                are_many.set()
            assert may_go_on.wait(DEADLINE_S)
            return compute(batch, draws)

        def noted(chunks: Sequence[Chunk]) -> Batch:
            if "short" in cluster.answers and any(chunk.start == 20 for chunk in chunks):
                may_go_on.set()
            return prepare(chunks)

        executor.decode, executor.prepare = slow, noted  # type: ignore[method-assign]
        heavy = [
            cluster.submit(f"heavy {index}", prompt, greedy(200), tenant="a")
            for index, prompt in enumerate(prompts[:3])
        ]
        await until(lambda: all(answer.tokens for answer in heavy))
        may_go_on.set()
        await until(are_many.is_set)
        short = cluster.submit("short", prompts[3], greedy(12), tenant="b")
        assert await tokens_of(short) == reference(prompts[3], 12)
        assert not any(answer.ended.is_set() for answer in heavy)
        for prompt, answer in zip(prompts, heavy, strict=False):
            assert await tokens_of(answer) == reference(prompt, 200)
        await cluster.assert_nothing_is_held()


async def test_an_iteration_is_planned_while_the_one_before_runs(
    start_cluster: StartCluster, reference: Reference
) -> None:
    async with start_cluster() as cluster:
        decode = decode_of(cluster)
        executor, may_go_on = decode.executor, threading.Event()
        compute, prepare, prepared = executor.decode, executor.prepare, []

        def slow(batch: Batch, draws: Draws) -> Drawn:
            assert may_go_on.wait(DEADLINE_S)
            return compute(batch, draws)

        def noted(chunks: Sequence[Chunk]) -> Batch:
            prepared.append([chunk.start for chunk in chunks])
            return prepare(chunks)

        executor.decode, executor.prepare = slow, noted  # type: ignore[method-assign]
        answer = cluster.submit("r", prompt_of(1, 20), greedy(30))
        await until(lambda: prepared[-1:] == [[21]])
        assert len(answer.tokens) == 1
        may_go_on.set()
        assert await tokens_of(answer) == reference(prompt_of(1, 20), 30)


async def test_a_stop_token_ends_a_sequence_that_is_in_flight(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompts = [prompt_of(seed, 15 + seed) for seed in range(6)]
    expected = [reference(prompt, 20) for prompt in prompts]
    stops = [tokens[5 + 2 * index] for index, tokens in enumerate(expected)]
    async with start_cluster() as cluster:
        answers = [
            cluster.submit(str(index), prompt, greedy(20, stop))
            for index, (prompt, stop) in enumerate(zip(prompts, stops, strict=True))
        ]
        for answer, tokens, stop in zip(answers, expected, stops, strict=True):
            assert await tokens_of(answer) == tokens[: tokens.index(stop) + 1]
        await cluster.assert_nothing_is_held()


@pytest.mark.parametrize("idle_cores", [frozenset({0, 1}), frozenset[int]()])
async def test_gives_way_to_prompts_on_its_own_cores_only(
    start_cluster: StartCluster, reference: Reference, idle_cores: frozenset[int]
) -> None:
    prompts = [prompt_of(seed, 20) for seed in range(4)]
    async with start_cluster(Sizes(idle_cores=idle_cores)) as cluster:
        [prefill, decode] = cluster.instances
        meter, held = decode.decode.meter, list[ToWorker]()
        brake = Brake(decode.executor)
        predict(decode, 0.05)
        running = cluster.submit("running", prompts[0], greedy(100))
        await more_tokens(running)
        assert meter.stats.pause_s == 0
        prefill.obey = held.append  # type: ignore[method-assign]
        with brake.on():
            joining = [cluster.submit(str(index), prompts[index], greedy(12)) for index in (1, 2, 3)]
            await until(lambda: len(held) == 3)
        if idle_cores:
            await until(lambda: meter.stats.pause_s > 0.05)
        else:
            await more_tokens(running)
            assert meter.stats.pause_s == 0
        for message in held:
            InstanceUnderTest.obey(prefill, message)
        assert await tokens_of(running) == reference(prompts[0], 100)
        for answer, prompt in zip(joining, prompts[1:], strict=True):
            assert await tokens_of(answer) == reference(prompt, 12)
        await cluster.assert_nothing_is_held()


# -- the next turn ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "salt"), [(20, ""), (20, "tenant"), (3, "")])
async def test_next_turn_finds_the_answer(
    start_cluster: StartCluster, reference: Reference, length: int, salt: str
) -> None:
    """Decode's blocks are part of the pool (Mooncake, section 3). An answer's last token has no KVCache."""
    prompt = prompt_of(7, length)
    async with start_cluster() as cluster:
        first = await tokens_of(cluster.submit("first", prompt, greedy(30), salt))
        await cluster.idle()
        turn = [*prompt, *first, *prompt_of(8, 9)]
        second = cluster.submit("second", turn, greedy(5), salt)
        assert await tokens_of(second) == reference(turn, 5)
        assert second.num_cached_tokens == (length + 29) // 8 * 8
        other = cluster.submit("other", turn, greedy(5), "another tenant")
        await tokens_of(other)
        assert other.num_cached_tokens == 0
        await cluster.assert_nothing_is_held()
        stats = decode_of(cluster).decode.meter.stats
        assert stats.num_unsealed == 0
        assert stats.num_sealed_blocks >= (length + 29) // 8 - length // 8


async def test_an_answer_without_room_in_the_pool_is_not_kept(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompt = prompt_of(9, 20)
    async with start_cluster() as cluster:
        pool, brake = decode_of(cluster).pool, Brake(decode_of(cluster).executor)
        answer = cluster.submit("first", prompt, greedy(100))
        await more_tokens(answer)
        with brake.on():
            taken = await pool.reserve([], pool.num_pages - 3)
        assert await tokens_of(answer) == reference(prompt, 100)
        await cluster.idle()
        stats = decode_of(cluster).decode.meter.stats
        assert (stats.num_sealed_blocks, stats.num_unsealed) == (0, 1)
        await pool.release(taken.reservation_id)
        await cluster.assert_nothing_is_held()


# -- preemption -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "length", "salt"),
    [("pool", 20, ""), ("pool", 20, "tenant"), ("pool", 2, "tenant"), ("host", 20, "")],
)
async def test_tokens_are_those_without_preemption(
    start_cluster: StartCluster, reference: Reference, place: str, length: int, salt: str
) -> None:
    prompts = [prompt_of(seed, length + seed) for seed in range(3)]
    sizes = Sizes(num_device_pages=14)
    async with start_cluster(sizes) as cluster:
        decode = decode_of(cluster)
        with Brake(decode.executor).on():
            answers = [
                cluster.submit(str(index), prompt, greedy(60), salt) for index, prompt in enumerate(prompts)
            ]
            await until(lambda: decode.decode.num_running == len(prompts))
            if place == "host":
                stats = await pool_until(decode.pool, lambda stats: stats.num_reservations == 0)
                await decode.pool.reserve([], stats.num_pages)
        for answer, prompt in zip(answers, prompts, strict=True):
            assert await tokens_of(answer) == reference(prompt, 60)
        assert decode.decode.meter.stats.num_preemptions[place]


# -- damage -----------------------------------------------------------------------------------------


async def test_a_block_that_is_damaged_before_it_is_loaded_is_computed_again(
    start_cluster: StartCluster, reference: Reference
) -> None:
    gate, prompt = Gate(load=0), prompt_of(1, 44)
    async with start_cluster(decode_copies=gate.make) as cluster:
        pool = decode_of(cluster).pool
        answer = cluster.submit("r", prompt, greedy(12))
        await gate.reached()
        table = pool.segment.page_table()
        pages = [page for page in range(pool.num_pages) if any(table.checksums(page, range(4)))]
        pool.segment.layer_view(pages[0], 2)[5] ^= 1
        gate.open()
        assert await tokens_of(answer) == reference(prompt, 12)
        await cluster.assert_nothing_is_held()


# -- the double check -------------------------------------------------------------------------------


class Prediction:
    """A predictor that a test decides for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[tuple[int, int]] = []

    def observe(self, batch_size: int, num_kv_tokens: int, seconds: float) -> None:
        pass

    def predict_s(self, batch_size: int, num_kv_tokens: int) -> float:
        self.asked.append((batch_size, num_kv_tokens))
        return self.seconds


def predict(instance: InstanceUnderTest, seconds: float) -> Prediction:
    prediction = Prediction(seconds)
    instance.decode.meter.predictors.tbt = prediction  # type: ignore[assignment]
    return prediction


async def test_refuses_what_would_make_the_batch_too_slow(start_cluster: StartCluster) -> None:
    async with start_cluster(Sizes(tbt_slo_s=0.05)) as cluster:
        prediction = predict(decode_of(cluster), 0.06)
        brake = Brake(decode_of(cluster).executor)
        first = cluster.submit("first", prompt_of(1, 20), greedy(300))
        await more_tokens(first)
        with brake.on():
            second = cluster.submit("second", prompt_of(2, 30), greedy(5))
            await second.ended.wait()
        assert (second.tokens, second.error is not None) == ([], True)
        assert "60.0 ms" in str(second.error)
        batch_size, num_kv_tokens = prediction.asked[-1]
        assert batch_size == 2
        assert 60 <= num_kv_tokens <= 20 + 30 + len(first.tokens)
        cluster.cancel("first")
        await cluster.assert_nothing_is_held()
        assert decode_of(cluster).decode.meter.stats.num_refusals == 1
        alone = cluster.submit("alone", prompt_of(2, 30), greedy(5))
        await tokens_of(alone)


async def test_who_waits_for_its_turn_has_it_when_the_only_other_one_has_gone(
    start_cluster: StartCluster, reference: Reference
) -> None:
    gate, sizes = Gate(load=1), Sizes(ttft_slo_s=3600, tbt_slo_s=0.05)
    async with start_cluster(sizes, decode_copies=gate.make) as cluster:
        prediction = predict(decode_of(cluster), 0.06)
        cluster.submit("before", prompt_of(1, 20), greedy(5))
        await gate.reached()  # its pages are given back when no iteration is to come
        waiting = cluster.submit("waiting", prompt_of(2, 30), greedy(5))
        await until(lambda: bool(prediction.asked))  # when it is prefilled
        cluster.cancel("before")
        gate.open()
        assert await tokens_of(waiting) == reference(prompt_of(2, 30), 5)
        await cluster.assert_nothing_is_held()
        assert decode_of(cluster).decode.meter.stats.num_refusals == 0


async def test_checks_when_prefill_has_ended_and_is_placed_elsewhere(
    start_cluster: StartCluster, reference: Reference
) -> None:
    async with start_cluster(Sizes(tbt_slo_s=0.05, num_decode=2)) as cluster:
        [_, d0, d1] = cluster.instances
        predict(d0, 0.01)
        brakes = [Brake(instance.executor) for instance in (d0, d1)]
        first = cluster.submit("first", prompt_of(1, 20), greedy(300))
        await more_tokens(first)
        assert d0.decode.num_running == 1

        def obey(message: ToWorker) -> None:
            if isinstance(message, Decode):
                predict(d0, 0.06)
            InstanceUnderTest.obey(d0, message)

        with brakes[0].on():
            blocking = cluster.submit("blocking", prompt_of(3, 60), greedy(300))
            await more_tokens(blocking)
            assert d1.decode.num_running == 1
            d0.obey = obey  # type: ignore[method-assign]
            with brakes[1].on():
                second = cluster.submit("second", prompt_of(2, 30), greedy(5))
                await until(lambda: d0.decode.meter.stats.num_refusals == 1)
        assert await tokens_of(second) == reference(prompt_of(2, 30), 5)
        assert d0.decode.meter.stats.num_refusals == 1
        for name in ("first", "blocking"):
            cluster.cancel(name)
        await cluster.assert_nothing_is_held()


# -- first tokens that are held ---------------------------------------------------------------------

BOTH_SLOS = Sizes(ttft_slo_s=3600.0, tbt_slo_s=3600.0)


async def test_with_both_slos_the_first_token_leaves_when_the_second_one_is_computed(
    start_cluster: StartCluster, reference: Reference
) -> None:
    gate, prompts = Gate(load=1), [prompt_of(1, 20), prompt_of(2, 30)]
    async with start_cluster(BOTH_SLOS, decode_copies=gate.make) as cluster:
        first = cluster.submit("first", prompts[0], greedy(12))
        await gate.reached()
        only_one = cluster.submit("only one", prompts[1], greedy(1))
        assert await tokens_of(only_one) == reference(prompts[1], 1), "no second one follows"
        assert first.tokens == []
        gate.open()
        assert await tokens_of(first) == reference(prompts[0], 12)
        await cluster.assert_nothing_is_held()


async def test_with_both_slos_the_first_token_waits_for_the_iteration_that_runs(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompts = [prompt_of(1, 20), prompt_of(2, 20), prompt_of(3, 20)]
    async with start_cluster(BOTH_SLOS) as cluster:
        decode = decode_of(cluster)
        running = cluster.submit("running", prompts[0], greedy(100))
        await more_tokens(running)
        brake = Brake(decode.executor)
        with brake.on():
            await brake.holds()
            joined = cluster.submit("joined", prompts[1], greedy(12))
            await until(lambda: decode.decode.num_running == 2)
            only_one = cluster.submit("only one", prompts[2], greedy(1))
            assert await tokens_of(only_one) == reference(prompts[2], 1), "it was sent behind the others"
            assert joined.tokens == []
        assert await tokens_of(joined) == reference(prompts[1], 12)
        assert await tokens_of(running) == reference(prompts[0], 100)
        await cluster.assert_nothing_is_held()


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(ttft_slo_s=3600.0), Sizes(tbt_slo_s=3600.0)])
async def test_without_both_slos_the_first_token_leaves_when_prefill_has_ended(
    start_cluster: StartCluster, sizes: Sizes
) -> None:
    gate = Gate(load=1)
    async with start_cluster(sizes, decode_copies=gate.make) as cluster:
        answer = cluster.submit("r", prompt_of(1, 20), greedy(12))
        await until(lambda: len(answer.tokens) == 1)
        gate.open()
        await tokens_of(answer)


async def test_a_first_token_is_not_held_until_it_is_late(
    start_cluster: StartCluster, reference: Reference
) -> None:
    gate = Gate(load=1)
    async with start_cluster(BOTH_SLOS, decode_copies=gate.make) as cluster:
        decode = decode_of(cluster)
        decode.obey = lambda order: InstanceUnderTest.obey(  # type: ignore[method-assign]
            decode, msgspec.structs.replace(order, time_left_s=0.1) if isinstance(order, Decode) else order
        )
        answer = cluster.submit("r", prompt_of(1, 20), greedy(12))
        await gate.reached()
        await until(lambda: len(answer.tokens) == 1)
        gate.open()
        assert await tokens_of(answer) == reference(prompt_of(1, 20), 12)


async def test_a_held_token_of_a_cancelled_request_never_leaves(start_cluster: StartCluster) -> None:
    gate = Gate(load=1)
    async with start_cluster(BOTH_SLOS, decode_copies=gate.make) as cluster:
        answer = cluster.submit("r", prompt_of(1, 20), greedy(12))
        await gate.reached()
        cluster.cancel("r")
        gate.open()
        await cluster.assert_nothing_is_held()
        assert answer.tokens == []


# -- cancel -----------------------------------------------------------------------------------------


async def assert_gone_at_once(cluster: MiniCluster, name: str, num_free_pages: int) -> None:
    """After `cancel` pages, leases and slots are given back, and no further iteration is planned with it."""
    decode = decode_of(cluster)
    sequences = [
        sequence for sequence in decode.decode._sequences.values() if sequence.ref.request_id == name
    ]
    most_tokens = [len(sequence.tokens) + MAX_PLANNED for sequence in sequences]
    cluster.cancel(name)
    await until(lambda: all(ref.request_id != name for ref in decode.decode_jobs.refs))
    assert all(len(sequence.tokens) <= most for sequence, most in zip(sequences, most_tokens, strict=True))
    assert decode.executor.kv.pages.num_free >= num_free_pages


@pytest.mark.parametrize("step", ["load", "store"])
async def test_cancel_while_blocks_are_copied(start_cluster: StartCluster, step: str) -> None:
    gate = Gate(load=1) if step == "load" else Gate(store=1)
    async with start_cluster(decode_copies=gate.make) as cluster:
        cluster.submit("r", prompt_of(1, 30), greedy(12))
        await gate.reached()
        num_pages = decode_of(cluster).executor.kv.pages.num_pages
        assert decode_of(cluster).executor.kv.pages.num_free < num_pages
        if step == "load":  # the layer that is being copied ends
            cluster.cancel("r")
        gate.open()
        await assert_gone_at_once(cluster, "r", num_pages)
        await cluster.assert_nothing_is_held()


async def test_cancel_while_it_gives_way_to_others(start_cluster: StartCluster, reference: Reference) -> None:
    gate, prompts = Gate(store=1), [prompt_of(1, 20), prompt_of(2, 20)]
    sizes = Sizes(num_device_pages=10)
    async with start_cluster(sizes, decode_copies=gate.make) as cluster:
        brake = Brake(decode_of(cluster).executor)
        older = cluster.submit("older", prompts[0], greedy(60))
        await more_tokens(older, 1)
        with brake.on():
            newer = cluster.submit("newer", prompts[1], greedy(60))
            await until(lambda: decode_of(cluster).decode.num_running == 2)
        await gate.reached()
        assert len(newer.tokens) < 60  # it is not stored because it has ended
        cluster.cancel("newer")
        gate.open()
        await assert_gone_at_once(cluster, "newer", 0)
        assert await tokens_of(older) == reference(prompts[0], 60)
        await cluster.assert_nothing_is_held()


async def test_cancel_while_it_waits_or_runs(start_cluster: StartCluster) -> None:
    async with start_cluster(Sizes(max_batch=1)) as cluster:
        decode = decode_of(cluster)
        num_pages = decode.executor.kv.pages.num_pages
        brake = Brake(decode.executor)
        running = cluster.submit("running", prompt_of(1, 30), greedy(300))
        await more_tokens(running)
        with brake.on():
            waiting = cluster.submit("waiting", prompt_of(2, 30), greedy(300))
            await until(lambda: len(waiting.tokens) == 1)
            await assert_gone_at_once(cluster, "waiting", 0)
        assert len(running.tokens) < 300
        await assert_gone_at_once(cluster, "running", num_pages)
        pool = decode.pool
        taken = await pool.reserve([], pool.num_pages - 1)
        cluster.submit("reserving", prompt_of(3, 30), greedy(5))
        await until(lambda: len(decode.decode_jobs.refs) == 1)
        await assert_gone_at_once(cluster, "reserving", num_pages)
        await pool.release(taken.reservation_id)
        orders: list[ToWorker] = []
        decode.obey = lambda order: (  # type: ignore[method-assign]
            orders.append(order) if isinstance(order, Decode) else InstanceUnderTest.obey(decode, order)
        )
        cluster.submit("ordered", prompt_of(4, 30), greedy(5))
        await until(lambda: len(orders) == 1)
        await assert_gone_at_once(cluster, "ordered", num_pages)
        await cluster.assert_nothing_is_held()
