"""Migrations between tensor-parallel groups: what one rank lacks none has."""

import pytest
import transformers

from mooncake.messages.migration import PreCopied, Prepared
from mooncake.messages.requests import SamplingParams
from mooncake.messages.workers import WorkFailed
from tests.tiny_models import tiny_model
from tests.workers.decode.test_runner import more_tokens
from tests.workers.decode_lab import Decoded, DecodeLab, Move, StartDecodeLab
from tests.workers.mini_cluster import Sizes, tokens_of
from tests.workers.references import Reference, prompt_of

pytestmark = pytest.mark.cluster
GROUPS = Sizes(num_decode=2, num_ranks=2)
NUM_TOKENS = 300
"""So many that no answer ends before its move, on a busy machine either."""


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """A model whose KV heads cannot be shared out evenly."""
    return tiny_model("smollm2", num_key_value_heads=3, num_hidden_layers=2)


async def moving(lab: DecodeLab) -> tuple[Decoded, Move]:
    sampling = SamplingParams(NUM_TOKENS, temperature=0)
    decoded = lab.begin("moving", prompt_of(1, 45), sampling, lab.decodes[0])
    await more_tokens(decoded.answer)
    return decoded, Move(lab, decoded, lab.decodes[1])


async def ends(lab: DecodeLab, decoded: Decoded, reference: Reference) -> None:
    assert await tokens_of(decoded.answer) == reference(prompt_of(1, 45), NUM_TOKENS)
    await lab.assert_nothing_is_held()


async def test_a_request_moves_from_one_group_to_another(
    start_decode_lab: StartDecodeLab, reference: Reference
) -> None:
    async with start_decode_lab(GROUPS) as lab:
        decoded, move = await moving(lab)
        prepared = await move.run(num_rounds=2)
        assert prepared is not None
        assert prepared.num_tokens >= 48
        await ends(lab, decoded, reference)


@pytest.mark.parametrize("rank", [0, 1])
async def test_blocks_of_which_one_rank_lacks_its_part_are_computed(
    start_decode_lab: StartDecodeLab, reference: Reference, rank: int
) -> None:
    async with start_decode_lab(GROUPS) as lab:
        decoded, move = await moving(lab)
        assert isinstance(await move.pre_copy(), PreCopied)
        keys = decoded.request.continued(move.output, 8).block_keys
        await lab.decodes[0].pools[rank].drop_idle(keys[3:])
        assert await move.prepare() == Prepared(move.ref, 24)
        assert await move.finish()
        await ends(lab, decoded, reference)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_request_stays_if_one_rank_has_no_room(
    start_decode_lab: StartDecodeLab, reference: Reference, rank: int
) -> None:
    async with start_decode_lab(GROUPS) as lab:
        decoded, move = await moving(lab)
        pool = lab.decodes[1].pools[rank]
        taken = await pool.reserve([], pool.num_pages - 2)
        assert isinstance(await move.pre_copy(), PreCopied)
        answer = await move.prepare()
        assert isinstance(answer, WorkFailed)
        assert "no room" in answer.reason
        await pool.release(taken.reservation_id)
        await ends(lab, decoded, reference)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_source_one_of_whose_ranks_has_no_room_goes_on(
    start_decode_lab: StartDecodeLab, reference: Reference, rank: int
) -> None:
    async with start_decode_lab(GROUPS) as lab:
        decoded, move = await moving(lab)
        pool = lab.decodes[0].pools[rank]
        taken = await pool.reserve([], pool.num_pages - (await pool.stats()).num_used)
        assert isinstance(await move.pre_copy(), PreCopied)
        await pool.release(taken.reservation_id)
        await ends(lab, decoded, reference)
