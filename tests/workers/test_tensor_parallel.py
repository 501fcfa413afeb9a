"""Instances of several ranks: tokens and pages are those of one, and what goes wrong in one rank leaves
nothing behind in any."""

import asyncio
import random
from pathlib import Path

import pytest
import transformers

from mooncake.errors import TransferError
from mooncake.messages.requests import SamplingParams
from mooncake.messages.workers import Prefilled, WorkFailed
from tests.kvstore.nodes import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.workers.gate import Gate
from tests.workers.mini_cluster import Sizes, mini_cluster
from tests.workers.prefill_lab import BLOCK_SIZE, Setting, prefill_lab
from tests.workers.test_prefill_equality import assert_equal, prompt_of
from tests.workers.test_prefill_faults import answers_of, gone
from tests.workers.test_runners import reference, tokens_of

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
        Sizes(num_ranks=2, inline_prefill_tokens=20),
    ],
    ids=["alike", "three ranks", "little room", "inlined"],
)
async def test_tokens_are_those_of_one_rank(
    model: transformers.PreTrainedModel, tmp_path: Path, sizes: Sizes
) -> None:
    prompts = [prompt_of(length, length) for length in (1, 8, 33, 47)]
    expected = [reference(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    async with mini_cluster(model, tmp_path, sizes) as cluster:
        for attempt in ("fresh", "cached"):
            answers = [cluster.submit(f"{attempt}-{i}", p, GREEDY) for i, p in enumerate(prompts)]
            assert [await tokens_of(answer) for answer in answers] == expected
        await cluster.assert_nothing_is_held()


async def test_requests_that_are_cancelled_at_any_moment_leave_nothing_in_any_rank(
    model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    rng = random.Random(3)
    sizes = Sizes(num_ranks=2, num_device_pages=16, num_pool_pages=20)
    async with mini_cluster(model, tmp_path, sizes) as cluster:
        for number in range(16):
            cluster.submit(f"r{number}", prompt_of(number % 5, rng.randrange(1, 60)), GREEDY)
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            cluster.cancel(f"r{rng.randrange(number + 1)}")
        await cluster.assert_nothing_is_held()
        prompt = prompt_of(9, 20)
        answer = cluster.submit("last", prompt, GREEDY)
        assert await tokens_of(answer) == reference(model, prompt, GREEDY.max_tokens)
        await cluster.assert_nothing_is_held()


@pytest.mark.parametrize("rank", [0, 1])
async def test_aborted_prompt_leaves_all_ranks_at_the_same_layer(
    model: transformers.PreTrainedModel, tmp_path: Path, rank: int
) -> None:
    gate = Gate(store=0)
    async with (
        prefill_lab(model, tmp_path, num_ranks=2) as lab,
        lab.running(Setting(16, overlap=False, make_copies=gate.make, stage=rank)),
    ):
        receiving = await lab.order(prompt_of(1, 300))
        await gate.reached()  # that rank is in the middle of its first pass
        lab.jobs.cancel(receiving.ref)
        async with asyncio.timeout(DEADLINE_S):
            while not all(job.is_dropped for stage in lab.stages for job in stage.jobs.values()):
                await asyncio.sleep(0.001)  # each rank hears of it by itself
        assert lab.executor.kv.num_free_pages < lab.executor.kv.num_pages
        gate.open()
        await gone(lab, receiving)
        assert lab.executor.kv.num_free_pages == lab.executor.kv.num_pages
        assert gate.stored_layers == [0]
        assert not receiving.answered.done()
        await receiving.release()


@pytest.mark.parametrize("rank", [0, 1])
async def test_device_pages_are_not_free_while_another_rank_stores_from_them(
    model: transformers.PreTrainedModel, tmp_path: Path, rank: int
) -> None:
    gate = Gate(store=1)
    async with (
        prefill_lab(model, tmp_path, num_ranks=2) as lab,
        lab.running(Setting(16, make_copies=gate.make, stage=rank)),
    ):
        receiving = await lab.order(prompt_of(1, 16))
        await gate.reached()
        lab.jobs.cancel(receiving.ref)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await gone(lab, receiving)
        assert lab.executor.kv.num_free_pages == lab.executor.kv.num_pages - 2
        gate.open()
        await gone(lab, receiving)
        assert lab.executor.kv.num_free_pages == lab.executor.kv.num_pages
        await receiving.release()


@pytest.mark.parametrize("rank", [0, 1])
async def test_damaged_block_in_one_rank_fails_the_attempt_and_is_dropped_there(
    model: transformers.PreTrainedModel, tmp_path: Path, rank: int
) -> None:
    prompt = prompt_of(4, 5 * BLOCK_SIZE + 3)
    async with prefill_lab(model, tmp_path, num_ranks=2) as lab:
        plain = lab.plain(prompt)
        keys = lab.keys_of(prompt)
        lab.put_local(keys, plain.blocks[:5])
        client = lab.parts[rank].client
        reservation = await client.reserve(keys, 0)
        client.segment.layer_view(reservation.blocks[2].page, 1)[5] ^= 1
        await client.release(reservation.reservation_id)
        async with lab.running(Setting()):
            receiving = await lab.order(prompt)
            (failure,) = await answers_of(lab, receiving)
            assert isinstance(failure, WorkFailed)
            assert "damaged" in failure.reason
            await receiving.release()
        (again,) = await lab.results(Setting(), [prompt])
        assert again.num_cached_tokens == 2 * BLOCK_SIZE  # what that rank has
        assert_equal(again, plain, 2, same_arithmetic=False)


async def test_ranks_that_hold_different_prefixes_reuse_what_all_have(
    model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    prompt = prompt_of(5, 6 * BLOCK_SIZE)
    async with prefill_lab(model, tmp_path, num_ranks=3) as lab:
        plain = lab.plain(prompt)
        keys = lab.keys_of(prompt)
        for counts in ((6, 3, 5), (0, 6, 6), (2, 6, 1)):
            lab.clear(*lab.prefill_nodes)
            for part, count in zip(lab.parts, counts, strict=True):
                if count:
                    lab.put(part.node, keys[:count], plain.blocks[:count])
            (result,) = await lab.results(Setting(16), [prompt])
            assert result.num_cached_tokens == min(counts) * BLOCK_SIZE
            assert_equal(result, plain, min(counts), same_arithmetic=False)


async def test_kvcache_that_does_not_leave_one_rank_fails_the_attempt(
    model: transformers.PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with prefill_lab(model, tmp_path, num_ranks=2) as lab, lab.running(Setting()):
        first, late = lab.parts[0].client, lab.parts[1].client
        first_has_sent, wait_sent = asyncio.Event(), first.wait_sent

        async def sends(reservation_id: int) -> None:
            await wait_sent(reservation_id)
            first_has_sent.set()

        async def does_not_send(reservation_id: int) -> None:
            await first_has_sent.wait()
            raise TransferError("the way is cut")

        monkeypatch.setattr(first, "wait_sent", sends)
        monkeypatch.setattr(late, "wait_sent", does_not_send)
        receiving = await lab.order(prompt_of(1, 3 * BLOCK_SIZE))
        prefilled, failure = await answers_of(lab, receiving)
        assert isinstance(prefilled, Prefilled)
        assert failure == WorkFailed(receiving.ref, "the way is cut", retryable=True)
        await receiving.release()


async def test_others_of_a_pass_go_on_when_one_is_aborted(
    model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    prompts, gate = [prompt_of(seed, 20) for seed in range(3)], Gate(store=0)
    async with prefill_lab(model, tmp_path, num_ranks=2) as lab:
        plain = [lab.plain(prompt) for prompt in prompts]
        async with lab.running(Setting(make_copies=gate.make, overlap=False, stage=1)):
            ordered = [await lab.order(prompt) for prompt in prompts]
            await gate.reached()
            lab.jobs.cancel(ordered[1].ref)
            gate.open()
            for index in (0, 2):
                assert_equal(await ordered[index].result(), plain[index], 0, same_arithmetic=False)
            async with asyncio.timeout(DEADLINE_S):
                await gone(lab, ordered[1])
            await ordered[1].release()
