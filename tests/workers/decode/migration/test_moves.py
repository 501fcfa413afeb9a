"""Running requests that move from one instance to another, with real messengers: the same tokens."""

import pytest

from mooncake.messages.requests import SamplingParams
from tests.workers.decode.test_runner import more_tokens
from tests.workers.decode_lab import Move, StartDecodeLab
from tests.workers.mini_cluster import tokens_of
from tests.workers.references import Reference, prompt_of

pytestmark = pytest.mark.cluster


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0)


async def test_a_request_goes_on_elsewhere(start_decode_lab: StartDecodeLab, reference: Reference) -> None:
    prompt = prompt_of(1, 45)
    async with start_decode_lab() as lab:
        moving = lab.begin("r", prompt, greedy(200), lab.decodes[0])
        await more_tokens(moving.answer)
        move = Move(lab, moving, lab.decodes[1])
        prepared = await move.run()
        assert prepared is not None
        assert prepared.num_tokens >= 48
        assert await tokens_of(moving.answer) == reference(prompt, 200)
        await lab.assert_nothing_is_held()
