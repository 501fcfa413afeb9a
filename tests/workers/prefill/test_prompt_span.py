"""What the span of a prompt tells of its way."""

import asyncio

import pytest

from tests.workers.prefill_lab import BLOCK_SIZE, Setting, StartLab
from tests.workers.recorded_spans import errors, steps, total
from tests.workers.references import prompt_of

pytestmark = pytest.mark.cluster
NUM_TOKENS, NUM_BLOCKS = 90, 12


async def test_a_prompt_is_told_with_its_passes_and_bytes(start_lab: StartLab) -> None:
    async with start_lab() as lab:
        await lab.results(Setting(prefill_chunk=40), [prompt_of(1, NUM_TOKENS)])
        span = lab.spans.of("p", "r1")
        assert steps(span) == ["queue", "reserve", "pass", "pass", "pass", "store", "send"]
        passes = [part.attributes for part in span.parts if part.name == "prefill.pass"]
        assert [(one["mooncake.start"], one["mooncake.tokens"]) for one in passes] == [
            (0, 40),
            (40, 40),
            (80, 10),
        ]
        num_bytes = NUM_BLOCKS * lab.layout.block_bytes
        assert total(span, "pass", "stored_bytes") == total(span, "send", "bytes") == num_bytes
        assert total(span, "pass", "loaded_bytes") == 0
        assert [event.name for event in span.events] == ["first token"]
        assert (
            span.attributes.items()
            >= {"mooncake.prompt_tokens": NUM_TOKENS, "mooncake.cached_tokens": 0}.items()
        )
        assert span.error == ""


async def test_a_fetched_prefix_is_told_with_its_source(start_lab: StartLab) -> None:
    num_fetched = 5
    async with start_lab() as lab:
        prompt = prompt_of(1, NUM_TOKENS)
        node, holder = await lab.holder("auto")
        lab.put(node, lab.keys_of(prompt)[:num_fetched], lab.plain(prompt).blocks[:num_fetched])
        await lab.results(Setting(), [prompt], lab.source(holder.address, num_fetched))
        span = lab.spans.of("p", "r1")
        [fetch] = [part for part in span.parts if part.name == "prefill.fetch"]
        num_bytes = num_fetched * lab.layout.block_bytes
        assert fetch.attributes == {
            "mooncake.prefix_source": "h",
            "mooncake.asked_blocks": num_fetched,
            "mooncake.bytes": num_bytes,
        }
        assert total(span, "pass", "loaded_bytes") == num_bytes
        assert total(span, "pass", "tokens") == NUM_TOKENS - num_fetched * BLOCK_SIZE
        assert span.attributes["mooncake.cached_tokens"] == num_fetched * BLOCK_SIZE


async def test_an_aborted_prompt_is_told_as_such(start_lab: StartLab) -> None:
    async with start_lab() as lab, lab.running(Setting()):
        taken = lab.executor.kv.pages.allocate(lab.executor.kv.pages.num_free)
        receiving = await lab.order(prompt_of(1, NUM_TOKENS))
        while lab.runner.num_prompts < 1:
            await asyncio.sleep(0)
        lab.jobs.cancel(receiving.ref)
        while lab.runner.num_prompts:
            await asyncio.sleep(0)
        lab.executor.kv.pages.free(taken)
        await receiving.release()
        span = lab.spans.of("p", "r1")
        assert steps(span) == ["queue", "reserve"]
        assert errors(span) == {"reserve": "aborted"}
        assert span.error == "aborted"


async def test_each_stage_has_a_span(start_lab: StartLab) -> None:
    async with start_lab(num_stages=2) as lab:
        await lab.results(Setting(prefill_chunk=60), [prompt_of(1, NUM_TOKENS)])
        first, second = (lab.spans.of(part, "r1") for part in ("p.0", "p.1"))
        assert steps(first) == ["queue", "reserve", "pass", "pass", "store", "send"]
        assert steps(second) == ["pass", "pass", "store", "send"]
        sent = [total(span, "send", "bytes") for span in (first, second)]
        assert sum(sent) == NUM_BLOCKS * lab.layout.block_bytes
