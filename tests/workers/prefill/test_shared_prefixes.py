"""A burst with one new prefix: it is computed once, whatever becomes of the prompt that computes it."""

import asyncio
from pathlib import Path

import pytest
import transformers

from mooncake.messages.pools import COMPUTED, Tier
from mooncake.messages.workers import WorkFailed
from tests.kvstore.nodes import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.workers.gate import Gate
from tests.workers.prefill.test_equality import assert_equal
from tests.workers.prefill.test_faults import FailingStore, answers_of, gone
from tests.workers.prefill_lab import BLOCK_SIZE, Lab, Setting, StartLab, prefill_lab
from tests.workers.references import prompt_of

pytestmark = pytest.mark.cluster

NUM_SHARED, CHUNK = 160, 64
BURST = [prompt_of(1, NUM_SHARED) + prompt_of(seed, 20 + seed) for seed in range(2, 5)]
NUM_OWN = [len(prompt) - NUM_SHARED for prompt in BURST]


class GateOfPass(Gate):
    """Stops before the first store of pass `number`, counted from 1, and of no other."""

    def __init__(self, number: int) -> None:
        super().__init__(store=0)
        self._num_left = number

    def _pass(self, is_closed: bool) -> None:
        self._num_left -= is_closed
        super()._pass(is_closed and not self._num_left)


async def until_stored(lab: Lab, num_blocks: int) -> None:
    """The prefill instance's pool has so many blocks of the burst's prefix."""

    def num_held() -> int:
        with lab.client(lab.prefill_node) as pool:
            return pool.prefix_len(lab.keys_of(BURST[0]))

    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(num_held) < num_blocks:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("chunk", [CHUNK, 1000])
async def test_new_prefix_of_a_burst_is_computed_once(
    model: transformers.PreTrainedModel, tmp_path: Path, num_stages: int, num_ranks: int, chunk: int
) -> None:
    if num_ranks > 1:  # two cannot share three KV heads out evenly
        model = tiny_model("smollm2", num_key_value_heads=3, num_hidden_layers=2)
    async with prefill_lab(model, tmp_path, num_stages=num_stages, num_ranks=num_ranks) as lab:
        plain = [lab.plain(prompt) for prompt in BURST]
        async with lab.running(Setting(chunk)) as runner:
            ordered = [await lab.order(prompt) for prompt in BURST]
            results = [await receiving.result() for receiving in ordered]
        assert runner.num_tokens[COMPUTED] == NUM_SHARED + sum(NUM_OWN)
        assert runner.num_tokens[Tier.DRAM.value] == NUM_SHARED * (len(BURST) - 1)
        for result, expected in zip(results, plain, strict=True):
            assert_equal(result, expected, 0, same_arithmetic=False)


async def test_prompt_goes_on_behind_the_blocks_of_one_that_is_aborted(start_lab: StartLab) -> None:
    gate = GateOfPass(3)
    async with start_lab() as lab:
        plain = lab.plain(BURST[1])
        async with lab.running(Setting(CHUNK, make_copies=gate.make)):
            aborted, waiting = [await lab.order(prompt) for prompt in BURST[:2]]
            await gate.reached()
            await until_stored(lab, 2 * CHUNK // BLOCK_SIZE)
            assert [job.reservation is None for job in lab.stages[0].jobs.values()] == [False, True]
            lab.jobs.cancel(aborted.ref)
            gate.open()
            result = await waiting.result()
            assert 2 * CHUNK <= result.num_cached_tokens <= NUM_SHARED
            assert_equal(result, plain, 0, same_arithmetic=False)
            await gone(lab, aborted)
            await aborted.release()


async def test_prompt_that_waits_can_be_aborted(start_lab: StartLab) -> None:
    gate = GateOfPass(2)
    async with start_lab() as lab:
        plain = [lab.plain(prompt) for prompt in BURST]
        async with lab.running(Setting(CHUNK, make_copies=gate.make)):
            first, aborted, last = [await lab.order(prompt) for prompt in BURST]
            await gate.reached()
            lab.jobs.cancel(aborted.ref)
            await gone(lab, aborted)
            await aborted.release()
            gate.open()
            assert_equal(await first.result(), plain[0], 0, same_arithmetic=False)
            result = await last.result()
            assert result.num_cached_tokens == NUM_SHARED
            assert_equal(result, plain[2], 0, same_arithmetic=False)


async def test_prompt_computes_what_one_before_it_could_not_store(start_lab: StartLab) -> None:
    failing = FailingStore(layer=1)
    async with start_lab() as lab:
        plain = lab.plain(BURST[1])
        async with lab.running(Setting(CHUNK, make_copies=failing.make)):
            failed, other = [await lab.order(prompt) for prompt in BURST[:2]]
            (failure,) = await answers_of(lab, failed)
            assert isinstance(failure, WorkFailed)
            assert_equal(await other.result(), plain, 0, same_arithmetic=False)
            await failed.release()


async def test_prompt_without_the_prefix_does_not_wait_with_the_burst(start_lab: StartLab) -> None:
    gate, prompt = GateOfPass(2), prompt_of(9, 24)
    async with start_lab() as lab, lab.running(Setting(CHUNK, make_copies=gate.make)):
        first, waiting = [await lab.order(prompt, tenant="busy") for prompt in BURST[:2]]
        await gate.reached()
        other = await lab.order(prompt, tenant="other")
        async with asyncio.timeout(DEADLINE_S):
            while other.ref.request_id not in {
                job.order.ref.request_id for job in lab.stages[0].jobs.values() if job.device_pages
            }:
                await asyncio.sleep(0.001)
        gate.open()
        for receiving in (first, waiting, other):
            await receiving.result()
