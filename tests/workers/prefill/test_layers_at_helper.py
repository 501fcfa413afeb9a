"""Prompts of a prefill instance that has layers at a helper: all answers are those of layers that stay."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mooncake.messages.blocks import KVDtype
from mooncake.messages.migration import LayerRange
from mooncake.messages.requests import SamplingParams, TokenLogprobs
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S
from tests.workers.decode_lab import Decoded, StartDecodeLab
from tests.workers.mini_cluster import InstanceUnderTest, tokens_of
from tests.workers.modules_lab import NUM_PAGES, SIZES, Pair, Part, paired, until, wide_model
from tests.workers.prefill.test_cutting_in import Held, noting_cut_ins
from tests.workers.references import prompt_of
from workers.engine.batch import Chunk
from workers.errors import SessionLostError
from workers.execution.executor import Executor
from workers.execution.prefill_pass import pieces_of
from workers.modules.helper_link import HelperAccess

pytestmark = pytest.mark.cluster
IN_PIECES = replace(SIZES, saturating_tokens=8)
"""Passes of up to 20 tokens, and of 40 with a helper, in pieces of up to 8."""
SAMPLING = SamplingParams(6, temperature=0, num_logprobs=2)
SOME, LAST = LayerRange(1, 3), LayerRange(2, 3)
"""Some layers, and a single one, without which the owner has twice as many pages."""
Said = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return wide_model()


def begin(pair: Pair, name: str, index: int, num_tokens: int, tenant: str = "") -> Decoded:
    """Order a request whose prompt the owner computes. Requests of another `name` share no blocks."""
    prompt, at = prompt_of(index, num_tokens), pair.lab.decodes[0]
    unique = f"{name}-{index}-{num_tokens}"
    return pair.lab.begin(unique, prompt, SAMPLING, at, tenant=tenant, salt=name, inline=False)


async def said(decoded: Decoded) -> Said:
    """Return an answer with its logprobs, which show the bits of logits."""
    return await tokens_of(decoded.answer), decoded.answer.logprobs


async def answers(pair: Pair, name: str, num: int) -> list[Said]:
    """Return the answers to several requests at once."""
    begun = [begin(pair, name, index, 3 + 17 * index % 90) for index in range(num)]
    return [await said(decoded) for decoded in begun]


class Passes:
    """Passes of an instance, each of which waits at its end until it may end."""

    def __init__(self, executor: Executor) -> None:
        self._prefill, self._may_end = executor.prefill, threading.Semaphore(0)
        self.num_computed = 0
        executor.prefill = self._held  # type: ignore[method-assign]

    def end(self, num: int) -> None:
        """Let so many passes end."""
        self._may_end.release(num)

    def _held(self, *arguments: Any) -> torch.Tensor:
        states = self._prefill(*arguments)
        self.num_computed += 1
        assert self._may_end.acquire(timeout=DEADLINE_S)
        return states


class Stopped:
    """A helper that stands still when it is to compute layers of an owner, until it goes on."""

    def __init__(self, helper: InstanceUnderTest) -> None:
        self._forward, self._goes_on = helper.executor.model.forward_layers, threading.Event()
        self.began = threading.Event()
        helper.executor.model.forward_layers = self._stop  # type: ignore[method-assign]

    def go_on(self) -> None:
        self._goes_on.set()

    def _stop(self, *arguments: Any) -> torch.Tensor:
        self.began.set()
        assert self._goes_on.wait(DEADLINE_S)
        return self._forward(*arguments)


@pytest.mark.parametrize(
    ("dtype", "is_remote"),
    [
        pytest.param("float32", False, id="float32-one host"),
        pytest.param("bfloat16", False, id="bfloat16-one host"),
        pytest.param("bfloat16", True, id="bfloat16-two hosts"),
    ],
)
async def test_answers_are_those_of_layers_that_stay(
    start_decode_lab: StartDecodeLab, tmp_path: Path, dtype: KVDtype, *, is_remote: bool
) -> None:
    sizes, parts = replace(IN_PIECES, dtype=dtype), (SOME, 0, LayerRange(0, 1), 0, LayerRange(1, 2), 0)
    async with paired(start_decode_lab, tmp_path, sizes, is_remote=is_remote, is_prefill=True) as pair:
        expected = await answers(pair, "stays", 8)
        running = asyncio.create_task(answers(pair, "moves", 8))
        for part in parts:
            await pair.move(part)
        assert await running == expected
        for name, part in (("last", SOME), ("first", LayerRange(0, 1)), ("middle", LayerRange(1, 2))):
            await pair.move(part)
            assert await answers(pair, name, 8) == expected
            await pair.move(0)
        assert await answers(pair, "back", 8) == expected


@pytest.mark.parametrize("part", [SOME, LayerRange(0, 2)], ids=["last", "first"])
@pytest.mark.parametrize("is_remote", [False, True], ids=["one host", "two hosts"])
async def test_blocks_that_were_stored_before_are_reused_wherever_layers_are(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part, *, is_remote: bool
) -> None:
    async with paired(start_decode_lab, tmp_path, IN_PIECES, is_remote=is_remote, is_prefill=True) as pair:
        whole = [await said(begin(pair, "whole", 1, num)) for num in (90, 73, 56)]
        expected = [await said(begin(pair, f"alone {num}", 1, num)) for num in (90, 73, 56)]
        assert whole == expected
        await said(begin(pair, "here", 1, 40))
        await pair.move(part)
        await said(begin(pair, "others", 2, 90))  # their KVCache is in the pages that are used next
        longer = begin(pair, "here", 1, 90)
        assert await said(longer) == expected[0]
        assert longer.answer.num_cached_tokens == 40
        await said(begin(pair, "there", 1, 56))
        await said(begin(pair, "others", 3, 90))
        again = begin(pair, "there", 1, 73)
        assert await said(again) == expected[1]
        assert again.answer.num_cached_tokens == 56
        await pair.move(0)
        await said(begin(pair, "others", 4, 90))
        back = begin(pair, "there", 1, 90)
        assert await said(back) == expected[0]
        assert back.answer.num_cached_tokens == 72


async def test_the_owner_has_more_pages_and_less_memory_for_weights(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, is_prefill=True) as pair:
        kv, model = pair.owner.executor.kv, pair.owner.executor.model
        await pair.move(LAST)
        assert model.freed_layers == range(2, 3)
        assert kv.pages.num_usable > NUM_PAGES * 3 // 2
        # More prompts are computed at the same time than fitted before.
        taken = kv.pages.allocate(NUM_PAGES)
        assert len((await said(begin(pair, "fits", 1, 90)))[0]) == 6
        kv.pages.free(taken)
        await pair.move(0)
        assert not model.freed_layers
        assert kv.pages.num_usable == kv.pages.num_free == NUM_PAGES


@contextlib.asynccontextmanager
async def beyond_own_pages(pair: Pair) -> AsyncIterator[tuple[Decoded, Said, Passes]]:
    """Begin a prompt in pages that the owner has only while layers are away. One pass is computed."""
    expected, kv = await said(begin(pair, "stays", 1, 90)), pair.owner.executor.kv
    await pair.move(LAST)
    taken, passes = kv.pages.allocate(NUM_PAGES), Passes(pair.owner.executor)
    decoded = begin(pair, "beyond", 1, 90)
    passes.end(1)
    await until(lambda: passes.num_computed == 2)
    assert min(kv.pages.used(NUM_PAGES)) >= NUM_PAGES
    kv.pages.free(taken)
    yield decoded, expected, passes
    assert decoded.answer.num_cached_tokens == 0


async def test_layers_come_back_although_a_prompt_needs_their_pages(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    """It goes on in other pages, from its stored blocks on."""
    async with paired(start_decode_lab, tmp_path, is_prefill=True) as pair:
        async with beyond_own_pages(pair) as (decoded, expected, passes):
            number = pair.order(0)
            await until(lambda: pair.owner.executor.kv.pages.are_closed)
            passes.end(1)
            await until(lambda: passes.num_computed == 3)
            assert not pair.owner.executor.kv.pages.used(NUM_PAGES)
            passes.end(100)
            assert (await pair.ended(number)).error == ""
            assert await said(decoded) == expected
        assert passes.num_computed == 3, "two of 40 tokens, and one of the 10 behind the stored blocks"


async def test_a_lost_helper_costs_no_prompt_that_needs_its_pages(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, is_prefill=True) as pair:
        async with beyond_own_pages(pair) as (decoded, expected, passes):
            await pair.lose_helper()
            passes.end(100)
            assert await said(decoded) == expected
        place = pair.owner.decode.modules
        assert (place.helper, place.error) == ("", "d1 is lost, and layers 2:3 are here again")


async def test_a_lost_helper_costs_no_answer(start_decode_lab: StartDecodeLab, tmp_path: Path) -> None:
    async with paired(start_decode_lab, tmp_path, IN_PIECES, is_prefill=True) as pair:
        expected = await answers(pair, "stays", 8)
        await pair.move(SOME)
        running = asyncio.create_task(answers(pair, "moves", 8))
        await until(lambda: pair.owner.prefill.num_tokens.total() > 0)
        await pair.lose_helper()
        assert await running == expected
        await until(lambda: not pair.owner.decode.modules.are_elsewhere)
        assert pair.owner.executor.kv.pages.num_usable == NUM_PAGES
        assert await answers(pair, "later", 8) == expected


async def test_a_helper_that_stands_still_counts_as_lost_and_its_pass_is_repeated(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, IN_PIECES, is_prefill=True) as pair:
        expected = await answers(pair, "stays", 4)
        pair.owner.decode._module_moves._helpers = HelperAccess(CLUSTER_KEY, 0.05)
        await pair.move(SOME)
        helper = Stopped(pair.helper)
        assert await answers(pair, "moves", 4) == expected
        assert helper.began.is_set()
        assert not pair.owner.decode.modules.are_elsewhere
        helper.go_on()
        await until(lambda: not pair.host.num_hosted)


async def test_an_owner_ends_although_its_helper_stands_still(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, is_prefill=True) as pair:
        pair.owner.decode._module_moves._helpers = HelperAccess(CLUSTER_KEY, 100 * DEADLINE_S)
        await pair.move(SOME)
        helper = Stopped(pair.helper)
        decoded = begin(pair, "ends", 1, 40)
        assert await asyncio.to_thread(helper.began.wait, DEADLINE_S)
        for ref in pair.owner.prefill_jobs.refs:
            pair.owner.prefill_jobs.cancel(ref)
        pair.lab.abort(decoded)
        pair.lose_owner()
        await until(lambda: not pair.owner.is_busy)
        helper.go_on()
        await pair.owner_has_gone()
        await until(lambda: not pair.host.num_hosted)


async def test_a_session_ends_with_a_helper_on_another_host(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async def lose() -> None:
        async with paired(start_decode_lab, tmp_path, IN_PIECES, is_remote=True, is_prefill=True) as pair:
            await pair.move(SOME)
            _ = [begin(pair, "lost", index, 90) for index in range(4)]
            await until(lambda: pair.owner.prefill.num_tokens.total() > 0)
            await pair.lose_helper()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await lose()
    assert ended.group_contains(SessionLostError, match="d1 is lost, and with it the KVCache of layers 1:3")


async def test_a_prompt_that_is_aborted_while_the_helper_has_it_leaves_nothing_behind(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, IN_PIECES, is_prefill=True) as pair:
        expected = await said(begin(pair, "stays", 2, 50))
        await pair.move(SOME)
        helper = Stopped(pair.helper)
        decoded = begin(pair, "aborted", 1, 90)
        assert await asyncio.to_thread(helper.began.wait, DEADLINE_S)
        for ref in pair.owner.prefill_jobs.refs:
            pair.owner.prefill_jobs.cancel(ref)
        pair.lab.abort(decoded)
        other = begin(pair, "other", 2, 50)
        helper.go_on()
        assert await said(other) == expected
        await pair.move(0)


async def test_a_short_prompt_cuts_in_between_two_pieces(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, IN_PIECES, is_prefill=True) as pair:
        expected = [await said(begin(pair, "stays", *of)) for of in ((1, 60), (2, 7))]
        await pair.move(LAST)
        held = Held(pair.owner.executor)
        asked = noting_cut_ins(pair.owner.executor)
        long = begin(pair, "long", 1, 60, tenant="a")
        await held.reached()
        short = begin(pair, "short", 2, 7, tenant="b")
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
        held.let_go()
        assert [await said(long), await said(short)] == expected
        sizes = [num_tokens for layer, num_tokens in held.computed if layer == 0]
        assert sizes[:3] == [8, 7, 8], "the short one comes behind the first piece"
        await pair.move(0)


@pytest.mark.parametrize("part", [1, 0.5], ids=["heads", "pages"])
async def test_only_layers_leave_an_instance_that_only_prefills(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path, is_prefill=True) as pair:
        place = await pair.place(part)
        assert place.error.endswith("prefills, so that only layers of it can be at a helper")
        assert not place.are_elsewhere


def test_pieces_have_at_most_so_many_tokens_in_so_many_chunks() -> None:
    chunks = [Chunk(range(num), start, [7]) for num, start in ((5, 0), (1, 4), (1, 6), (9, 10))]

    def cut(most_tokens: int, most_chunks: int) -> list[list[tuple[int, Sequence[int]]]]:
        return [
            [(chunk.start, list(chunk.token_ids)) for chunk in piece]
            for piece in pieces_of(chunks, most_tokens, most_chunks)
        ]

    assert cut(6, 2) == [
        [(0, [0, 1, 2, 3, 4]), (4, [0])],
        [(6, [0]), (10, [0, 1, 2, 3, 4])],
        [(15, [5, 6, 7, 8])],
    ]
    assert cut(100, 2) == [
        [(0, [0, 1, 2, 3, 4]), (4, [0])],
        [(6, [0]), (10, list(range(9)))],
    ]
