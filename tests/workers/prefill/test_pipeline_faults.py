"""Pipelines of stages in which something goes wrong in one of them: nothing hangs, nothing is kept."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.kvstore.nodes import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.workers.gate import Gate
from tests.workers.prefill.test_equality import assert_equal
from tests.workers.prefill.test_faults import gone
from tests.workers.prefill_lab import BLOCK_SIZE, Lab, Setting, StartLab, prefill_lab
from tests.workers.references import prompt_of

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_aborted_prompt_leaves_every_stage_at_once(start_lab: StartLab, stage: int) -> None:
    layer = (0, 1, 3)[stage]
    gate = Gate(store=layer)
    chunk, num_passes_under_way = 16, 3
    async with (
        start_lab(num_stages=3) as lab,
        lab.running(Setting(chunk, overlap=False, make_copies=gate.make, stage=stage)),
    ):
        computed, prompt = lab.computed_layers(), prompt_of(1, 300)
        receiving = await lab.order(prompt)
        await gate.reached()  # that stage is in the middle of its first pass
        lab.jobs.cancel(receiving.ref)
        async with asyncio.timeout(DEADLINE_S):
            while not all(job.is_dropped for part in lab.stages for job in part.jobs.values()):
                await asyncio.sleep(0.001)  # how long they hear of it while others compute is not bounded
        gate.open()
        await gone(lab, receiving)
        for part in lab.parts:
            async with asyncio.timeout(DEADLINE_S):
                while part.executor.kv.pages.num_free < part.executor.kv.pages.num_pages:
                    await asyncio.sleep(0.001)
        assert len(prompt) > 4 * num_passes_under_way * chunk
        assert len(computed) <= num_passes_under_way * lab.layout.num_layers
        assert not receiving.answered.done()
        await receiving.release()


@pytest.mark.parametrize("num_stages", [1, 2], ids=["one worker", "a pipeline"])
async def test_aborted_prompt_of_8k_tokens_is_gone_within_100_ms_of_the_next_layer(
    tmp_path: Path, num_stages: int
) -> None:
    """With all pages of devices and pools. Seconds are those that this process computes: the machine may be
    busy; one of a few abortions must be quick."""
    model = tiny_model("smollm2", max_position_embeddings=8192)
    num_pages, gate = 8192 // BLOCK_SIZE, Gate(store=0 if num_stages == 1 else 2)

    async def abort(lab: Lab, prompt: list[int]) -> float:
        gate.close()
        receiving = await lab.order(prompt)
        await gate.reached()  # in the middle of a pass, behind a layer
        held = [part.executor.kv.pages.num_pages - part.executor.kv.pages.num_free for part in lab.parts]
        assert held == [num_pages] * num_stages
        lab.jobs.cancel(receiving.ref)
        await asyncio.sleep(0)
        gate.open()
        opened_s = time.process_time()
        await gone(lab, receiving)
        for part in lab.parts:
            while part.executor.kv.pages.num_free < num_pages or (await part.client.stats()).num_used:
                await asyncio.sleep(0.001)
        gone_s = time.process_time() - opened_s
        await receiving.release()
        return gone_s

    async with (
        prefill_lab(
            model,
            tmp_path,
            num_pages=num_pages,
            num_stages=num_stages,
            num_device_pages=num_pages,
        ) as lab,
        lab.running(Setting(128, overlap=False, make_copies=gate.make, stage=num_stages - 1)),
    ):
        prompt = prompt_of(1, 8192)
        times_s = [await abort(lab, prompt)]
        while min(times_s) >= 0.1:
            assert len(times_s) < 5, times_s
            times_s.append(await abort(lab, prompt))


async def test_many_prompts_in_little_memory_wait_for_one_another_and_do_not_lock_up(
    start_lab: StartLab,
) -> None:
    rng = random.Random(7)
    prompts = [prompt_of(seed, rng.randrange(1, 70)) for seed in range(24)]
    async with start_lab(num_pages=14, num_stages=3) as lab:
        plain = [lab.plain(prompt) for prompt in prompts]
        for part in lab.parts:  # so little memory on the devices too
            part.executor.kv.pages.allocate(part.executor.kv.pages.num_free - 14)
        lab.num_taken_pages = lab.executor.kv.pages.num_pages - 14
        async with lab.running(Setting(24)):
            for start in range(0, len(prompts), 6):  # the decode side has not room for more
                ordered = [await lab.order(prompt) for prompt in prompts[start : start + 6]]
                if start == 6:
                    lab.jobs.cancel(ordered[2].ref)
                    await gone(lab, ordered[2])
                    await ordered[2].release()
                for index, receiving in enumerate(ordered):
                    if not (start == 6 and index == 2):
                        alone = plain[start + index]
                        assert_equal(await receiving.result(), alone, 0, same_arithmetic=False)
