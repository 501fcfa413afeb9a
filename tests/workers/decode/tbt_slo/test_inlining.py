"""The rule for the chunks of prompts that iterations carry (Sarathi-Serve, section 4.3)."""

import msgspec
import pytest

from mooncake.messages.costs import TBT_SLO_SHARE, prefill_quantities
from mooncake.messages.requests import Ref, Request, SamplingParams
from workers.decode.sequence import Sequence
from workers.decode.tbt_slo.inlining import PromptChunks
from workers.decode.tbt_slo.prompt_budget import ChunkLimits, PromptBudget
from workers.decode.tbt_slo.tbt import MIN_ITERATIONS, IterationPredictors

LIMITS = ChunkLimits(least=16, mixed=100, most=512)
SLO_S = 0.1 / TBT_SLO_SHARE
"""TBT SLO that leaves 0.1 s for an iteration"""


def sequence(number: int, num_tokens: int, *, tbt_slo_s: float | None = None, drawn: int = 0) -> Sequence:
    request = Request(str(number), [1] * num_tokens, [], SamplingParams(9), "front")
    tokens = [1] * (num_tokens + drawn)
    return Sequence(number, Ref(1, str(number), 1), request, tokens, is_inlined=True, tbt_slo_s=tbt_slo_s)


def planned(predictors: IterationPredictors, *ready: Sequence) -> dict[int, int]:
    """Numbers of sequences and their tokens in the next iteration."""
    chunks = PromptChunks(PromptBudget(predictors, LIMITS)).plan(list(ready), list(ready))
    return {chunk.sequence.number: chunk.num_tokens for chunk in chunks}


def learned(iteration_s: float, token_s: float) -> IterationPredictors:
    predictors = IterationPredictors()
    for _ in range(20):
        predictors.tbt.observe(1, 31, iteration_s)
    predictors.prompt_cost.observe(100, 5000, 100 * token_s)
    return predictors


def test_prompts_alone_share_a_whole_prefill_pass() -> None:
    prompts = sequence(0, 500), sequence(1, 500), sequence(2, 5)
    assert planned(learned(0.02, 0.0001), *prompts) == {0: 500, 1: 12}


def test_prompts_alone_leave_time_for_a_sequence_that_comes_meanwhile() -> None:
    prompts = sequence(0, 90, tbt_slo_s=SLO_S), sequence(1, 500, tbt_slo_s=2 * SLO_S)
    assert planned(learned(0.02, 0.001), *prompts) == {0: 90, 1: pytest.approx(10, abs=1)}


def test_the_less_sure_predictions_are_the_shorter_are_iterations() -> None:
    prompt, decoded = sequence(0, 500), sequence(1, 30, drawn=1, tbt_slo_s=0.3)
    predictors = learned(0.02, 0.001)
    assert planned(predictors, prompt, decoded)[0] == pytest.approx(TBT_SLO_SHARE * 300 - 20, abs=1)
    for seconds in [0.15, 0.05] * 30:
        predictors.error.observe(0.1, seconds)
    assert planned(predictors, prompt, decoded)[0] == pytest.approx(0.5 * 300 - 20, abs=1)


def test_with_an_slo_the_first_iterations_show_what_decoding_takes() -> None:
    prompt, decoded, other = (
        sequence(0, 500),
        sequence(1, 30, drawn=1, tbt_slo_s=SLO_S),
        sequence(2, 30, drawn=1),
    )
    predictors = IterationPredictors()
    predictors.prompt_cost.observe(100, 5000, 0.1)
    for _ in range(MIN_ITERATIONS):
        assert planned(predictors, prompt, decoded) == {1: 1}
        assert planned(predictors, prompt, other) == {0: 100, 2: 1}
        assert planned(predictors, prompt) == {0: pytest.approx(250, abs=1)}
        predictors.tbt.observe(1, 31, 0.02)
    assert planned(predictors, prompt, decoded) == {0: pytest.approx(80, abs=1), 1: 1}


def test_a_suspect_progresses_while_nothing_is_known_of_decoding() -> None:
    suspect, decoded = sequence(0, 500), sequence(1, 30, drawn=1, tbt_slo_s=SLO_S)
    suspect.must_be_alone = True
    assert planned(IterationPredictors(), suspect, decoded) == {0: LIMITS.least}


def test_the_strictest_slo_of_those_that_are_decoded_counts() -> None:
    prompt = sequence(0, 500, tbt_slo_s=1e-9)
    loose, strict = (sequence(1, 30, drawn=1, tbt_slo_s=2 * SLO_S), sequence(2, 30, drawn=1, tbt_slo_s=SLO_S))
    predictors = learned(0.02, 0.001)
    assert planned(predictors, prompt, loose)[0] == pytest.approx(180, abs=1)
    assert planned(predictors, prompt, loose, strict)[0] == pytest.approx(80, abs=1)
    assert planned(predictors, prompt, sequence(3, 30, drawn=1)) == {0: 100, 3: 1}
    assert planned(predictors, loose, strict) == {1: 1, 2: 1}


def test_a_chunk_begins_behind_the_one_in_flight() -> None:
    prompt = sequence(0, 600)
    prompt.in_flight_until = 512
    assert planned(IterationPredictors(), prompt) == {0: 88}
    prompt.in_flight_until = 600
    prompt.tbt_slo_s = SLO_S
    other = sequence(1, 600)
    assert planned(learned(0.02, 0.001), prompt, other) == {0: 1, 1: pytest.approx(80, abs=1)}, "0 is decoded"


def by_position() -> IterationPredictors:
    """Predictors of prompt tokens that take 1 ms at position 0 and 2 ms at position 1,000."""
    predictors = IterationPredictors()
    for start in list(range(0, 5000, 1000)) * 10:
        num_tokens, num_pairs = prefill_quantities(100, start)
        predictors.prompt_cost.observe(100, num_pairs, 0.001 * num_tokens + 0.000_001 * num_pairs)
    return predictors


def test_a_chunk_is_the_smaller_the_more_tokens_are_before_it() -> None:
    prompt = sequence(0, 7000)
    assert planned(by_position(), prompt) == {0: pytest.approx(224, abs=2)}
    prompt.num_cached_tokens, prompt.num_computed_tokens = 1000, 2000
    assert planned(by_position(), prompt) == {0: pytest.approx(62, abs=1)}
    prompt.in_flight_until = 6000
    assert planned(by_position(), prompt) == {0: pytest.approx(35, abs=1)}


def test_prompts_share_the_time_of_an_iteration_each_at_its_own_position() -> None:
    first, second = sequence(0, 100), sequence(1, 7000)
    second.num_computed_tokens = 3000
    assert planned(by_position(), first, second) == {0: 100, 1: pytest.approx(36, abs=1)}
    taken_over = moved(2, 3060, 3000)
    assert planned(by_position(), sequence(0, 7000), taken_over) == {0: pytest.approx(8, abs=2), 2: 60}, (
        "a moved request's tokens take most of the time"
    )


def test_no_chunk_of_a_suspect_is_shared() -> None:
    predictors, decoding = learned(0.02, 0.001), sequence(0, 30, drawn=1, tbt_slo_s=SLO_S)
    suspect, prompt = sequence(1, 600), sequence(2, 600)
    suspect.must_be_alone = True
    assert planned(predictors, decoding, suspect, prompt) == {1: pytest.approx(80, abs=1)}, (
        "others wait for it"
    )
    suspect.in_flight_until = 80
    assert planned(predictors, decoding, suspect, prompt) == {0: 1, 2: pytest.approx(80, abs=1)}


# -- requests that have moved here ------------------------------------------------------------------


def moved(number: int, num_tokens: int, num_loaded: int, *, tbt_slo_s: float | None = None) -> Sequence:
    taken_over = sequence(number, num_tokens, tbt_slo_s=tbt_slo_s)
    taken_over.is_inlined, taken_over.num_cached_tokens = False, num_loaded
    return taken_over


def test_what_a_moved_request_lacks_is_computed_at_once_and_before_prompts() -> None:
    prompt, decoded = sequence(0, 500), sequence(1, 30, drawn=1, tbt_slo_s=SLO_S)
    assert planned(learned(0.02, 0.001), prompt, decoded) == {0: 80, 1: 1}
    taken_over = moved(2, 500, 480)
    assert planned(learned(0.02, 0.001), prompt, decoded, taken_over) == {0: 60, 1: 1, 2: 20}
    assert planned(IterationPredictors(), decoded, taken_over) == {1: 1, 2: 20}, "nothing is known yet"
    assert planned(learned(1.0, 0.001), prompt, decoded, moved(3, 500, 450)) == {1: 1, 3: 50}


def test_a_moved_requests_slo_limits_prompts_beside_it() -> None:
    prompt, taken_over = sequence(0, 500), moved(1, 31, 30, tbt_slo_s=SLO_S)
    assert planned(learned(0.02, 0.001), prompt, taken_over) == {0: 79, 1: 1}


def test_what_does_not_fit_into_a_pass_takes_several() -> None:
    assert planned(learned(0.02, 0.001), moved(0, 600, 8), moved(1, 40, 8)) == {0: 512}


# -- several tenants --------------------------------------------------------------------------------


def of_tenant(tenant: str, number: int, num_tokens: int, priority: int = 0) -> Sequence:
    inlined = sequence(number, num_tokens)
    request = msgspec.structs.replace(
        inlined.request, tenant=tenant, answer_id=f"{tenant}-{number}", priority=priority
    )
    return Sequence(number, inlined.ref, request, inlined.tokens, is_inlined=True)


def iterated(chunks: PromptChunks, batch: list[Sequence]) -> dict[int, int]:
    """Numbers of sequences and their tokens in the next iteration, which is computed."""
    ready = [one for one in batch if one.num_tokens_to_plan]
    planned = chunks.plan(ready, ready)
    for chunk in planned:
        chunk.sequence.num_computed_tokens += chunk.num_tokens
    return {chunk.sequence.number: chunk.num_tokens for chunk in planned}


def new_chunks() -> PromptChunks:
    return PromptChunks(PromptBudget(IterationPredictors(), LIMITS))


def test_a_tenants_short_prompt_waits_for_no_long_ones_of_another_and_has_an_iteration_of_its_own() -> None:
    batch, chunks = [of_tenant("many", number, 5000) for number in range(4)], new_chunks()
    assert iterated(chunks, batch) == {0: LIMITS.most}
    batch.append(of_tenant("one", 4, 16))
    assert iterated(chunks, batch) == {4: 16}
    assert iterated(chunks, batch) == {0: LIMITS.most}


def test_a_tenants_short_prompt_has_an_iteration_without_many_short_ones_of_another() -> None:
    batch = [of_tenant("many", number, 16) for number in range(5)]
    batch.append(of_tenant("one", 5, 16))
    chunks = new_chunks()
    assert iterated(chunks, batch) == {5: 16}
    assert iterated(chunks, batch) == dict.fromkeys(range(5), 16)


def test_tenants_with_about_as_much_to_compute_share_iterations() -> None:
    batch = [of_tenant(f"{number}", number, 16 * (1 + number % 4)) for number in range(12)]
    assert len(iterated(new_chunks(), batch)) == 12


@pytest.mark.parametrize(("priority", "planned"), [(0, {5: 16, 6: 24}), (1, {5: 16})])
def test_a_short_prompt_behind_one_that_waits_goes_before_it_if_of_the_same_priority(
    priority: int, planned: dict[int, int]
) -> None:
    batch = [of_tenant("many", number, 16) for number in range(5)]
    batch += [of_tenant("one", 5, 16), of_tenant("behind", 6, 24, priority)]
    assert iterated(new_chunks(), batch) == planned


def test_tenants_with_long_prompts_have_equal_parts_of_the_iterations() -> None:
    batch, chunks = [of_tenant("many", number, 3000) for number in range(8)], new_chunks()
    batch.append(of_tenant("one", 8, 2500))
    num_iterations = 0
    while batch[-1].num_tokens_to_plan:
        iterated(chunks, batch)
        num_iterations += 1
    num_of_many = sum(one.num_computed_tokens for one in batch[:-1])
    assert num_of_many <= 3000, "the other one's would have ended first"
    assert num_iterations <= -(-(2500 + num_of_many) // LIMITS.most) + 1


def test_a_plan_that_is_taken_back_is_not_charged() -> None:
    batch, chunks = [of_tenant("a", 0, 3000), of_tenant("b", 1, 2900)], new_chunks()
    for _ in range(20):
        assert {chunk.sequence.number for chunk in chunks.plan(batch, batch)} == {1}


def test_a_short_prompt_goes_before_many_that_are_planned_and_have_not_begun() -> None:
    batch, chunks = [of_tenant("many", number, 16) for number in range(5)], new_chunks()
    assert len(chunks.plan(batch, batch)) == 5
    batch.append(of_tenant("one", 5, 16))
    assert iterated(chunks, batch) == {5: 16}
    assert iterated(chunks, batch) == dict.fromkeys(range(5), 16)


def test_a_tenant_with_ever_new_short_prompts_takes_turns_with_many_of_another() -> None:
    batch, chunks = [of_tenant("many", number, 100) for number in range(5)], new_chunks()
    num_of_one = 0
    while batch[0].num_tokens_to_plan:
        if not any(one.num_tokens_to_plan for one in batch[5:]):
            batch.append(of_tenant("one", len(batch), 16))
        num_of_one += sum(num for number, num in iterated(chunks, batch).items() if number >= 5)
    assert num_of_one <= LIMITS.mixed + 100 + 16, "many have waited for longer than the head start"


def test_prompts_of_a_lower_priority_number_go_before_those_of_other_tenants() -> None:
    batch = [of_tenant("first", 0, 700, priority=-1), of_tenant("second", 1, 16)]
    assert iterated(new_chunks(), batch) == {0: LIMITS.most}
