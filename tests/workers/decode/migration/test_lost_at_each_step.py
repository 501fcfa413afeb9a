"""Owner or helper ends, clients go or requests migrate at each step of a move: every answer is right, and
nothing stays held."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers

from mooncake.messages.migration import LayerRange
from tests.kvstore.nodes import DEADLINE_S
from tests.workers.decode_lab import Decoded, Move, StartDecodeLab
from tests.workers.mini_cluster import tokens_of
from tests.workers.modules_lab import NUM_PAGES, WITH_A_THIRD, Pair, Part, paired, part_of, until, wide_model
from workers.decode.batch_loop import BatchLoop
from workers.decode.migration import rearranger
from workers.decode.migration.kvcache_move import KVCacheMove
from workers.errors import SessionLostError
from workers.modules.helper_link import HelperLink

pytestmark = pytest.mark.cluster
THERE = ("asking", "hosted", "copying", "pausing", "paused", "switched")
BACK = ("copying", "pausing", "paused", "switched", "ending")
STEPS = [("there", step) for step in THERE] + [("away", "decoding")] + [("back", step) for step in BACK]
PARTS: tuple[Part, ...] = (1, LayerRange(1, 3), 0.5)
ALL = [(step, part) for step in STEPS for part in PARTS]
CASES = random.Random(7).sample(ALL, len(ALL))
NUM_QUICK = 3
"""Cases of each test that do not take a soak."""


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return wide_model()


class Steps:
    """A move passes steps. At one of them, once, `kill` is called."""

    def __init__(self, step: tuple[str, str], kill: Callable[[], Awaitable[None]]) -> None:
        self._step, self._kill = step, kill
        self._loop = asyncio.get_running_loop()
        self.way, self.is_over = "there", False

    async def reach(self, name: str) -> None:
        if (self.way, name) == self._step and not self.is_over:
            self.is_over = True
            await self._kill()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the steps of all moves."""
        connect, quiet, end = HelperLink.connect, BatchLoop.quiet, HelperLink.end
        copy, complete = KVCacheMove.copy, KVCacheMove.complete

        async def connecting(*arguments: Any) -> HelperLink:
            await self.reach("asking")
            link = await connect(*arguments)
            await self.reach("hosted")
            return link

        async def pausing(loop: BatchLoop) -> None:
            await self.reach("pausing")
            await quiet(loop)
            await self.reach("paused")

        async def ending(link: HelperLink) -> None:
            await self.reach("ending")
            await end(link)

        def copying(move: KVCacheMove, pages: Sequence[int]) -> None:
            reached = asyncio.run_coroutine_threadsafe(self.reach("copying"), self._loop)
            reached.result(DEADLINE_S)
            copy(move, pages)

        def completing(move: KVCacheMove) -> Any:
            before = complete(move)
            self._loop.create_task(self.reach("switched"))
            return before

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(HelperLink, "connect", connecting)
            patches.setattr(HelperLink, "end", ending)
            patches.setattr(BatchLoop, "quiet", pausing)
            patches.setattr(KVCacheMove, "copy", copying)
            patches.setattr(KVCacheMove, "complete", completing)
            patches.setattr(rearranger, "_FEW_PAGES", 2)
            yield


def begin(pair: Pair, name: str) -> list[Decoded]:
    return [pair.begin(f"{name}-{index}", 60, pair.owner, 5 + 17 * index) for index in range(5)]


async def there_and_back(pair: Pair, steps: Steps, part: Part) -> None:
    """Order both moves; either may fail."""
    await pair.place(part)
    steps.way = "away"
    await steps.reach("decoding")
    steps.way = "back"
    await pair.place(0)


def cases(num_quick: int) -> list[Any]:
    """All, most of them for a soak alone."""
    ids = [f"{way} {step} {part_of(part).kind}" for (way, step), part in CASES]
    marks = [() if number < num_quick else (pytest.mark.soak,) for number in range(len(CASES))]
    return [
        pytest.param(*case, id=name, marks=of_one)
        for case, name, of_one in zip(CASES, ids, marks, strict=True)
    ]


REMOTE = pytest.mark.parametrize("is_remote", [False, True], ids=["one host", "two hosts"])
SOME_CASES = pytest.mark.parametrize(
    "chosen",
    [CASES[:NUM_QUICK], pytest.param(CASES[NUM_QUICK:], marks=pytest.mark.soak)],
    ids=["some", "the others"],
)


@SOME_CASES
async def test_a_helper_that_ends_at_a_step_costs_no_answer(
    start_decode_lab: StartDecodeLab, tmp_path: Path, chosen: list[tuple[tuple[str, str], Part]]
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = [await tokens_of(decoded.answer) for decoded in begin(pair, "alone")]
        for number, (step, part) in enumerate(chosen):
            steps = Steps(step, pair.lose_helper)
            begun = begin(pair, f"{number}")
            with steps.watched():
                await there_and_back(pair, steps, part)
                await until(lambda steps=steps: steps.is_over)
                assert [await tokens_of(decoded.answer) for decoded in begun] == expected
                await until(lambda: not pair.owner.decode.modules.are_elsewhere)
            assert pair.owner.executor.kv.pages.num_usable == NUM_PAGES
            assert pair.helper.executor.kv.pages.num_free == NUM_PAGES
            await pair.restart_helper()
        await pair.move(1)
        await pair.move(0)


def is_session_lost(step: tuple[str, str], part: Part) -> bool | None:
    """Return whether the owner's session ends with its helper on another host at a step of a move.

    None if it depends on when the owner learns of the loss: with pages of sequences the switch copies
    nothing, so that it may still come to its end.
    """
    if step in (("there", "asking"), ("there", "hosted"), ("back", "switched"), ("back", "ending")):
        return False
    if isinstance(part, float):
        return None
    return step[0] != "there" or step[1] == "switched"


@pytest.mark.parametrize(("step", "part"), cases(NUM_QUICK))
async def test_a_helper_on_another_host_that_ends_at_a_step_costs_the_session_while_it_has_modules(
    start_decode_lab: StartDecodeLab, tmp_path: Path, step: tuple[str, str], part: Part
) -> None:
    """Otherwise every answer is right, and modules move again."""
    pairs, num_running, is_lost = list[Pair](), list[int](), False
    try:
        async with paired(start_decode_lab, tmp_path, is_remote=True) as pair:

            async def kill() -> None:
                num_running.append(pair.owner.decode.num_running)
                await pair.lose_helper()

            pairs.append(pair)
            expected = [await tokens_of(decoded.answer) for decoded in begin(pair, "alone")]
            begun, steps = begin(pair, "moved"), Steps(step, kill)
            with steps.watched():
                await there_and_back(pair, steps, part)
                await until(lambda: steps.is_over)
                assert [await tokens_of(decoded.answer) for decoded in begun] == expected
                await until(lambda: not pair.owner.decode.modules.are_elsewhere)
            assert pair.owner.executor.kv.pages.num_usable == NUM_PAGES
            assert pair.helper.executor.kv.pages.num_free == NUM_PAGES
            await pair.restart_helper()
            await pair.move(part)
            await pair.move(0)
    except* SessionLostError:
        is_lost = True
    [pair] = pairs
    if num_running != [0]:  # otherwise no page need be copied
        assert is_session_lost(step, part) in (is_lost, None)
    assert not pair.host.num_hosted
    assert pair.helper.executor.kv.pages.num_free == NUM_PAGES


@REMOTE
@pytest.mark.parametrize(("step", "part"), cases(NUM_QUICK))
async def test_an_owner_that_ends_at_a_step_leaves_nothing_behind(
    start_decode_lab: StartDecodeLab, tmp_path: Path, step: tuple[str, str], part: Part, *, is_remote: bool
) -> None:
    async with paired(start_decode_lab, tmp_path, is_remote=is_remote) as pair:

        async def kill() -> None:
            pair.lose_owner()

        begin(pair, "lost")
        steps = Steps(step, kill)
        with steps.watched():
            moving = asyncio.create_task(there_and_back(pair, steps, part))
            await until(lambda: steps.is_over)
            await pair.owner_has_gone()
            moving.cancel()
            await asyncio.wait([moving])
        await until(lambda: not pair.host.num_hosted)
        assert pair.helper.executor.kv.pages.num_free == NUM_PAGES


@REMOTE
@SOME_CASES
async def test_clients_that_go_at_a_step_cost_no_other_answer(
    start_decode_lab: StartDecodeLab,
    tmp_path: Path,
    chosen: list[tuple[tuple[str, str], Part]],
    *,
    is_remote: bool,
) -> None:
    async with paired(start_decode_lab, tmp_path, is_remote=is_remote) as pair:
        expected = [await tokens_of(decoded.answer) for decoded in begin(pair, "alone")]
        for number, (step, part) in enumerate(chosen):
            begun = begin(pair, f"{number}")

            async def leave(begun: list[Decoded] = begun) -> None:
                for decoded in begun[1::2]:
                    pair.lab.abort(decoded)

            steps = Steps(step, leave)
            with steps.watched():
                await there_and_back(pair, steps, part)
                await until(lambda steps=steps: steps.is_over)
            assert not pair.owner.decode.modules.are_elsewhere
            assert [await tokens_of(decoded.answer) for decoded in begun[::2]] == expected[::2]
            await until(lambda: pair.owner.executor.kv.pages.num_free == NUM_PAGES)
            assert pair.helper.executor.kv.pages.num_free == NUM_PAGES


@SOME_CASES
async def test_requests_that_come_and_go_at_a_step_have_their_answers(
    start_decode_lab: StartDecodeLab, tmp_path: Path, chosen: list[tuple[tuple[str, str], Part]]
) -> None:
    async with paired(start_decode_lab, tmp_path, WITH_A_THIRD) as pair:
        lab, third = pair.lab, pair.lab.decodes[2]
        expected = [await tokens_of(decoded.answer) for decoded in begin(pair, "alone")]
        for number, (step, part) in enumerate(chosen):
            stay_or_go = begin(pair, f"{number}")
            comes = pair.begin(f"{number}-comes", 60, third, 5)
            await until(lambda comes=comes: bool(comes.answer.tokens))
            moving = list[asyncio.Task[object]]()

            async def migrate(
                goes: Decoded = stay_or_go[4],
                comes: Decoded = comes,
                moving: list[asyncio.Task[object]] = moving,
            ) -> None:
                moves = Move(lab, goes, third), Move(lab, comes, pair.owner)
                moving.extend(lab.group.create_task(move.run()) for move in moves)

            steps = Steps(step, migrate)
            with steps.watched():
                await there_and_back(pair, steps, part)
                await until(lambda steps=steps: steps.is_over)
            await asyncio.wait(moving)
            assert not pair.owner.decode.modules.are_elsewhere
            assert [await tokens_of(decoded.answer) for decoded in stay_or_go] == expected
            assert await tokens_of(comes.answer) == expected[0]
            await until(lambda: pair.owner.executor.kv.pages.num_free == NUM_PAGES)


@pytest.mark.parametrize("part", PARTS, ids=["heads", "layers", "pages"])
async def test_an_order_that_comes_twice_is_carried_out_once(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = [await tokens_of(decoded.answer) for decoded in begin(pair, "alone")]
        begun = begin(pair, "moved")
        pair.order(part)
        place = await pair.place(part)
        assert place.are_elsewhere
        assert place.error == f"{place.part.what} are at d1"
        pair.order(0)
        place = await pair.place(0)
        assert (place.are_elsewhere, place.error) == (False, "")
        assert pair.owner.decode.moves.num_moves == {"moved": 1, "refused": 1, "back": 1}
        assert [await tokens_of(decoded.answer) for decoded in begun] == expected
