"""The mean time of a token in passes, and its use."""

import pytest

from tests.workers.prefill_lab import BLOCK_SIZE, Setting, StartLab
from tests.workers.references import prompt_of
from workers.kvcache.prefix_fetch import PrefixFetch
from workers.prefill.pass_pace import PassPace


def test_pace_is_the_mean_of_all_tokens() -> None:
    pace = PassPace()
    assert pace.seconds_per_token == 0.0
    pace.note(100, 1.0)
    pace.note(300, 5.0)
    assert pace.seconds_per_token == pytest.approx(6.0 / 400)


@pytest.mark.cluster
async def test_a_fetch_is_told_how_long_the_pass_computes_that_waits_for_it(
    start_lab: StartLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, begun = list[float](), PrefixFetch.begun

    async def noted(fetch: PrefixFetch, compute_s: float = 0.0) -> None:
        told.append(compute_s)
        await begun(fetch, compute_s)

    monkeypatch.setattr(PrefixFetch, "begun", noted)
    prompts = [prompt_of(seed, 8 * BLOCK_SIZE) for seed in (1, 2)]
    async with start_lab("tcp") as lab:
        node, holder = await lab.holder("tcp")
        for prompt in prompts:
            lab.put(node, lab.keys_of(prompt)[:5], lab.plain(prompt).blocks[:5])
        async with lab.running(Setting()):
            for prompt in prompts:
                await (await lab.order(prompt, lab.source(holder.address, 5))).result()
        await holder.close()
    assert told[0] == 0.0 < told[1]
