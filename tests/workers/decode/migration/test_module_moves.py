"""Modules that go to a helper and come back while requests run: every answer is that of modules that stay."""

import asyncio
import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from mooncake.errors import ModelError, TransferError
from mooncake.messages.blocks import KVDtype
from mooncake.messages.migration import LayerRange
from mooncake.messages.requests import SamplingParams, TokenLogprobs
from mooncake.messages.workers import WorkFailed
from tests.kvstore.nodes import DEADLINE_S
from tests.tiny_tokenizer import IM_END_ID
from tests.workers.decode_lab import Decoded, StartDecodeLab, decode_lab
from tests.workers.gate import Brake, Gate
from tests.workers.mini_cluster import BLOCK_SIZE, Sizes, tokens_of
from tests.workers.modules_lab import (
    NUM_PAGES,
    SIZES,
    WITH_A_THIRD,
    Pair,
    Part,
    paired,
    part_of,
    prepared,
    until,
    wide_model,
)
from tests.workers.prefill.test_cutting_in import Held
from tests.workers.references import prompt_of
from tests.workers.test_grammars import GRAMMAR
from workers.decode.batch_loop import BatchLoop
from workers.decode.migration import kvcache_move, rearranger
from workers.decode.migration.kvcache_move import KVCacheMove
from workers.decode.migration.rearranger import Rearranger
from workers.engine.weights import Weights
from workers.errors import SessionLostError
from workers.modules import hosting
from workers.modules.helper_link import HelperLink

pytestmark = pytest.mark.cluster
WISHES = (
    SamplingParams(70, temperature=0, num_logprobs=2),
    SamplingParams(60, temperature=1.1, top_p=0.95, seed=4, num_logprobs=2),
    SamplingParams(50, temperature=0.9, seed=5, repetition_penalty=1.2, num_logprobs=2),
    SamplingParams(60, temperature=1.5, seed=3, stop_token_ids=(IM_END_ID,), grammar=GRAMMAR, num_logprobs=2),
)

REMOTE = pytest.mark.parametrize("is_remote", [False, True], ids=["one host", "two hosts"])
PARTS = pytest.mark.parametrize("part", [1, LayerRange(1, 3), 0.5], ids=["heads", "layers", "pages"])
COPIED_PARTS = pytest.mark.parametrize("part", [1, LayerRange(1, 3)], ids=["heads", "layers"])
"""Parts whose move copies the owner's pages."""


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return wide_model()


async def answers(pair: Pair, name: str, num: int) -> list[list[int]]:
    """Those of several requests at once, most of which are computed here from their prompts on."""
    return [tokens for tokens, _ in await answers_with_logprobs(pair, name, num)]


async def answers_with_logprobs(
    pair: Pair, name: str, num: int
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Return the tokens of several requests as `answers` does, with logprobs, which show bits of logits."""
    begun = [begin(pair, name, index) for index in range(num)]
    return [(await tokens_of(decoded.answer), decoded.answer.logprobs) for decoded in begun]


def begin(pair: Pair, name: str, index: int) -> Decoded:
    prompt, sampling = prompt_of(index, 3 + 11 * index % 70), WISHES[index % len(WISHES)]
    return pair.lab.begin(f"{name}-{index}", prompt, sampling, pair.owner, inline=index % 3 != 2)


@pytest.mark.parametrize(
    "parts",
    [(1, 0, 2, 0, 1, 0), (LayerRange(1, 3), 0, LayerRange(0, 1), 0, LayerRange(1, 2), 0)],
    ids=["heads", "layers"],
)
@pytest.mark.parametrize(
    "sizes",
    [SIZES, Sizes(num_decode=2, num_device_pages=24, num_pool_pages=60, max_batch=4)],
    ids=["many pages", "few pages"],
)
@pytest.mark.parametrize(
    ("dtype", "is_remote"),
    [
        pytest.param("float32", False, id="float32-one host"),
        pytest.param("bfloat16", True, id="bfloat16-two hosts"),
        pytest.param("float32", True, id="float32-two hosts", marks=pytest.mark.soak),
        pytest.param("bfloat16", False, id="bfloat16-one host", marks=pytest.mark.soak),
    ],
)
async def test_answers_are_those_of_modules_that_stay(
    start_decode_lab: StartDecodeLab,
    tmp_path: Path,
    sizes: Sizes,
    parts: Sequence[Part],
    dtype: KVDtype,
    *,
    is_remote: bool,
) -> None:
    """In every dtype, as no bit of the logits depends on where heads and layers are."""
    sizes = replace(sizes, dtype=dtype)
    async with paired(start_decode_lab, tmp_path, sizes, is_remote=is_remote) as pair:
        expected = await answers_with_logprobs(pair, "stays", 8)
        running = asyncio.create_task(answers_with_logprobs(pair, "moves", 8))
        for part in parts:
            await pair.move(part)
            assert pair.host.num_hosted == ({"d0": part_of(part).num_heads} if part else {})
        assert await running == expected
        await pair.move(parts[0])
        assert await answers_with_logprobs(pair, "comes", 8) == expected
        await pair.move(0)
        assert await answers_with_logprobs(pair, "back", 8) == expected


async def test_an_answer_goes_on_at_the_helper_and_nothing_disturbs_the_helpers_own(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        [expected] = await answers(pair, "stays", 1)
        await pair.move(2)
        moved = begin(pair, "moved", 0)
        own = pair.lab.begin("own", prompt_of(0, 3), WISHES[0], pair.helper)
        assert await tokens_of(moved.answer) == await tokens_of(own.answer) == expected


async def test_the_owner_has_room_for_more_tokens_and_the_helper_for_fewer(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        owner, helper = pair.owner.executor.kv, pair.helper.executor.kv
        bytes_before = owner.layer(0).nbytes
        await pair.move(1)
        assert owner.pages.num_usable == NUM_PAGES * 4 // 3
        assert owner.layer(0).nbytes == bytes_before
        assert helper.pages.num_free == helper.pages.num_usable == NUM_PAGES - NUM_PAGES // 3
        # So many requests fit at the same time that did not before.
        sampling = SamplingParams(57, temperature=0)
        begun = [
            pair.lab.begin(f"r{index}", prompt_of(index, 8), sampling, pair.owner, inline=True)
            for index in range(7)
        ]
        for decoded in begun:
            await tokens_of(decoded.answer)
        assert not pair.owner.decode.meter.stats.num_preemptions
        await pair.move(0)
        assert owner.pages.num_usable == helper.pages.num_free == NUM_PAGES


async def test_the_weights_of_layers_that_are_away_leave_their_memory_to_pages(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        kv, model = pair.owner.executor.kv, pair.owner.executor.model
        [expected] = await answers(pair, "stays", 1)
        await pair.move(LayerRange(2, 3))
        assert model.freed_layers == range(2, 3)
        # As many as the helper lends: more than fit into the memory of the owner's pages alone.
        assert kv.pages.num_usable == 3 * (NUM_PAGES - NUM_PAGES // 4) > NUM_PAGES * 3 // 2
        await pair.move(0)
        assert not model.freed_layers
        assert kv.pages.num_usable == NUM_PAGES
        assert await answers(pair, "back", 1) == [expected]


@contextlib.contextmanager
def lost_checkpoint(pair: Pair) -> Iterator[None]:
    """A context in which the owner's weights cannot be loaded."""

    def fail(weights: Weights) -> None:
        raise ModelError("the checkpoint is gone")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(pair.owner.executor, "_refill", fail)
        yield


async def test_layers_stay_away_while_their_weights_cannot_be_loaded(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await answers(pair, "stays", 4)
        await pair.move(LayerRange(1, 3))
        num_pages = pair.owner.executor.kv.pages.num_usable
        running = asyncio.create_task(answers(pair, "moves", 4))
        with lost_checkpoint(pair):
            place = await pair.place(0)
        assert place.error == "the weights of layers 1:3 cannot be loaded: the checkpoint is gone"
        assert place.part == part_of(LayerRange(1, 3))
        assert pair.owner.executor.kv.pages.num_usable == num_pages
        assert await running == expected
        await pair.move(0)
        assert await answers(pair, "back", 4) == expected


async def test_a_session_ends_if_the_weights_of_a_lost_helpers_layers_cannot_be_loaded(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await answers(pair, "stays", 1)
        await pair.move(LayerRange(1, 3))
        moves = pair.owner.decode._module_moves
        with lost_checkpoint(pair):
            moves._rearranger.hold()
            with pytest.raises(SessionLostError, match="but cannot be: the weights of layers 1:3 cannot be"):
                await moves._come_back("lost, and here again")
        await moves._come_back("lost, and here again")
        assert await answers(pair, "later", 1) == expected


@PARTS
async def test_a_session_ends_with_a_helper_on_another_host(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async def lose() -> None:
        async with paired(start_decode_lab, tmp_path, is_remote=True) as pair:
            await pair.move(part)
            begun = [begin(pair, "lost", index) for index in range(4)]
            await until(lambda: any(decoded.answer.tokens for decoded in begun))
            await pair.lose_helper()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        await lose()
    assert ended.group_contains(SessionLostError, match="d1 is lost, and with it the KVCache of ")
    assert not ended.group_contains(TransferError)


@REMOTE
@PARTS
async def test_a_helper_that_is_lost_before_the_switch_has_nothing_and_costs_nothing(
    start_decode_lab: StartDecodeLab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: Part,
    *,
    is_remote: bool,
) -> None:
    async with paired(start_decode_lab, tmp_path, is_remote=is_remote) as pair:
        quiet, end, lost = BatchLoop.quiet, HelperLink._on_closed_by_helper, asyncio.Event()

        async def lose(loop: BatchLoop) -> None:
            await quiet(loop)
            await pair.lose_helper()
            await lost.wait()

        def note(link: HelperLink) -> None:
            end(link)
            lost.set()

        with monkeypatch.context() as patches:
            patches.setattr(BatchLoop, "quiet", lose)
            patches.setattr(HelperLink, "_on_closed_by_helper", note)
            place = await pair.place(part)  # while no page is in use that would be copied
        assert place.error == "the helper was lost before the move was complete"
        assert not place.are_elsewhere
        assert not pair.owner.executor.model.freed_layers
        assert len(await tokens_of(pair.begin("later", 20, pair.owner).answer)) == 20


async def beyond_own_pages(pair: Pair, part: Part) -> tuple[list[list[int]], list[Decoded]]:
    """Move modules, and begin requests that need more pages than the owner has alone.

    Returns their answers without a move, and the requests.
    """
    sampling = SamplingParams(130, temperature=0)

    def begin_all(name: str) -> list[Decoded]:
        return [
            pair.lab.begin(f"{name}{index}", prompt_of(index, 8), sampling, pair.owner) for index in range(7)
        ]

    expected = [await tokens_of(decoded.answer) for decoded in begin_all("stays")]
    await pair.move(part)
    begun, kv = begin_all("moved"), pair.owner.executor.kv
    await until(lambda: bool(kv.pages.used(NUM_PAGES)) or begun[-1].answer.ended.is_set())
    assert kv.pages.used(NUM_PAGES)
    return expected, begun


@PARTS
async def test_modules_come_back_although_their_pages_are_needed(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected, begun = await beyond_own_pages(pair, part)
        await pair.move(0)
        assert [await tokens_of(decoded.answer) for decoded in begun] == expected


async def test_requests_keep_pages_beyond_the_owners_own_while_weights_cannot_be_loaded(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected, begun = await beyond_own_pages(pair, LayerRange(1, 3))
        num_before = pair.owner.decode.meter.stats.num_preemptions
        with lost_checkpoint(pair):
            place = await pair.place(0)
        assert place.error
        assert pair.owner.decode.meter.stats.num_preemptions == num_before
        assert [await tokens_of(decoded.answer) for decoded in begun] == expected


@PARTS
async def test_a_lost_helper_costs_no_answer(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await answers(pair, "stays", 8)
        await pair.move(part)
        running = asyncio.create_task(answers(pair, "moved", 8))
        await until(lambda: pair.owner.decode.num_running > 1)
        await pair.lose_helper()
        await until(lambda: not pair.owner.decode.modules.are_elsewhere)
        error = f"d1 is lost, and {part_of(part).what} are here again"
        assert pair.owner.decode.modules.error == error
        assert await running == expected
        place = await pair.place(part)
        assert "the helper does not answer" in place.error
        assert pair.helper.executor.kv.pages.num_usable == NUM_PAGES


@PARTS
async def test_a_lost_helper_costs_no_answer_whose_pages_were_beyond_the_owners_own(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected, begun = await beyond_own_pages(pair, part)
        await pair.lose_helper()
        assert [await tokens_of(decoded.answer) for decoded in begun] == expected
        await until(lambda: not pair.owner.decode.modules.is_moving)
        assert pair.owner.executor.kv.pages.num_usable == NUM_PAGES


@pytest.mark.parametrize("inline", [True, False], ids=["decoded", "new"])
async def test_modules_stay_away_while_a_request_may_need_more_pages_than_there_are_with_them(
    start_decode_lab: StartDecodeLab, tmp_path: Path, *, inline: bool
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        await pair.move(1)
        decoded = pair.begin("long", 400, pair.owner, inline=inline)
        if inline:
            await until(lambda: bool(decoded.answer.tokens))
        place = await pair.place(0)
        assert (place.error, place.part.num_heads) == (
            "a request may need 51 pages before its end, and with all modules there are 48",
            1,
        )
        assert len(await tokens_of(decoded.answer)) == 400
        await pair.move(0)


async def test_modules_come_back_although_a_request_that_migrates_here_has_pages_that_go(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path, WITH_A_THIRD) as pair:
        kv, third = pair.owner.executor.kv, pair.lab.decodes[2]
        expected = await tokens_of(pair.begin("stays", 200, third).answer)
        await pair.move(1)
        decoded = pair.begin("moves", 200, third)
        await until(lambda: len(decoded.answer.tokens) > 8)
        with Brake(third.executor).on():
            taken = kv.pages.allocate(NUM_PAGES)
            move = await prepared(pair, decoded)
            kv.pages.free(taken)
            assert kv.pages.used(NUM_PAGES)
            await pair.move(0)
        assert isinstance(await pair.lab.next_said(move.ref), WorkFailed)
        assert await tokens_of(decoded.answer) == expected


@PARTS
async def test_modules_stay_away_and_take_no_memory_if_pages_are_not_freed_in_time(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        kv, model = pair.owner.executor.kv, pair.owner.executor.model
        await pair.move(part)
        num_pages, freed_bytes = kv.pages.num_usable, model.freed_bytes
        taken = kv.pages.allocate(NUM_PAGES + 1, NUM_PAGES)
        with monkeypatch.context() as patches:
            patches.setattr(rearranger, "_FREEING_TIMEOUT_S", 0.1)
            assert "were not freed in 0.1 s" in (await pair.place(0)).error
        assert (kv.pages.num_usable, model.freed_bytes) == (num_pages, freed_bytes)
        kv.pages.free(taken)
        assert len(await tokens_of(pair.begin("later", 20, pair.owner).answer)) == 20
        await pair.move(0)


@pytest.mark.parametrize("lacking", ["free memory", "addresses"])
@pytest.mark.parametrize("is_leaving", [True, False], ids=["leaving", "coming back"])
@COPIED_PARTS
async def test_without_memory_for_both_arrangements_modules_stay_where_they_are(
    start_decode_lab: StartDecodeLab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
    part: Part,
    *,
    is_leaving: bool,
) -> None:
    def no_layers(num_pages: int, num_heads: int) -> list[torch.Tensor]:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await answers(pair, "stays", 4)
        if not is_leaving:
            await pair.move(part)
        running = asyncio.create_task(answers(pair, "moves", 4))
        with monkeypatch.context() as patches:
            if lacking == "addresses":
                patches.setattr(pair.owner.executor.kv, "new_layers", no_layers)
            else:
                patches.setattr(rearranger, "available_bytes", lambda: 1000)
            place = await pair.place(part if is_leaving else 0)
        assert place.error.startswith("no memory ")
        assert place.part == part_of(0 if is_leaving else part)
        await until(lambda: bool(pair.host.num_hosted) is not is_leaving)
        assert await running == expected
        await pair.move(part if is_leaving else 0)
        assert await answers(pair, "again", 4) == expected


@REMOTE
@pytest.mark.parametrize("end", [rearranger, hosting], ids=["owner", "helper"])
async def test_blocks_on_their_way_between_hosts_take_memory(
    start_decode_lab: StartDecodeLab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: ModuleType,
    *,
    is_remote: bool,
) -> None:
    async with paired(start_decode_lab, tmp_path, is_remote=is_remote) as pair:
        monkeypatch.setattr(end, "available_bytes", lambda: 6 << 20)  # without the 8 MiB of blocks
        place = await pair.place(1)
        assert place.are_elsewhere is not is_remote
        assert ("no memory" in place.error) is is_remote
        await pair.move(0)


async def test_an_owner_that_ends_waits_for_no_memory(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, given_up, give_up = threading.Event(), threading.Event(), KVCacheMove.give_up
    taken = list[torch.Tensor]()

    def take(memory: torch.Tensor) -> None:
        taken.append(memory)
        began.set()
        given_up.wait(DEADLINE_S)

    def note(move: KVCacheMove) -> None:
        give_up(move)
        given_up.set()

    monkeypatch.setattr(kvcache_move, "populate", take)
    monkeypatch.setattr(KVCacheMove, "give_up", note)
    async with paired(start_decode_lab, tmp_path) as pair:
        pair.order(1)
        assert await asyncio.to_thread(began.wait, DEADLINE_S)
        pair.lose_owner()
        await pair.owner_has_gone()
        assert given_up.is_set()
        assert len(taken) == 1


async def test_modules_and_passes_of_prompts_of_other_instances_wait_for_each_other(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await tokens_of(pair.begin("stays", 20, pair.helper, 40, inline=False).answer)
        pair.lab.prefills_at = pair.owner
        prompt = Held(pair.owner.executor)
        decoded = pair.begin("prompt", 20, pair.helper, 40, inline=False)
        await prompt.reached()  # in the middle of its layers
        place = await pair.place(1)
        assert place.error == "d0 still computes prompts that other instances decode"
        prompt.let_go()
        assert await tokens_of(decoded.answer) == expected
        await until(lambda: not pair.owner.prefill_jobs.refs)
        await pair.move(1)
        late = pair.begin("late", 20, pair.helper, 40, inline=False)
        reason = "modules of it are at d1, or move"
        assert await pair.lab.next_said(late.ref) == WorkFailed(late.ref, reason, retryable=True)
        pair.lab.abort(late)
        await pair.move(0)


async def test_an_order_behind_a_refused_one_finds_the_helper_free(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        looks = iter([1000])
        monkeypatch.setattr(rearranger, "available_bytes", lambda: next(looks, None))
        begun = pair.begin("runs", 60, pair.owner)
        await until(lambda: bool(begun.answer.tokens))
        pair.order(1)
        place = await pair.place(1)
        assert (place.error, place.part.num_heads) == ("", 1)
        assert pair.owner.decode.moves.num_moves == {"refused": 1, "moved": 1}
        await tokens_of(begun.answer)
        await pair.move(0)


class Copies:
    """The numbers of pages that moves have copied, beside iterations and between them, and the niceness of
    the threads that did so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        self._copy, self._loop = KVCacheMove.copy, pair.owner.decode._loop
        self.num_beside = self.num_between = 0
        self.niceness_beside, self.niceness_between = set[int](), set[int]()
        monkeypatch.setattr(KVCacheMove, "copy", lambda move, pages: self._note(move, pages))

    def _note(self, move: KVCacheMove, pages: Sequence[int]) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if self._loop._is_held:
            self.num_between += len(pages)
            self.niceness_between.add(niceness)
        else:
            self.num_beside += len(pages)
            self.niceness_beside.add(niceness)
        self._copy(move, pages)


async def test_the_pages_of_a_request_that_migrates_here_are_copied_before_the_pause(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path, WITH_A_THIRD) as pair:
        third = pair.lab.decodes[2]
        expected = await tokens_of(pair.begin("stays", 60, third, 300).answer)
        decoded = pair.begin("moves", 60, third, 300)
        await until(lambda: len(decoded.answer.tokens) > 8)
        copies = Copies(monkeypatch, pair)
        with Brake(third.executor).on():
            move = await prepared(pair, decoded)
            await pair.move(1)
        assert copies.num_beside >= 300 // BLOCK_SIZE
        assert copies.num_between <= rearranger._FEW_PAGES
        assert await move.finish()
        assert await tokens_of(decoded.answer) == expected
        await pair.move(0)


async def test_pages_are_copied_beside_iterations_by_a_thread_that_yields_to_them(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        decoded = pair.begin("moves", 60, pair.owner, 300)
        await until(lambda: bool(decoded.answer.tokens))
        copies, niceness = Copies(monkeypatch, pair), os.getpriority(os.PRIO_PROCESS, 0)
        with Brake(pair.owner.executor).on():
            moving = pair.order(1)
            await until(lambda: copies.num_beside > 0)
        assert (await pair.ended(moving)).error == ""
        assert copies.num_beside >= 300 // BLOCK_SIZE
        assert copies.niceness_beside == {min(19, niceness + rearranger._NICENESS)}
        assert copies.niceness_between == {niceness}
        await pair.move(0)


async def test_a_request_that_is_being_loaded_is_copied_when_it_is_there(
    model: transformers.PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rearranger, "_LOADING_TIMEOUT_S", DEADLINE_S)
    gate = Gate(load=1)
    gate.open()
    gated = functools.partial(decode_lab, model, tmp_path, decode_copies=gate.make)
    async with paired(gated, tmp_path) as pair:
        expected = await tokens_of(pair.begin("first", 60, pair.owner, 300).answer)
        copies = Copies(monkeypatch, pair)
        gate.close()
        decoded = pair.begin("again", 60, pair.owner, 300)
        await gate.reached()
        begun, beside = list[None](), Rearranger.beside

        async def and_begun(of: Rearranger, call: Callable[[], None], on_cancel: Callable[[], None]) -> None:
            await beside(of, call, on_cancel)
            begun.append(None)  # the move looks at the pages before any other task runs

        monkeypatch.setattr(Rearranger, "beside", and_begun)
        number = pair.order(1)
        await until(lambda: bool(begun))
        monkeypatch.setattr(Rearranger, "beside", beside)
        gate.open()
        assert (await pair.ended(number)).error == ""
        assert copies.num_beside >= 300 // BLOCK_SIZE
        assert copies.num_between <= rearranger._FEW_PAGES
        assert await tokens_of(decoded.answer) == expected
        await pair.move(0)
