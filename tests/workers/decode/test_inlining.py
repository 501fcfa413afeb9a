"""The rule for prompts that are computed where they are decoded (Mooncake, section 5)."""

import pytest

from workers.decode.inlining import PromptCost, is_inlined


@pytest.mark.parametrize(
    ("num_tokens", "batch_s", "prompt_s", "tbt_slo_s", "expected"),
    [
        (100, 0.02, 0.07, 0.1, True),
        (100, 0.02, 0.09, 0.1, False),
        (101, 0.02, 0.07, 0.1, False),  # more than one pass
        (100, 0.02, 9.0, None, True),  # a token may take any time
        (100, None, 0.01, 0.1, False),  # nothing is known of the batch
        (100, 0.02, None, 0.1, False),  # nor of prompts
        (100, 0.0, None, 0.1, True),  # nobody is disturbed
    ],
)
def test_inlines_what_fits_into_one_pass_and_into_the_slo(
    num_tokens: int, batch_s: float | None, prompt_s: float | None, tbt_slo_s: float | None, expected: bool
) -> None:
    assert is_inlined(num_tokens, 100, batch_s, prompt_s, tbt_slo_s) is expected


def test_nothing_is_inlined_by_default() -> None:
    assert not is_inlined(1, 0, 0.0, 0.0, None)


def test_cost_of_a_prompt_follows_what_is_measured() -> None:
    cost = PromptCost()
    assert cost.predict_s(10) is None
    cost.observe(100, 0.2)
    assert cost.predict_s(10) == pytest.approx(0.02)
    for _ in range(100):
        cost.observe(50, 0.3)
    assert cost.predict_s(10) == pytest.approx(0.06, rel=0.01)
    cost.observe(50, -1.0)  # an iteration that was faster than predicted
    assert 0 < (cost.predict_s(10) or 0) < 0.06
