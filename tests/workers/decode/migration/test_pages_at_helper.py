"""The first pages of sequences at a helper: the same answers, and longer requests than fit into the owner."""

import asyncio
import re
from pathlib import Path

import pytest
import transformers

from mooncake.messages.requests import SamplingParams
from mooncake.messages.workers import WorkFailed
from tests.workers.decode_lab import Decoded, StartDecodeLab
from tests.workers.gate import Brake
from tests.workers.mini_cluster import BLOCK_SIZE, Sizes, tokens_of
from tests.workers.modules_lab import SIZES, Pair, paired, until, wide_model
from tests.workers.references import greedy_tokens, prompt_of

pytestmark = pytest.mark.cluster
REMOTE = pytest.mark.parametrize("is_remote", [False, True], ids=["one host", "two hosts"])
SMALL = Sizes(num_decode=2, num_device_pages=24, num_prefill_pages=64, num_pool_pages=80, max_batch=4)
"""The owner has 24 pages, and 18 more at the helper."""
NUM_SMALL, NUM_THERE = 24, 18
LONG, NUM_LONG = prompt_of(9, 25 * BLOCK_SIZE + 3), 13 * BLOCK_SIZE
"""A prompt that does not fit into the owner's own pages, and the length of its answer."""


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return wide_model()


def begin(pair: Pair, name: str, prompt: list[int], num_tokens: int, *, inline: bool = False) -> Decoded:
    return pair.lab.begin(name, prompt, SamplingParams(num_tokens, temperature=0), pair.owner, inline=inline)


async def answers(pair: Pair, name: str) -> list[list[int]]:
    """Those of several requests at once, some of which are computed here from their prompts on."""
    begun = [
        begin(pair, f"{name}-{index}", prompt_of(index, 3 + 17 * index), 50, inline=index % 3 == 1)
        for index in range(6)
    ]
    return [await tokens_of(decoded.answer) for decoded in begun]


@REMOTE
async def test_answers_are_those_of_pages_that_stay(
    start_decode_lab: StartDecodeLab, tmp_path: Path, *, is_remote: bool
) -> None:
    async with paired(start_decode_lab, tmp_path, SIZES, is_remote=is_remote) as pair:
        kv = pair.owner.executor.kv
        expected = await answers(pair, "stays")
        running = asyncio.create_task(answers(pair, "runs"))
        await pair.move(0.5)
        assert (kv.pages.num_own, kv.pages.num_usable) == (48, 84)
        assert pair.helper.executor.kv.pages.num_usable == 12
        assert await running == expected
        running = asyncio.create_task(answers(pair, "comes"))
        await until(lambda: bool(kv.pages.used(kv.pages.num_own)))
        assert await running == expected
        running = asyncio.create_task(answers(pair, "back"))
        await until(lambda: bool(kv.pages.used(kv.pages.num_own)))
        await pair.move(0)
        assert kv.pages.num_usable == pair.helper.executor.kv.pages.num_usable == 48
        assert await running == expected
        assert await answers(pair, "stays again") == expected


@REMOTE
async def test_a_request_may_be_longer_than_fits_here_alone(
    start_decode_lab: StartDecodeLab,
    tmp_path: Path,
    model: transformers.PreTrainedModel,
    *,
    is_remote: bool,
) -> None:
    expected = greedy_tokens(model, LONG, NUM_LONG)
    async with paired(start_decode_lab, tmp_path, SMALL, is_remote=is_remote) as pair:
        alone = begin(pair, "alone", LONG, NUM_LONG)
        said = await pair.lab.next_said(alone.ref)
        assert isinstance(said, WorkFailed)
        assert said.reason == "it needs 26 device pages now, and there are 24"
        await pair.move(0.5)
        assert pair.owner.executor.kv.pages.num_usable == NUM_SMALL + NUM_THERE
        assert await tokens_of(begin(pair, "long", LONG, NUM_LONG).answer) == expected
        # One that grows until it does not fit, with others beside it.
        grown = begin(pair, "grows", prompt_of(1, 30), 270)
        others = [begin(pair, f"other-{index}", prompt_of(2 + index, 20), 60) for index in range(2)]
        assert await tokens_of(grown.answer) == greedy_tokens(model, prompt_of(1, 30), 270)
        for index, other in enumerate(others):
            assert await tokens_of(other.answer) == greedy_tokens(model, prompt_of(2 + index, 20), 60)
        await pair.move(0)


@REMOTE
async def test_running_requests_are_divided_at_once_and_grow_beyond_the_owners_pages_without_a_preemption(
    start_decode_lab: StartDecodeLab, tmp_path: Path, model: transformers.PreTrainedModel, *, is_remote: bool
) -> None:
    async with paired(start_decode_lab, tmp_path, SMALL, is_remote=is_remote) as pair:
        kv = pair.owner.executor.kv
        brake = Brake(pair.owner.executor)
        grown = begin(pair, "grows", prompt_of(1, 12 * BLOCK_SIZE), 25 * BLOCK_SIZE)
        with brake.on():
            await brake.holds()
            number = pair.order(0.5)
            await until(lambda: pair.owner.decode._loop._is_held)
        assert (await pair.ended(number)).error == ""
        assert len(kv.pages.used(NUM_SMALL)) >= 6
        expected = greedy_tokens(model, prompt_of(1, 12 * BLOCK_SIZE), 25 * BLOCK_SIZE)
        assert await tokens_of(grown.answer) == expected
        assert not pair.owner.decode.meter.stats.num_preemptions
        await pair.move(0)


@REMOTE
async def test_pages_come_back_without_a_preemption_if_the_owner_has_room(
    start_decode_lab: StartDecodeLab, tmp_path: Path, model: transformers.PreTrainedModel, *, is_remote: bool
) -> None:
    async with paired(start_decode_lab, tmp_path, SIZES, is_remote=is_remote) as pair:
        kv, brake = pair.owner.executor.kv, Brake(pair.owner.executor)
        prompt = prompt_of(1, 12 * BLOCK_SIZE)
        running = begin(pair, "runs", prompt, 30 * BLOCK_SIZE)
        with brake.on():
            await brake.holds()
            number = pair.order(0.5)
            await until(lambda: pair.owner.decode._loop._is_held)
        assert (await pair.ended(number)).error == ""
        with brake.on():
            await brake.holds()
            assert len(kv.pages.used(kv.pages.num_own)) >= 6
            number = pair.order(0)
        assert (await pair.ended(number)).error == ""
        assert await tokens_of(running.answer) == greedy_tokens(model, prompt, 30 * BLOCK_SIZE)
        assert not pair.owner.decode.meter.stats.num_preemptions


async def test_sequences_are_divided_again_while_few_pages_are_free(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, SMALL) as pair:
        rearranger, are_again = pair.owner.decode._module_moves._rearranger, list[bool]()
        divide = rearranger.divide

        async def divided(*, again: bool) -> None:
            are_again.append(again)
            await divide(again=again)

        rearranger.divide = divided  # type: ignore[method-assign]
        await pair.move(0.5)
        assert are_again == [False]
        grown = begin(pair, "grows", prompt_of(1, 12 * BLOCK_SIZE), 4 * BLOCK_SIZE)
        await until(lambda: len(are_again) > 2)
        await tokens_of(grown.answer)
        assert are_again == [False] + [True] * (len(are_again) - 1)
        await pair.move(0)


async def test_pages_do_not_come_back_while_a_request_needs_them(
    start_decode_lab: StartDecodeLab, tmp_path: Path, model: transformers.PreTrainedModel
) -> None:
    async with paired(start_decode_lab, tmp_path, SMALL) as pair:
        await pair.move(0.5)
        long = begin(pair, "long", LONG, NUM_LONG)
        await until(lambda: bool(long.answer.tokens))
        place = await pair.place(0)
        assert place.part.share == 0.5
        assert place.error == (
            "a request may need 39 pages before its end, and with all modules there are 24"
        )
        assert await tokens_of(long.answer) == greedy_tokens(model, LONG, NUM_LONG)
        await pair.move(0)


async def test_a_lost_helper_ends_what_does_not_fit_here_and_nothing_else(
    start_decode_lab: StartDecodeLab, tmp_path: Path, model: transformers.PreTrainedModel
) -> None:
    async with paired(start_decode_lab, tmp_path, SMALL) as pair:
        kv = pair.owner.executor.kv
        await pair.move(0.5)
        long, short = begin(pair, "long", LONG, NUM_LONG), begin(pair, "short", prompt_of(3, 40), 60)
        await until(lambda: bool(long.answer.tokens and short.answer.tokens))
        await pair.lose_helper()
        said = await pair.lab.next_said(long.ref)
        assert isinstance(said, WorkFailed)
        assert said.retryable
        assert re.fullmatch("it needs [0-9]+ device pages now, and there are 24", said.reason)
        assert await tokens_of(short.answer) == greedy_tokens(model, prompt_of(3, 40), 60)
        await until(lambda: not pair.owner.decode.modules.are_elsewhere)
        assert pair.owner.decode.modules.error == "d1 is lost, and the first 50% of sequences are here again"
        assert (kv.pages.num_usable, kv.hosted_pages) == (NUM_SMALL, None)
        await pair.restart_helper()
        await pair.move(0.5)
        assert await tokens_of(begin(pair, "again", LONG, 20).answer) == greedy_tokens(model, LONG, 20)


async def test_the_helper_has_its_pages_again_after_the_loss_of_the_owner(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, SMALL) as pair:
        await pair.move(0.5)
        long = begin(pair, "long", LONG, NUM_LONG)
        await until(lambda: bool(long.answer.tokens))
        pair.lose_owner()
        await pair.owner_has_gone()
        await until(lambda: pair.helper.executor.kv.pages.num_free == NUM_SMALL)
        assert not pair.host.num_hosted
