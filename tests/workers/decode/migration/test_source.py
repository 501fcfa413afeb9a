"""The source of a migration: blocks are stored beside the batch, and a request leaves it in every state."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from mooncake.messages.migration import HandedOver, HandOver, PreCopied, PreCopy
from mooncake.messages.requests import Ref, SamplingParams
from mooncake.messages.workers import Finished
from tests.kvstore.nodes import until as pool_until
from tests.workers.decode.test_runner import more_tokens, until
from tests.workers.decode_lab import Decoded, DecodeLab, Move, StartDecodeLab
from tests.workers.gate import Brake, Gate
from tests.workers.mini_cluster import Sizes, tokens_of
from tests.workers.references import Reference, prompt_of
from workers.decode.sequence import Sequence, SequenceState

pytestmark = pytest.mark.cluster
TWO_SLOTS = Sizes(num_decode=2, max_batch=2, num_pool_pages=256)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0)


def sequence_of(decoded: Decoded) -> Sequence:
    return decoded.at.decode._sequences[decoded.ref]


def in_state(decoded: Decoded, state: SequenceState) -> bool:
    sequence = decoded.at.decode._sequences.get(decoded.ref)
    return sequence is not None and sequence.state is state


@contextlib.asynccontextmanager
async def preempting(lab: DecodeLab, max_tokens: int = 200) -> AsyncIterator[tuple[Decoded, list[Decoded]]]:
    """A request, and others; it is preempted behind the block, as another tenant wants one of two slots."""
    [at, _] = lab.decodes
    stays = lab.begin("stays", prompt_of(3, 20), greedy(400), at, tenant="a")
    await more_tokens(stays.answer)
    moving = lab.begin("moving", prompt_of(1, 45), greedy(max_tokens), at, tenant="a")
    await more_tokens(moving.answer)
    brake = Brake(at.executor)
    with brake.on():
        await brake.holds()
        other = lab.begin("other", prompt_of(2, 20), greedy(400), at, tenant="b")
        await until(
            lambda: in_state(moving, SequenceState.LEAVING) and in_state(other, SequenceState.RUNNING)
        )
        yield moving, [stays, other]


async def num_stored_blocks(decoded: Decoded, output: list[int]) -> int:
    """Return how many leading blocks of a request with this output its instance's pool has."""
    keys = decoded.request.continued(output, decoded.at.executor.kv.page_size).block_keys
    reservation = await decoded.at.pool.reserve(keys, 0)
    await decoded.at.pool.release(reservation.reservation_id)
    return sum(itertools.takewhile(bool, (block.sealed for block in reservation.blocks)))


async def ended(lab: DecodeLab, *all_decoded: Decoded) -> None:
    for decoded in all_decoded:
        lab.abort(decoded)
    await lab.assert_nothing_is_held()


# -- PreCopy ----------------------------------------------------------------------------------------


async def test_full_blocks_are_stored_while_the_request_is_decoded(start_decode_lab: StartDecodeLab) -> None:
    gate, prompt = Gate(store=1), prompt_of(1, 45)
    async with start_decode_lab(decode_copies=gate.make) as lab:
        gate.open()
        moving = lab.begin("r", prompt, greedy(300), lab.decodes[0])
        await more_tokens(moving.answer)
        gate.close()
        move = Move(lab, moving, lab.decodes[1])
        copying = asyncio.ensure_future(move.pre_copy())
        await gate.reached()
        await more_tokens(moving.answer)
        assert not copying.done()
        gate.open()
        copied = await copying
        assert isinstance(copied, PreCopied)
        assert copied.output == moving.answer.tokens[: len(copied.output)]
        num_tokens = len(prompt) + len(copied.output)
        assert (
            await num_stored_blocks(moving, copied.output) >= (num_tokens - 1) // 8
        )  # the newest has no KVCache
        await ended(lab, moving)


async def test_blocks_are_stored_once_there_are_as_many_as_were_asked_for(
    start_decode_lab: StartDecodeLab,
) -> None:
    prompt = prompt_of(1, 45)
    async with start_decode_lab() as lab:
        moving = lab.begin("r", prompt, greedy(300), lab.decodes[0])
        await more_tokens(moving.answer)
        brake = Brake(moving.at.executor)
        with brake.on():
            await brake.holds()
            num_tokens = len(prompt) + len(moving.answer.tokens) + 20
            copying = asyncio.ensure_future(Move(lab, moving, lab.decodes[1]).pre_copy(num_tokens))
        copied = await copying
        assert isinstance(copied, PreCopied)
        assert len(prompt) + len(copied.output) > num_tokens  # the newest has no KVCache
        assert await num_stored_blocks(moving, copied.output) >= num_tokens // 8
        await ended(lab, moving)


async def test_a_request_that_leaves_the_batch_is_not_waited_for(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab(TWO_SLOTS) as lab:
        async with preempting(lab) as (moving, others):
            move = Move(lab, moving, lab.decodes[1])
            copying = asyncio.ensure_future(move.pre_copy(10_000))
        assert isinstance(await copying, PreCopied)
        await move.prepare()
        assert await move.finish()
        assert await tokens_of(moving.answer) == reference(moving.request.token_ids, 200)
        await ended(lab, *others)


async def test_a_pool_without_room_is_no_failure(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    prompt = prompt_of(1, 20)
    async with start_decode_lab() as lab:
        pool, brake = lab.decodes[0].pool, Brake(lab.decodes[0].executor)
        moving = lab.begin("r", prompt, greedy(100), lab.decodes[0])
        await more_tokens(moving.answer, 20)
        with brake.on():
            await pool_until(pool, lambda stats: not stats.num_reservations)
            taken = await pool.reserve([], pool.num_pages - 2)
            copied = await Move(lab, moving, lab.decodes[1]).pre_copy()
        assert isinstance(copied, PreCopied)
        assert await tokens_of(moving.answer) == reference(prompt, 100)
        await pool.release(taken.reservation_id)
        await lab.assert_nothing_is_held()


async def test_pages_are_kept_while_they_are_copied_though_the_request_has_ended(
    start_decode_lab: StartDecodeLab,
) -> None:
    gate = Gate(store=1)
    async with start_decode_lab(decode_copies=gate.make) as lab:
        gate.open()
        moving = lab.begin("r", prompt_of(1, 45), greedy(40), lab.decodes[0])
        brake, kv = Brake(moving.at.executor), moving.at.executor.kv
        await more_tokens(moving.answer)
        with brake.on():
            gate.close()
            copying = asyncio.ensure_future(Move(lab, moving, lab.decodes[1]).pre_copy())
            await gate.reached()
        await moving.answer.ended.wait()
        await until(lambda: moving.at.decode.num_running == 0)
        assert kv.pages.num_free == kv.pages.num_pages - len(sequence_of(moving).pages)
        assert not copying.done()
        gate.open()
        assert isinstance(await copying, Finished), "it is the only answer"
        await lab.assert_nothing_is_held()


@pytest.mark.parametrize("place", ["pool", "host"])
async def test_a_preempted_request_is_copied_where_it_is_and_handed_over(
    start_decode_lab: StartDecodeLab, reference: Reference, place: str
) -> None:
    async with start_decode_lab(TWO_SLOTS) as lab:
        pool = lab.decodes[0].pool
        async with preempting(lab) as (moving, others):
            stats = await pool_until(pool, lambda stats: stats.num_reservations == 0)
            taken = await pool.reserve([], stats.num_pages if place == "host" else 1)
        await until(lambda: in_state(moving, SequenceState.WAITING))
        assert moving.at.decode.meter.num_preemptions[place] == 1
        move = Move(lab, moving, lab.decodes[1])
        copied = await move.pre_copy()
        assert isinstance(copied, PreCopied)
        await move.prepare()
        assert await move.finish()
        assert await tokens_of(moving.answer) == reference(moving.request.token_ids, 200)
        await pool.release(taken.reservation_id)
        await ended(lab, *others)


# -- HandOver ---------------------------------------------------------------------------------------


async def test_the_tokens_of_the_iteration_in_flight_leave_before_the_answer(
    start_decode_lab: StartDecodeLab,
) -> None:
    async with start_decode_lab() as lab:
        moving = lab.begin("r", prompt_of(1, 20), greedy(300), lab.decodes[0])
        brake = Brake(moving.at.executor)
        await more_tokens(moving.answer)
        with brake.on():
            moving.at.obey(HandOver(moving.ref))
            answering = asyncio.ensure_future(lab.next_said(moving.ref))
            num_tokens = len(moving.answer.tokens)
            assert not answering.done()
        handed_over = await answering
        assert handed_over == HandedOver(moving.ref, moving.answer.tokens)
        assert len(handed_over.output) <= num_tokens + 2, "one in flight, and one that was not received"
        await lab.assert_nothing_is_held()
        assert len(handed_over.output) == len(moving.answer.tokens)


async def test_a_request_whose_last_token_is_in_flight_finishes(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab() as lab:
        brake = Brake(lab.decodes[0].executor)
        with brake.on():
            moving = lab.begin("r", prompt_of(1, 20), greedy(2), lab.decodes[0], inline=False)
            await brake.holds()
            moving.at.obey(HandOver(moving.ref))
        assert isinstance(await lab.next_said(moving.ref), Finished)
        assert await tokens_of(moving.answer) == reference(prompt_of(1, 20), 2)
        await lab.assert_nothing_is_held()


async def test_a_held_first_token_leaves_before_the_answer(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab(TWO_SLOTS) as lab:
        lab.time_left_s = 3600.0
        [at, _] = lab.decodes
        running = [lab.begin(f"{n}", prompt_of(2 + n, 20), greedy(400), at) for n in range(2)]
        for of in running:
            await more_tokens(of.answer)
        moving = lab.begin("moving", prompt_of(1, 45), greedy(60), at, tbt_slo_s=3600.0, inline=False)
        await until(lambda: in_state(moving, SequenceState.WAITING))
        assert moving.answer.tokens == []
        move = Move(lab, moving, lab.decodes[1])
        copied = await move.pre_copy()
        assert copied == PreCopied(moving.ref, reference(prompt_of(1, 45), 1))
        await move.prepare()
        assert isinstance(await move.hand_over(), HandedOver)
        assert moving.answer.tokens == move.output
        move.take_over()
        assert await tokens_of(moving.answer) == reference(prompt_of(1, 45), 60)
        await ended(lab, *running)


@pytest.mark.parametrize("step", ["load", "store"])
async def test_handed_over_while_it_is_loaded_or_preempted(
    start_decode_lab: StartDecodeLab, reference: Reference, step: str
) -> None:
    gate, prompt = Gate(load=1) if step == "load" else Gate(store=1), prompt_of(1, 45)
    async with start_decode_lab(TWO_SLOTS, decode_copies=gate.make) as lab:
        [at, _] = lab.decodes
        if step == "load":
            moving, others = lab.begin("moving", prompt, greedy(100), at, inline=False), []
        else:
            gate.open()
            async with preempting(lab, 100) as (moving, others):
                gate.close()
        await gate.reached()
        move = Move(lab, moving, lab.decodes[1])
        handing_over = asyncio.ensure_future(move.hand_over())
        await asyncio.wait([handing_over], timeout=0.05)
        assert not handing_over.done()
        gate.open()
        assert isinstance(await handing_over, HandedOver)
        await move.prepare()
        move.take_over()
        assert await tokens_of(moving.answer) == reference(prompt, 100)
        await ended(lab, *others)


async def test_orders_for_a_request_that_is_not_decoded_yet_wait_until_it_is(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    prompt = prompt_of(1, 45)
    async with start_decode_lab() as lab:
        pool = lab.decodes[0].pool
        taken = await pool.reserve([], pool.num_pages - 1)
        moving = lab.begin("r", prompt, greedy(60), lab.decodes[0], inline=False)
        await until(lambda: moving.ref in moving.at.decode._sequences)
        moving.at.obey(PreCopy(moving.ref))
        move = Move(lab, moving, lab.decodes[1])
        handing_over = asyncio.ensure_future(move.hand_over())
        await asyncio.wait([handing_over], timeout=0.05)
        assert not handing_over.done()
        await pool.release(taken.reservation_id)
        assert await handing_over == HandedOver(moving.ref, reference(prompt, 1))
        assert moving.answer.tokens == reference(prompt, 1)
        await move.prepare()
        move.take_over()
        assert await tokens_of(moving.answer) == reference(prompt, 60)
        await lab.assert_nothing_is_held()


async def test_orders_for_a_request_that_has_ended_are_not_answered(start_decode_lab: StartDecodeLab) -> None:
    async with start_decode_lab() as lab:
        decoded = lab.begin("r", prompt_of(1, 20), greedy(5), lab.decodes[0])
        assert isinstance(await lab.next_said(decoded.ref), Finished)
        await lab.assert_nothing_is_held()
        for ref in (decoded.ref, Ref(1, "unknown", 1)):
            for order in (PreCopy(ref), HandOver(ref)):
                decoded.at.obey(order)
        other = lab.begin("other", prompt_of(2, 20), greedy(5), lab.decodes[0])
        await lab.next_said(other.ref)
        assert lab.num_said == 0
        await lab.assert_nothing_is_held()


# -- cancel -----------------------------------------------------------------------------------------


async def test_cancel_while_blocks_are_copied(start_decode_lab: StartDecodeLab) -> None:
    gate = Gate(store=1)
    async with start_decode_lab(decode_copies=gate.make) as lab:
        gate.open()
        moving = lab.begin("r", prompt_of(1, 45), greedy(300), lab.decodes[0])
        await more_tokens(moving.answer)
        gate.close()
        moving.at.obey(PreCopy(moving.ref))
        await gate.reached()
        kv = moving.at.executor.kv
        lab.abort(moving)
        await until(lambda: moving.at.decode.num_running == 0)
        assert kv.pages.num_free < kv.pages.num_pages, "a layer is being copied"
        gate.open()
        await lab.assert_nothing_is_held()
        assert lab.num_said == 0


async def test_cancel_between_the_order_to_hand_over_and_the_answer(start_decode_lab: StartDecodeLab) -> None:
    async with start_decode_lab() as lab:
        moving = lab.begin("r", prompt_of(1, 45), greedy(300), lab.decodes[0])
        brake = Brake(moving.at.executor)
        await more_tokens(moving.answer)
        with brake.on():
            moving.at.obey(HandOver(moving.ref))
            await asyncio.sleep(0)
            lab.abort(moving)
        await lab.assert_nothing_is_held()
        assert lab.num_said == 0
