"""Prefill instances of one part, several stages or several ranks, of which one part alone differs."""

import asyncio

import pytest
import transformers

from mooncake.errors import TransferError
from mooncake.messages.workers import Prefilled, WorkFailed
from tests.tiny_models import tiny_model
from tests.workers.gate import Gate
from tests.workers.prefill.test_equality import assert_equal
from tests.workers.prefill.test_faults import answers_of, gone
from tests.workers.prefill_lab import BLOCK_SIZE, Setting, StartLab
from tests.workers.references import prompt_of

pytestmark = pytest.mark.cluster
ONE, STAGES, RANKS = {"num_stages": 1}, {"num_stages": 3}, {"num_ranks": 2}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """Two ranks cannot share its KV heads out evenly."""
    return tiny_model("smollm2", num_key_value_heads=3)


@pytest.mark.parametrize(("parts", "part"), [(ONE, 0), (STAGES, 1), (STAGES, 2), (RANKS, 0), (RANKS, 1)])
async def test_damaged_block_in_one_part_fails_the_attempt_and_is_dropped_there(
    start_lab: StartLab, parts: dict[str, int], part: int
) -> None:
    prompt = prompt_of(4, 5 * BLOCK_SIZE + 3)
    async with start_lab(**parts) as lab:
        plain = lab.plain(prompt)
        keys = lab.keys_of(prompt)
        lab.put_local(keys, plain.blocks[:5])
        damaged = lab.parts[part]
        reservation = await damaged.client.reserve(keys, 0)
        last_layer = damaged.layout.num_layers - 1
        damaged.client.segment.layer_view(reservation.blocks[2].page, last_layer)[5] ^= 1
        await damaged.client.release(reservation.reservation_id)
        async with lab.running(Setting()):
            receiving = await lab.order(prompt)
            (failure,) = await answers_of(lab, receiving)
            assert isinstance(failure, WorkFailed)
            assert failure.retryable
            assert "damaged" in failure.reason
            await receiving.release()
        with lab.client(damaged.node) as pool:
            assert pool.prefix_len(keys) == 2
        (again,) = await lab.results(Setting(), [prompt])
        assert again.num_cached_tokens == 2 * BLOCK_SIZE  # what the worst part has
        assert_equal(again, plain, 2, same_arithmetic=False)


@pytest.mark.parametrize(("parts", "part"), [(STAGES, 1), (STAGES, 2), (RANKS, 1)])
async def test_kvcache_that_does_not_leave_one_part_fails_the_attempt_when_the_first_has_sent_its_own(
    start_lab: StartLab, parts: dict[str, int], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_lab(**parts) as lab, lab.running(Setting()):
        first, late = lab.parts[0].client, lab.parts[part].client
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


@pytest.mark.parametrize("parts", [STAGES, {"num_ranks": 3}])
async def test_parts_that_hold_different_prefixes_reuse_what_all_have(
    start_lab: StartLab, parts: dict[str, int]
) -> None:
    prompt = prompt_of(5, 6 * BLOCK_SIZE)
    async with start_lab(**parts) as lab:
        plain = lab.plain(prompt)
        keys = lab.keys_of(prompt)
        for counts in ((6, 3, 5), (0, 6, 6), (2, 6, 1), (6, 6, 6)):
            lab.clear(*lab.prefill_nodes)
            for part, count in zip(lab.parts, counts, strict=True):
                if count:
                    lab.put(part.node, keys[:count], plain.blocks[:count])
            (result,) = await lab.results(Setting(16), [prompt])
            assert result.num_cached_tokens == min(min(counts) * BLOCK_SIZE, len(prompt) - 1)
            assert_equal(result, plain, min(counts), same_arithmetic=False)


@pytest.mark.parametrize(("parts", "overlap"), [(ONE, True), (RANKS, False)])
async def test_others_of_a_pass_go_on_when_one_is_aborted(
    start_lab: StartLab, parts: dict[str, int], overlap: bool
) -> None:
    prompts, gate = [prompt_of(seed, 20) for seed in range(3)], Gate(store=1 if overlap else 0)
    async with start_lab(**parts) as lab:
        plain = [lab.plain(prompt) for prompt in prompts]
        last_part = len(lab.parts) - 1
        async with lab.running(Setting(make_copies=gate.make, overlap=overlap, stage=last_part)):
            ordered = [await lab.order(prompt) for prompt in prompts]
            await gate.reached()
            lab.jobs.cancel(ordered[1].ref)
            gate.open()
            for index in (0, 2):
                assert_equal(await ordered[index].result(), plain[index], 0, same_arithmetic=False)
            await gone(lab, ordered[1])
            assert not ordered[1].answered.done()
            await ordered[1].release()
