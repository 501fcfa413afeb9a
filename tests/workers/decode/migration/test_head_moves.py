"""KV heads that go to a helper and come back while requests run: every answer is that of heads that stay."""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

from mooncake.messages.migration import HeadsPlace, LayerRange, PlaceHeads
from mooncake.messages.requests import SamplingParams
from tests.kvstore.nodes import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import IM_END_ID
from tests.workers.decode_lab import Decoded, DecodeLab, StartDecodeLab, decode_lab
from tests.workers.mini_cluster import FINGERPRINT, InstanceUnderTest, Sizes, tokens_of
from tests.workers.references import prompt_of
from tests.workers.test_grammars import GRAMMAR
from workers.heads.helper_link import HelperLink
from workers.heads.hosting import HeadsHost
from workers.heads.link_messages import LINK_VERSION, HostHeads

pytestmark = pytest.mark.cluster
WISHES = (
    SamplingParams(70, temperature=0),
    SamplingParams(60, temperature=1.1, top_p=0.95, seed=4),
    SamplingParams(50, temperature=0.9, seed=5, repetition_penalty=1.2),
    SamplingParams(60, temperature=1.5, seed=3, stop_token_ids=(IM_END_ID,), grammar=GRAMMAR),
)
NUM_PAGES = 48
SIZES = Sizes(num_decode=2, num_device_pages=NUM_PAGES, num_pool_pages=160)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """A model that the CPU's own kernels compute, with sliding windows in some layers, and 4 KV heads."""
    return tiny_model(
        "qwen2_window",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_hidden_layers=3,
    )


@pytest.fixture
def start_decode_lab(model: transformers.PreTrainedModel, tmp_path: Path) -> StartDecodeLab:
    return functools.partial(decode_lab, model, tmp_path)


Part = int | LayerRange
"""Some layers, or so many KV heads; 0: nothing."""
PARTS = pytest.mark.parametrize("part", [1, LayerRange(1, 3)], ids=["heads", "layers"])


def _fields(part: Part) -> tuple[int, LayerRange | None]:
    return (part, None) if isinstance(part, int) else (0, part)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass(slots=True, eq=False)
class Pair:
    """The first decode instance of a lab, and the second one as its helper."""

    lab: DecodeLab
    path: str
    numbers: "itertools.count[int]"
    host: HeadsHost
    hosting: "asyncio.Task[None]"

    @property
    def owner(self) -> InstanceUnderTest:
        return self.lab.decodes[0]

    @property
    def helper(self) -> InstanceUnderTest:
        return self.lab.decodes[1]

    def order(self, part: Part) -> int:
        number = next(self.numbers)
        order = PlaceHeads(1, number, "d1", self.path, *_fields(part))
        self.owner.decode.place_heads(order)
        return number

    async def place(self, part: Part) -> HeadsPlace:
        """Order, and wait for the end of the move."""
        number = self.order(part)
        await until(lambda: self._place.number == number and not self._place.is_moving)
        return self._place

    async def move(self, part: Part) -> None:
        place = await self.place(part)
        assert (place.error, place.num_heads, place.layers) == ("", *_fields(part))

    async def lose_helper(self) -> None:
        """As if its process ended."""
        self.hosting.cancel()
        await asyncio.wait([self.hosting])

    @property
    def _place(self) -> HeadsPlace:
        return self.owner.decode.heads


def hosting(instance: InstanceUnderTest, path: str) -> HeadsHost:
    return HeadsHost("d1", path, FINGERPRINT, instance.executor.model, instance.executor.kv)


@contextlib.asynccontextmanager
async def paired(start: StartDecodeLab, folder: Path, sizes: Sizes = SIZES) -> AsyncIterator[Pair]:
    async with start(sizes=sizes) as lab:
        path = str(folder / "heads.sock")
        host = hosting(lab.decodes[1], path)
        task = lab.group.create_task(host.run())
        pair = Pair(lab, path, itertools.count(1), host, task)
        await until(Path(path).exists)
        yield pair
        task.cancel()
        await lab.assert_nothing_is_held()


async def answers(pair: Pair, name: str, num: int) -> list[list[int]]:
    """Those of several requests at once, most of which are computed here from their prompts on."""
    begun = [begin(pair, name, index) for index in range(num)]
    return [await tokens_of(decoded.answer) for decoded in begun]


def begin(pair: Pair, name: str, index: int) -> Decoded:
    prompt, sampling = prompt_of(index, 3 + 11 * index % 70), WISHES[index % len(WISHES)]
    return pair.lab.begin(f"{name}-{index}", prompt, sampling, pair.owner, inline=index % 3 != 2)


@pytest.mark.parametrize(
    "parts",
    [(1, 0, 2, 0, 1, 0), (LayerRange(1, 3), 0, LayerRange(0, 1), 0, LayerRange(1, 2), 0)],
    ids=["heads", "layers"],
)
@pytest.mark.parametrize(
    "sizes", [SIZES, Sizes(num_decode=2, num_device_pages=24, num_pool_pages=60, max_batch=4)], ids=str
)
async def test_answers_are_those_of_heads_that_stay(
    start_decode_lab: StartDecodeLab, tmp_path: Path, sizes: Sizes, parts: Sequence[Part]
) -> None:
    async with paired(start_decode_lab, tmp_path, sizes) as pair:
        expected = await answers(pair, "stays", 8)
        running = asyncio.create_task(answers(pair, "moves", 8))
        for part in parts:
            await pair.move(part)
            assert pair.host.num_hosted == ({"d0": _fields(part)[0]} if part else {})
        assert await running == expected
        await pair.move(parts[0])
        assert await answers(pair, "comes", 8) == expected
        await pair.move(0)
        assert await answers(pair, "back", 8) == expected


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
        assert owner.num_usable_pages == NUM_PAGES * 4 // 3
        assert owner.layer(0).nbytes == bytes_before
        assert helper.num_free_pages == helper.num_usable_pages == NUM_PAGES - NUM_PAGES // 3
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
        assert owner.num_usable_pages == helper.num_free_pages == NUM_PAGES


@PARTS
async def test_heads_come_back_although_their_pages_are_needed(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        sampling = SamplingParams(130, temperature=0)

        def begin_all(name: str) -> list[Decoded]:
            return [
                pair.lab.begin(f"{name}{index}", prompt_of(index, 8), sampling, pair.owner)
                for index in range(7)
            ]

        expected = [await tokens_of(decoded.answer) for decoded in begin_all("stays")]
        await pair.move(part)
        begun = begin_all("moved")
        kv = pair.owner.executor.kv
        await until(lambda: bool(kv.used_pages(NUM_PAGES)) or begun[-1].answer.ended.is_set())
        assert kv.used_pages(NUM_PAGES)
        await pair.move(0)
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
        await until(lambda: not pair.owner.decode.heads.are_elsewhere)
        what = "layers 1:3" if part != 1 else "1 of the KV heads"
        assert pair.owner.decode.heads.error == f"d1 is lost, and {what} are here again"
        assert await running == expected
        place = await pair.place(part)
        assert "the helper does not answer" in place.error
        assert pair.helper.executor.kv.num_usable_pages == NUM_PAGES


@PARTS
async def test_a_lost_helper_costs_no_answer_whose_pages_were_beyond_the_owners_own(
    start_decode_lab: StartDecodeLab, tmp_path: Path, part: Part
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        sampling = SamplingParams(130, temperature=0)

        def begin_all(name: str) -> list[Decoded]:
            return [
                pair.lab.begin(f"{name}{index}", prompt_of(index, 8), sampling, pair.owner)
                for index in range(7)
            ]

        expected = [await tokens_of(decoded.answer) for decoded in begin_all("stays")]
        await pair.move(part)
        begun = begin_all("moved")
        kv = pair.owner.executor.kv
        await until(lambda: bool(kv.used_pages(NUM_PAGES)) or begun[-1].answer.ended.is_set())
        assert kv.used_pages(NUM_PAGES)
        await pair.lose_helper()
        assert [await tokens_of(decoded.answer) for decoded in begun] == expected
        await until(lambda: not pair.owner.decode.heads.is_moving)
        assert kv.num_usable_pages == NUM_PAGES


async def test_an_owner_that_ends_leaves_nothing_behind(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        request = HostHeads(LINK_VERSION, "d9", FINGERPRINT, 1, None, NUM_PAGES, NUM_PAGES, 16, 8)
        executor = pair.owner.executor
        link = await HelperLink.connect(
            pair.path, request, executor.model, executor.kv, DEADLINE_S, lambda: None
        )
        assert pair.host.num_hosted == {"d9": 1}
        assert pair.helper.executor.kv.num_usable_pages == NUM_PAGES * 3 // 4
        link.close()  # as the system does at the end of a process
        await until(lambda: not pair.host.num_hosted)
        assert pair.helper.executor.kv.num_free_pages == NUM_PAGES


async def test_a_helper_without_room_says_the_sum(start_decode_lab: StartDecodeLab, tmp_path: Path) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        place = await pair.place(3)
        assert (place.error, place.num_heads) == ("", 3)  # 36 of 48 pages: a quarter stays free
        await pair.move(0)
        taken = pair.helper.executor.kv.allocate(1)
        place = await pair.place(3)
        assert place.error == (
            "d1 has no room: 3 of the KV heads in 48 pages take 36 of its pages, and it can lend 35 "
            "(47 of 48 are free, 12 stay free for its requests)"
        )
        assert place.num_heads == 0
        pair.helper.executor.kv.free(taken)
        await pair.move(1)
        assert (await pair.place(2)).error == "1 of the KV heads are at d1"
