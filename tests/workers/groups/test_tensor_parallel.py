"""Instances of several ranks: tokens and pages are those of one, and what goes wrong in one rank leaves
nothing behind in any."""

import asyncio
import random

import pytest
import transformers

from mooncake.messages.requests import SamplingParams
from tests.kvstore.nodes import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.workers.gate import Gate
from tests.workers.mini_cluster import Sizes, StartCluster, tokens_of
from tests.workers.prefill.test_faults import gone
from tests.workers.prefill_lab import Setting, StartLab
from tests.workers.references import Reference, prompt_of
from workers.groups.stage_messages import Begin, End, Recount
from workers.process.rank_runner import RankRunner

pytestmark = pytest.mark.cluster
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """Its KV heads cannot be shared out evenly."""
    return tiny_model("smollm2", num_key_value_heads=3, num_hidden_layers=2)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(num_ranks=2),
        Sizes(num_ranks=3, num_device_pages=10),
        Sizes(num_ranks=2, num_device_pages=10, num_pool_pages=10),
        Sizes(num_ranks=2, inline=True),
    ],
    ids=["alike", "three ranks", "little room", "inlined"],
)
async def test_tokens_are_those_of_one_rank(
    start_cluster: StartCluster, reference: Reference, sizes: Sizes
) -> None:
    prompts = [prompt_of(length, length) for length in (1, 8, 33, 47)]
    expected = [reference(prompt, GREEDY.max_tokens) for prompt in prompts]
    async with start_cluster(sizes) as cluster:
        for attempt in ("fresh", "cached"):
            answers = [cluster.submit(f"{attempt}-{i}", p, GREEDY) for i, p in enumerate(prompts)]
            assert [await tokens_of(answer) for answer in answers] == expected
        await cluster.assert_nothing_is_held()


async def test_requests_that_are_cancelled_at_any_moment_leave_nothing_in_any_rank(
    start_cluster: StartCluster, reference: Reference
) -> None:
    rng = random.Random(3)
    sizes = Sizes(num_ranks=2, num_device_pages=16, num_pool_pages=20)
    async with start_cluster(sizes) as cluster:
        for number in range(16):
            cluster.submit(f"r{number}", prompt_of(number % 5, rng.randrange(1, 60)), GREEDY)
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            cluster.cancel(f"r{rng.randrange(number + 1)}")
        await cluster.assert_nothing_is_held()
        prompt = prompt_of(9, 20)
        answer = cluster.submit("last", prompt, GREEDY)
        assert await tokens_of(answer) == reference(prompt, GREEDY.max_tokens)
        await cluster.assert_nothing_is_held()


@pytest.mark.parametrize("rank", [0, 1])
async def test_aborted_prompt_leaves_all_ranks_at_the_same_layer(start_lab: StartLab, rank: int) -> None:
    gate = Gate(store=0)
    async with (
        start_lab(num_ranks=2) as lab,
        lab.running(Setting(16, overlap=False, make_copies=gate.make, stage=rank)),
    ):
        receiving = await lab.order(prompt_of(1, 300))
        await gate.reached()  # that rank is in the middle of its first pass
        lab.jobs.cancel(receiving.ref)
        async with asyncio.timeout(DEADLINE_S):
            while not all(job.is_dropped for stage in lab.stages for job in stage.jobs.values()):
                await asyncio.sleep(0.001)  # each rank hears of it by itself
        assert lab.executor.kv.pages.num_free < lab.executor.kv.pages.num_pages
        gate.open()
        await gone(lab, receiving)
        assert lab.executor.kv.pages.num_free == lab.executor.kv.pages.num_pages
        assert gate.stored_layers == [0]
        assert not receiving.answered.done()
        await receiving.release()


async def test_prompt_that_ends_before_another_rank_has_begun_it_is_left_by_that_rank(
    start_lab: StartLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    obey = RankRunner.obey

    def begin_and_end(runner: RankRunner, message: Begin | Recount | End) -> None:
        obey(runner, message)
        if isinstance(message, Begin):
            obey(runner, End(message.job_id))

    monkeypatch.setattr(RankRunner, "obey", begin_and_end)
    async with start_lab(num_ranks=2) as lab, lab.running(Setting(16)):
        receiving = await lab.order(prompt_of(1, 16))
        async with asyncio.timeout(DEADLINE_S):
            while not any(job.left_by_ranks.is_set() for job in lab.stages[0].jobs.values()):
                await asyncio.sleep(0.001)
        lab.jobs.cancel(receiving.ref)
        await gone(lab, receiving)
        assert lab.executor.kv.pages.num_free == lab.executor.kv.pages.num_pages
        await receiving.release()


@pytest.mark.parametrize("rank", [0, 1])
async def test_device_pages_are_not_free_while_another_rank_stores_from_them(
    start_lab: StartLab, rank: int
) -> None:
    gate = Gate(store=1)
    async with (
        start_lab(num_ranks=2) as lab,
        lab.running(Setting(16, make_copies=gate.make, stage=rank)),
    ):
        receiving = await lab.order(prompt_of(1, 16))
        await gate.reached()
        lab.jobs.cancel(receiving.ref)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await gone(lab, receiving)
        assert lab.executor.kv.pages.num_free == lab.executor.kv.pages.num_pages - 2
        gate.open()
        await gone(lab, receiving)
        assert lab.executor.kv.pages.num_free == lab.executor.kv.pages.num_pages
        await receiving.release()
