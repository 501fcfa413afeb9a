"""The token budget of iterations that carry prompts (Sarathi-Serve, section 4.3)."""

import pytest

from mooncake.messages.costs import TBT_SLO_SHARE, prefill_quantities
from workers.decode.tbt_slo.prompt_budget import Allowance, ChunkLimits, PromptBudget
from workers.decode.tbt_slo.tbt import MIN_ITERATIONS, IterationPredictors, PromptCost

LIMITS = ChunkLimits(least=16, mixed=100, most=512)
SLO_S = 0.1 / TBT_SLO_SHARE
"""TBT SLO that leaves 0.1 s for an iteration"""
MANY = 10_000


def learned(iteration_s: float | None, token_s: float | None) -> IterationPredictors:
    predictors = IterationPredictors()
    if iteration_s is not None:
        for _ in range(MIN_ITERATIONS):
            predictors.tbt.observe(1, 10, iteration_s)
    if token_s is not None:
        predictors.prompt_cost.observe(100, 5000, 100 * token_s)
    return predictors


@pytest.mark.parametrize(
    ("iteration_s", "token_s", "expected"),
    [
        (0.02, 0.001, 80),  # C* = (0.1 s - 0.02 s) / 0.001 s
        (0.06, 0.001, 40),
        (0.02, 0.0001, 512),  # never more than a prefill pass
        (0.02, 0.0, 512),
        (0.09, 0.001, 16),  # never less than a page
        (0.2, 0.001, 16),
        (0.2, 0.0, 16),
        (None, 0.001, 16),  # nothing is known of the batch
        (0.02, None, 16),  # nor of prompts
    ],
)
def test_the_budget_fills_the_time_that_the_target_leaves(
    iteration_s: float | None, token_s: float | None, expected: int
) -> None:
    allowance = PromptBudget(learned(iteration_s, token_s), LIMITS).allowance(1, 10, SLO_S, decodes=False)
    assert allowance.take(0, MANY) == pytest.approx(expected, abs=1)


def test_no_budget_exceeds_a_prefill_pass() -> None:
    limits = ChunkLimits(least=16, mixed=100, most=8)
    for predictors in (learned(0.02, 0.001), learned(None, None)):
        for slo_s in (SLO_S, None):
            allowance = PromptBudget(predictors, limits).allowance(1, 10, slo_s, decodes=False)
            assert allowance.take(0, MANY) == 8


def test_an_iteration_that_decodes_with_an_slo_has_no_prompt_before_decoding_is_learned() -> None:
    allowance = PromptBudget(learned(None, 0.001), LIMITS).allowance(1, 10, SLO_S, decodes=True)
    assert allowance.take(0, MANY) == 0


@pytest.mark.parametrize(
    ("token_s", "num_decoded", "expected"),
    [
        (None, 0, 512),  # nothing is known of prompts
        (None, 1, 100),
        (0.0001, 0, 512),
        (0.0001, 1, 100),
        (0.001, 0, 250),  # a quarter of a second
        (0.005, 1, 50),
        (0.1, 0, 16),  # never less than a page
    ],
)
def test_without_an_slo_a_prompt_that_comes_waits_for_a_quarter_of_a_second(
    token_s: float | None, num_decoded: int, expected: int
) -> None:
    budget = PromptBudget(learned(None, token_s), LIMITS)
    allowance = budget.allowance(num_decoded, 10 * num_decoded, None, decodes=bool(num_decoded))
    assert allowance.take(0, MANY) == pytest.approx(expected, abs=1)


# -- the division -----------------------------------------------------------------------------------


def taken(allowance: Allowance, *prompts: tuple[int, int]) -> list[int]:
    """The tokens of each prompt in an iteration: `prompts` have their starts, and the tokens left."""
    return [allowance.take(*prompt) for prompt in prompts]


def cost_by_position() -> PromptCost:
    """A token takes 1 ms at position 0, and 2 ms at position 1,000."""
    cost = PromptCost()
    for start in list(range(0, 5000, 1000)) * 10:
        num_tokens, num_pairs = prefill_quantities(100, start)
        cost.observe(100, num_pairs, 0.001 * num_tokens + 0.000_001 * num_pairs)
    return cost


def test_the_first_prompt_gets_what_it_can_use_and_the_next_what_is_left() -> None:
    def limited() -> Allowance:
        return Allowance(PromptCost(), 0.25, 100, 16)

    assert taken(limited(), (0, 30), (0, 200), (0, 10)) == [30, 70, 0]
    assert taken(limited(), (0, 30), (0, 20), (0, 10)) == [30, 20, 10]


def test_chunks_of_a_long_prompt_get_smaller_so_that_all_iterations_take_the_target() -> None:
    cost, start, sizes = cost_by_position(), 0, list[int]()
    while start < 4000:
        sizes.append(Allowance(cost, 0.25, 512, 16).take(start, MANY))
        predicted_s = cost.predict_s(*prefill_quantities(sizes[-1], start))
        assert predicted_s == pytest.approx(0.25, abs=0.006), "up to a token"
        start += sizes[-1]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(224, abs=3)
    assert sizes[-1] == pytest.approx(50, abs=3)


def test_prompts_at_different_positions_share_the_seconds() -> None:
    def quarter() -> Allowance:
        return Allowance(cost_by_position(), 0.25, 512, 16)

    assert taken(quarter(), (0, 100), (3000, MANY)) == [100, pytest.approx(35, abs=1)]
    assert taken(quarter(), (3000, 35), (0, MANY)) == [35, pytest.approx(103, abs=2)]
    assert taken(quarter(), (3000, MANY), (0, MANY)) == [pytest.approx(62, abs=1), pytest.approx(2, abs=2)]


def test_the_least_number_of_tokens_is_shared_too() -> None:
    allowance = Allowance(cost_by_position(), 0.0, 512, 16)
    assert taken(allowance, (3000, 10), (0, MANY), (0, MANY)) == [10, 6, 0]


def test_what_is_spent_before_the_prompts_counts_at_its_position() -> None:
    allowance = Allowance(cost_by_position(), 0.25, 512, 16)
    allowance.spend(3000, 35)
    assert allowance.take(0, MANY) == pytest.approx(103, abs=2)
    allowance.spend(0, 1000)
    assert allowance.take(0, MANY) == 0
