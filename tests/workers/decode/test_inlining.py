"""The rule for the chunks of prompts that iterations carry (Sarathi-Serve, section 4.3)."""

import pytest

from mooncake.messages.costs import TBT_SLO_SHARE
from mooncake.messages.requests import Ref, Request, SamplingParams
from workers.decode.inlining import ChunkLimits, PromptChunks, divide_budget, prompt_budget
from workers.decode.meter import DecodeMeter
from workers.decode.sequence import Sequence
from workers.decode.tbt import MIN_ITERATIONS

LIMITS = ChunkLimits(least=16, mixed=100, most=512)
SLO_S = 0.1 / TBT_SLO_SHARE
"""TBT SLO that leaves 0.1 s for an iteration"""


@pytest.mark.parametrize(
    ("iteration_s", "token_s", "target_s", "expected"),
    [
        (0.02, 0.001, 0.1, 80),  # C* = (0.1 s - 0.02 s) / 0.001 s
        (0.06, 0.001, 0.1, 40),
        (0.02, 0.0001, 0.1, 512),  # never more than a prefill pass
        (0.02, 0.0, 0.1, 512),
        (0.09, 0.001, 0.1, 16),  # never less than a page
        (0.2, 0.001, 0.1, 16),
        (0.2, 0.0, 0.1, 16),
        (None, 0.001, 0.1, 16),  # nothing is known of the batch
        (0.02, None, 0.1, 16),  # nor of prompts
        (0.02, 0.001, None, 100),  # a token may take any time
        (None, None, None, 100),
    ],
)
def test_the_budget_fills_the_time_that_the_target_leaves(
    iteration_s: float | None, token_s: float | None, target_s: float | None, expected: int
) -> None:
    assert prompt_budget(LIMITS, iteration_s, token_s, target_s) == pytest.approx(expected, abs=1)


def test_no_budget_exceeds_a_prefill_pass() -> None:
    limits = ChunkLimits(least=16, mixed=100, most=8)
    assert prompt_budget(limits, 0.02, 0.001, 0.1) == 8
    assert prompt_budget(limits, None, None, 0.1) == 8
    assert prompt_budget(limits, None, None, None) == 8


def test_the_first_prompt_gets_what_it_can_use_and_the_next_what_is_left() -> None:
    assert divide_budget(100, [30, 200, 10]) == [30, 70, 0]
    assert divide_budget(100, [30, 20, 10]) == [30, 20, 10]
    assert divide_budget(100, []) == []


def sequence(number: int, num_tokens: int, *, tbt_slo_s: float | None = None, drawn: int = 0) -> Sequence:
    request = Request(str(number), [1] * num_tokens, [], SamplingParams(9), "front")
    tokens = [1] * (num_tokens + drawn)
    return Sequence(number, Ref(1, str(number), 1), request, tokens, is_inlined=True, tbt_slo_s=tbt_slo_s)


def planned(meter: DecodeMeter, *ready: Sequence) -> dict[int, int]:
    """Numbers of sequences and their tokens in the next iteration."""
    chunks = PromptChunks(meter, LIMITS).plan(list(ready))
    return {chunk.sequence.number: chunk.num_tokens for chunk in chunks}


def meter_of(iteration_s: float, token_s: float) -> DecodeMeter:
    meter = DecodeMeter()
    for _ in range(20):
        meter.tbt.observe(1, 31, iteration_s)
    meter.prompt_cost.observe(100, 100 * token_s)
    return meter


def test_prompts_alone_share_a_whole_prefill_pass() -> None:
    prompts = sequence(0, 500), sequence(1, 500), sequence(2, 5)
    assert planned(meter_of(0.02, 0.001), *prompts) == {0: 500, 1: 12}


def test_prompts_alone_leave_time_for_a_sequence_that_comes_meanwhile() -> None:
    prompts = sequence(0, 90, tbt_slo_s=SLO_S), sequence(1, 500, tbt_slo_s=2 * SLO_S)
    assert planned(meter_of(0.02, 0.001), *prompts) == {0: 90, 1: pytest.approx(10, abs=1)}


def test_the_less_sure_predictions_are_the_shorter_are_iterations() -> None:
    prompt, decoded = sequence(0, 500), sequence(1, 30, drawn=1, tbt_slo_s=0.3)
    meter = meter_of(0.02, 0.001)
    assert planned(meter, prompt, decoded)[0] == pytest.approx(TBT_SLO_SHARE * 300 - 20, abs=1)
    for seconds in [0.15, 0.05] * 30:
        meter.error.observe(0.1, seconds)
    assert planned(meter, prompt, decoded)[0] == pytest.approx(0.5 * 300 - 20, abs=1)


def test_with_an_slo_the_first_iterations_show_what_decoding_takes() -> None:
    prompt, decoded, other = (
        sequence(0, 500),
        sequence(1, 30, drawn=1, tbt_slo_s=SLO_S),
        sequence(2, 30, drawn=1),
    )
    meter = DecodeMeter()
    meter.prompt_cost.observe(100, 0.1)
    for _ in range(MIN_ITERATIONS):
        assert planned(meter, prompt, decoded) == {1: 1}
        assert planned(meter, prompt, other) == {0: 100, 2: 1}
        assert planned(meter, prompt) == {0: 500}
        meter.tbt.observe(1, 31, 0.02)
    assert planned(meter, prompt, decoded) == {0: pytest.approx(80, abs=1), 1: 1}


def test_a_suspect_progresses_while_nothing_is_known_of_decoding() -> None:
    suspect, decoded = sequence(0, 500), sequence(1, 30, drawn=1, tbt_slo_s=SLO_S)
    suspect.must_be_alone = True
    assert planned(DecodeMeter(), suspect, decoded) == {0: LIMITS.least}


def test_the_strictest_slo_of_those_that_are_decoded_counts() -> None:
    prompt = sequence(0, 500, tbt_slo_s=1e-9)
    loose, strict = (sequence(1, 30, drawn=1, tbt_slo_s=2 * SLO_S), sequence(2, 30, drawn=1, tbt_slo_s=SLO_S))
    meter = meter_of(0.02, 0.001)
    assert planned(meter, prompt, loose)[0] == pytest.approx(180, abs=1)
    assert planned(meter, prompt, loose, strict)[0] == pytest.approx(80, abs=1)
    assert planned(meter, prompt, sequence(3, 30, drawn=1)) == {0: 100, 3: 1}
    assert planned(meter, loose, strict) == {1: 1, 2: 1}


def test_a_chunk_begins_behind_the_one_in_flight() -> None:
    prompt = sequence(0, 600)
    prompt.in_flight_until = 512
    assert planned(DecodeMeter(), prompt) == {0: 88}
    prompt.in_flight_until = 600
    prompt.tbt_slo_s = SLO_S
    other = sequence(1, 600)
    assert planned(meter_of(0.02, 0.001), prompt, other) == {0: 1, 1: pytest.approx(80, abs=1)}, (
        "0 is decoded"
    )


def test_no_chunk_of_a_suspect_is_shared() -> None:
    meter, decoding = meter_of(0.02, 0.001), sequence(0, 30, drawn=1, tbt_slo_s=SLO_S)
    suspect, prompt = sequence(1, 600), sequence(2, 600)
    suspect.must_be_alone = True
    assert planned(meter, decoding, suspect, prompt) == {1: pytest.approx(80, abs=1)}, "others wait for it"
    suspect.in_flight_until = 80
    assert planned(meter, decoding, suspect, prompt) == {0: 1, 2: pytest.approx(80, abs=1)}
