"""The destination of a migration: room at once or not at all, and only what is missing travels."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from mooncake.messages.migration import HandedOver, PreCopied, Prepared, TakeOver
from mooncake.messages.requests import Held, HeldStep, Ref, SamplingParams
from mooncake.messages.workers import WorkFailed
from tests.workers.decode.test_inlined_prompts import Constant
from tests.workers.decode.test_runner import more_tokens, until
from tests.workers.decode_lab import Decoded, DecodeLab, Move, StartDecodeLab
from tests.workers.gate import Brake, Gate
from tests.workers.mini_cluster import InstanceUnderTest, Sizes, tokens_of
from tests.workers.references import Reference, prompt_of
from workers.decode.sequence import SequenceState
from workers.engine.batch import Batch, Chunk

pytestmark = pytest.mark.cluster
LENGTH = 45


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0)


async def moving(lab: DecodeLab, max_tokens: int = 300) -> tuple[Decoded, Move]:
    """A request that is decoded, with its blocks in its pool, on its way to the other instance."""
    decoded = lab.begin("moving", prompt_of(1, LENGTH), greedy(max_tokens), lab.decodes[0])
    await more_tokens(decoded.answer)
    move = Move(lab, decoded, lab.decodes[1])
    assert isinstance(await move.pre_copy(), PreCopied)
    return decoded, move


@contextlib.asynccontextmanager
async def held(instance: InstanceUnderTest) -> AsyncIterator[None]:
    """The instance computes nothing meanwhile, so that its request does not end before it moves."""
    may_go_on = threading.Event()
    holding = asyncio.create_task(instance.executor.run(may_go_on.wait))
    try:
        yield
    finally:
        may_go_on.set()
        await holding


async def goes_on(lab: DecodeLab, decoded: Decoded, reference: Reference) -> None:
    """The source has not noticed anything, and nothing is left at the destination."""
    kv = lab.decodes[1].executor.kv
    assert await tokens_of(decoded.answer) == reference(decoded.request.token_ids, 300)
    await lab.assert_nothing_is_held()
    assert kv.pages.num_free == kv.pages.num_pages


async def arrives(lab: DecodeLab, decoded: Decoded, move: Move, reference: Reference) -> None:
    """The destination takes the request over, its answer is right, and nothing is left anywhere."""
    assert await move.finish()
    assert await tokens_of(decoded.answer) == reference(decoded.request.token_ids, 300)
    await lab.assert_nothing_is_held()


async def end(lab: DecodeLab, *all_decoded: Decoded) -> None:
    for decoded in all_decoded:
        lab.abort(decoded)
    await lab.assert_nothing_is_held()


# -- no room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", ["slot", "pages", "pool"])
async def test_without_room_the_request_stays(
    start_decode_lab: StartDecodeLab, reference: Reference, lacking: str
) -> None:
    sizes = Sizes(num_decode=2, max_batch=1 if lacking == "slot" else 8)
    async with start_decode_lab(sizes) as lab:
        decoded, move = await moving(lab)
        other, pool, others = lab.decodes[1], lab.decodes[1].pool, list[Decoded]()
        pages, taken = list[int](), await pool.reserve([], 1)
        if lacking == "slot":
            others.append(lab.begin("other", prompt_of(2, 20), greedy(300), other))
            await more_tokens(others[0].answer)
        elif lacking == "pages":
            pages = other.executor.kv.pages.allocate(other.executor.kv.pages.num_pages - 6)
        else:
            await pool.release(taken.reservation_id)
            taken = await pool.reserve([], pool.num_pages - 2)
        answer = await move.prepare()
        assert answer == WorkFailed(move.ref, answer.reason, retryable=True)  # type: ignore[union-attr]
        assert "no room" in answer.reason or "no slot" in answer.reason
        other.executor.kv.pages.free(pages)
        await pool.release(taken.reservation_id)
        for of in others:
            assert await tokens_of(of.answer) == reference(of.request.token_ids, 300)
        await goes_on(lab, decoded, reference)


async def test_sequences_that_wait_go_first(start_decode_lab: StartDecodeLab, reference: Reference) -> None:
    """A slot may be free while a long one waits for pages."""
    async with start_decode_lab(Sizes(num_decode=2, num_device_pages=20)) as lab:
        decoded, move = await moving(lab, 80)
        other = lab.decodes[1]
        brake = Brake(other.executor)
        running = lab.begin("running", prompt_of(2, 60), greedy(60), other)
        await more_tokens(running.answer)
        with brake.on():
            await brake.holds()
            waiting = lab.begin("waiting", prompt_of(3, 110), greedy(5), other)
            await until(lambda: len(other.decode._batch._waiting) == 1)
            assert isinstance(await move.prepare(), WorkFailed)
        assert await tokens_of(waiting.answer) == reference(prompt_of(3, 110), 5)
        await end(lab, decoded, running)


async def test_a_second_round_without_room_gives_everything_back(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab() as lab:
        decoded, move = await moving(lab)
        kv = lab.decodes[1].executor.kv
        assert isinstance(await move.prepare(), Prepared)
        pages = kv.pages.allocate(kv.pages.num_free)
        await more_tokens(decoded.answer, 20)
        assert isinstance(await move.pre_copy(), PreCopied)
        assert isinstance(await move.prepare(), WorkFailed)
        kv.pages.free(pages)
        await goes_on(lab, decoded, reference)


# -- what travels -----------------------------------------------------------------------------------


async def test_later_rounds_fetch_and_load_new_blocks_only(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    gate = Gate()
    async with start_decode_lab(decode_copies=gate.make) as lab:
        decoded, move = await moving(lab)
        pool, received, loaded = lab.decodes[1].pool, list[int](), list[int]()
        for _ in range(3):
            async with held(lab.decodes[0]):
                prepared = await move.prepare()
            assert isinstance(prepared, Prepared)
            num_kv_tokens = LENGTH + len(move.output) - 1
            assert prepared.num_tokens == num_kv_tokens // 8 * 8
            stats = await pool.stats()
            received.append(sum(stats.received_bytes.values()) // lab.layout.block_bytes)
            loaded.append(prepared.num_tokens // 8)
            await more_tokens(decoded.answer, 20)
            await move.pre_copy()
        assert received == loaded
        await arrives(lab, decoded, move, reference)


async def test_blocks_that_the_destination_has_do_not_travel(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab() as lab:
        before = lab.begin("before", prompt_of(1, LENGTH), greedy(1), lab.decodes[1])
        await tokens_of(before.answer)
        await lab.assert_nothing_is_held()
        decoded, move = await moving(lab)
        prepared = await move.prepare()
        assert isinstance(prepared, Prepared)
        stats = await lab.decodes[1].pool.stats()
        num_received = sum(stats.received_bytes.values()) // lab.layout.block_bytes
        assert num_received == prepared.num_tokens // 8 - LENGTH // 8
        await arrives(lab, decoded, move, reference)


async def test_blocks_that_do_not_come_are_computed(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab() as lab:
        decoded = lab.begin("moving", prompt_of(1, LENGTH), greedy(300), lab.decodes[0])
        await more_tokens(decoded.answer)
        move = Move(lab, decoded, lab.decodes[1])
        await move.pre_copy()
        keys = decoded.request.continued(move.output, 8).block_keys
        await lab.decodes[0].pool.drop_idle(keys[3:])
        prepared = await move.prepare()
        assert prepared == Prepared(move.ref, 24)
        await arrives(lab, decoded, move, reference)


async def test_a_source_that_is_gone_ends_the_migration(
    start_decode_lab: StartDecodeLab,
) -> None:
    async with start_decode_lab() as lab:
        _, move = await moving(lab)
        lab.nodes["d0"].kill()
        answer = await move.prepare()
        assert answer == Prepared(move.ref, 0)
        move.give_up()
        destination = lab.decodes[1]
        await until(lambda: not destination.decode_jobs.refs)
        kv = destination.executor.kv
        assert kv.pages.num_free == kv.pages.num_pages
        stats = await destination.pool.stats(check_integrity=True)
        assert (stats.num_used, stats.integrity) == (0, None)


async def late_while_loading(move: Move, gate: Gate) -> Prepared | WorkFailed:
    """The answer if the time is over while a layer is loaded; a busy machine needs more of it until then."""
    timeout_s, reached = 0.2, asyncio.ensure_future(gate.reached())
    preparing = asyncio.ensure_future(move.prepare(timeout_s))
    while not reached.done():
        await asyncio.wait([preparing, reached], return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            timeout_s, move = 2 * timeout_s, Move(move.lab, move.decoded, move.destination)
            assert isinstance(await move.pre_copy(), PreCopied)
            preparing = asyncio.ensure_future(move.prepare(timeout_s))
    await asyncio.wait([preparing], timeout=timeout_s + 0.1)
    assert not preparing.done(), "a layer is being copied"
    gate.open()
    return await preparing


@pytest.mark.parametrize("step", ["fetch", "load"])
async def test_blocks_that_come_late_end_the_migration(
    start_decode_lab: StartDecodeLab, reference: Reference, step: str
) -> None:
    gate = Gate(load=1)
    async with start_decode_lab(decode_copies=gate.make) as lab:
        gate.open()
        decoded, move = await moving(lab)
        gate.close()
        answer = await (move.prepare(timeout_s=0.0) if step == "fetch" else late_while_loading(move, gate))
        gate.open()
        assert isinstance(answer, WorkFailed)
        assert "did not come within" in answer.reason
        await goes_on(lab, decoded, reference)


async def test_damaged_blocks_end_the_migration(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    gate = Gate(load=0)
    async with start_decode_lab(decode_copies=gate.make) as lab:
        gate.open()
        decoded, move = await moving(lab)
        gate.close()
        preparing = asyncio.ensure_future(move.prepare())
        await gate.reached()
        pool = lab.decodes[1].pool
        table = pool.segment.page_table()
        pages = [page for page in range(pool.num_pages) if any(table.checksums(page, range(4)))]
        pool.segment.layer_view(pages[0], 2)[5] ^= 1
        gate.open()
        answer = await preparing
        assert isinstance(answer, WorkFailed)
        assert "damaged" in answer.reason
        await goes_on(lab, decoded, reference)


# -- prepared ---------------------------------------------------------------------------------------


async def test_abort_releases_a_prepared_request(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab() as lab:
        decoded, move = await moving(lab)
        kv = lab.decodes[1].executor.kv
        assert isinstance(await move.prepare(), Prepared)
        assert kv.pages.num_free < kv.pages.num_pages
        stats = await lab.decodes[1].pool.stats()
        assert (stats.num_reservations, stats.num_leases) == (0, 0), "its blocks are on the device"
        assert lab.decodes[1].decode.load.num_requests == 1
        move.give_up()
        await goes_on(lab, decoded, reference)


async def test_abort_while_blocks_are_loaded(start_decode_lab: StartDecodeLab, reference: Reference) -> None:
    gate = Gate(load=1)
    async with start_decode_lab(decode_copies=gate.make) as lab:
        gate.open()
        decoded, move = await moving(lab)
        gate.close()
        preparing = asyncio.ensure_future(move.prepare())
        await gate.reached()
        kv = lab.decodes[1].executor.kv
        move.give_up()
        await asyncio.wait([preparing], timeout=0.1)
        assert kv.pages.num_free < kv.pages.num_pages, "a layer is being copied"
        gate.open()
        preparing.cancel()
        await goes_on(lab, decoded, reference)


# -- taking over ------------------------------------------------------------------------------------


async def test_the_next_iteration_computes_what_is_left_whatever_the_budget_of_prompts(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    """Prompts get a page in an iteration, as the sequences that are decoded take all of the SLO's time."""
    sizes = Sizes(num_decode=2, num_pool_pages=256, num_device_pages=128, prefill_chunk=1000)
    async with start_decode_lab(sizes) as lab:
        decoded, move = await moving(lab)
        destination = lab.decodes[1]
        predictors = destination.decode.meter.predictors
        predictors.tbt = Constant(10.0)  # type: ignore[assignment]
        predictors.prompt_cost.observe(100, 5000, 100.0)
        predictors.prompt_cost.observe = lambda *_: None  # type: ignore[method-assign]
        running = lab.begin("running", prompt_of(2, 20), greedy(400), destination, tbt_slo_s=0.1)
        await more_tokens(running.answer, 3)
        prompt = lab.begin("prompt", prompt_of(3, 200), greedy(5), destination, tbt_slo_s=0.1)
        prepared = await move.prepare()
        assert isinstance(prepared, Prepared)
        await more_tokens(decoded.answer, 12)
        assert isinstance(await move.hand_over(), HandedOver)
        left = [*decoded.request.token_ids, *move.output][prepared.num_tokens :]
        brake, prepare, first = Brake(destination.executor), destination.executor.prepare, list[int]()

        def noted(chunks: list[Chunk]) -> Batch:
            computed = [list(chunk.token_ids) for chunk in chunks if chunk.start == prepared.num_tokens]
            first.extend(len(tokens) for tokens in computed if tokens == left[: len(tokens)])
            return prepare(chunks)

        with brake.on():
            await brake.holds()
            destination.executor.prepare = noted  # type: ignore[method-assign,assignment]
            move.take_over()
            await until(lambda: bool(first))
        assert set(first) == {len(left)}
        assert first[0] > 8
        assert await tokens_of(decoded.answer) == reference(decoded.request.token_ids, 300)
        assert await tokens_of(prompt.answer) == reference(prompt_of(3, 200), 5)
        await end(lab, running)


async def test_a_request_that_was_taken_over_is_preempted_like_any_other(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    """Once before its first iteration there, too."""
    async with start_decode_lab(Sizes(num_decode=2, max_batch=2, num_pool_pages=256)) as lab:
        destination = lab.decodes[1]
        stays = lab.begin("stays", prompt_of(2, 20), greedy(400), destination, tenant="a")
        await more_tokens(stays.answer)
        decoded = lab.begin("moving", prompt_of(1, LENGTH), greedy(200), lab.decodes[0], tenant="a")
        await more_tokens(decoded.answer)
        move = Move(lab, decoded, destination)
        await move.pre_copy()
        await move.prepare()
        await move.hand_over()
        brake = Brake(destination.executor)
        with brake.on():
            await brake.holds()
            move.take_over()
            other = lab.begin("other", prompt_of(3, 20), greedy(40), destination, tenant="b")
            sequence = destination.decode._sequences[move.ref]
            await until(lambda: sequence.state is SequenceState.WAITING)
            assert not sequence.has_drawn
        assert await tokens_of(other.answer) == reference(prompt_of(3, 20), 40)
        assert await tokens_of(decoded.answer) == reference(decoded.request.token_ids, 200)
        assert destination.decode.meter.num_preemptions["pool"] >= 1
        await end(lab, stays)


async def test_an_order_to_take_over_an_unknown_request_does_nothing(
    start_decode_lab: StartDecodeLab,
) -> None:
    async with start_decode_lab() as lab:
        decoded, move = await moving(lab)
        lab.decodes[1].obey(TakeOver(Ref(1, "unknown", 2), decoded.request))
        assert isinstance(await move.prepare(), Prepared)
        assert await move.finish()
        await end(lab, decoded)


async def test_cancel_behind_the_order_to_take_over(start_decode_lab: StartDecodeLab) -> None:
    async with start_decode_lab() as lab:
        decoded, move = await moving(lab)
        await move.prepare()
        assert await move.finish()
        await end(lab, decoded)
        kv = lab.decodes[1].executor.kv
        assert kv.pages.num_free == kv.pages.num_pages


# -- another Conductor ------------------------------------------------------------------------------


async def test_under_another_conductor_the_source_goes_on_and_what_was_prepared_is_dropped(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab(Sizes(num_decode=2)) as lab:
        decoded, move = await moving(lab)
        assert isinstance(await move.prepare(), Prepared)
        assert lab.decodes[1].decode.take_held() == []
        assert lab.decodes[0].decode.take_held() == [Held(decoded.ref, HeldStep.DECODING)]
        await goes_on(lab, decoded, reference)
        assert lab.decodes[0].decode.take_held() == []


async def test_under_another_conductor_a_request_goes_on_that_was_taken_over(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab(Sizes(num_decode=2)) as lab:
        decoded, move = await moving(lab)
        assert isinstance(await move.prepare(), Prepared)
        assert await move.finish()
        await more_tokens(decoded.answer)
        assert lab.decodes[0].decode.take_held() == []
        assert lab.decodes[1].decode.take_held() == [Held(move.ref, HeldStep.DECODING)]
        assert await tokens_of(decoded.answer) == reference(decoded.request.token_ids, 300)
