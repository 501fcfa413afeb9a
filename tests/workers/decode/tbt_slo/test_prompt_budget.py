"""The token budget of iterations that carry prompts (Sarathi-Serve, section 4.3)."""

import pytest

from workers.decode.tbt_slo.prompt_budget import ChunkLimits, PromptBudget, divide_budget, prompt_budget
from workers.decode.tbt_slo.tbt import IterationPredictors

LIMITS = ChunkLimits(least=16, mixed=100, most=512)


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
    ],
)
def test_the_budget_fills_the_time_that_the_target_leaves(
    iteration_s: float | None, token_s: float | None, target_s: float, expected: int
) -> None:
    assert prompt_budget(LIMITS, iteration_s, token_s, target_s) == pytest.approx(expected, abs=1)


def test_no_budget_exceeds_a_prefill_pass() -> None:
    limits = ChunkLimits(least=16, mixed=100, most=8)
    assert prompt_budget(limits, 0.02, 0.001, 0.1) == 8
    assert prompt_budget(limits, None, None, 0.1) == 8


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
    predictors = IterationPredictors()
    if token_s is not None:
        predictors.prompt_cost.observe(100, 100 * token_s)
    budget = PromptBudget(predictors, LIMITS)
    num_tokens = budget.num_tokens(num_decoded, 10 * num_decoded, None, decodes=bool(num_decoded))
    assert num_tokens == pytest.approx(expected, abs=1)


def test_the_first_prompt_gets_what_it_can_use_and_the_next_what_is_left() -> None:
    assert divide_budget(100, [30, 200, 10]) == [30, 70, 0]
    assert divide_budget(100, [30, 20, 10]) == [30, 20, 10]
    assert divide_budget(100, []) == []
