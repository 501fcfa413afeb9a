"""Corrections of predictions near an SLO."""

import pytest

from conductor.view.corrections import (
    MEMORY_S,
    MOST_TBT,
    MOST_TTFT,
    TBTCorrection,
    TTFTCorrection,
)
from conductor.view.placement import Prediction

NOW_S = 100.0
QUEUED = Prediction(queue_s=9.0, transfer_s=0.5, prefill_s=0.5, gap_s=0.1)
SLO_S = 11.0


def learned(*ttfts_s: float, ttft_slo_s: float | None = SLO_S) -> float:
    correction = TTFTCorrection()
    for ttft_s in ttfts_s:
        correction.learn(QUEUED, 0.0, ttft_s, ttft_slo_s, NOW_S)
    return correction.factor(SLO_S if ttft_slo_s is None else ttft_slo_s, NOW_S)


def test_all_but_one_of_twenty_come_in_time_with_it() -> None:
    assert learned(*[10.0 + nth / 10 for nth in range(1, 21)]) == pytest.approx(1.19)


def test_a_first_token_before_its_prediction_changes_nothing() -> None:
    assert learned(*[6.0] * 20) == 1.0


def test_the_first_late_token_counts_at_once_and_the_factor_is_bounded() -> None:
    assert learned(12.0) == pytest.approx(1.2)
    assert learned(100.0) == MOST_TTFT


@pytest.mark.parametrize("ttft_slo_s", [None, 20.0])
def test_a_prediction_that_is_not_near_its_slo_teaches_nothing(ttft_slo_s: float | None) -> None:
    assert learned(*[13.0] * 20, ttft_slo_s=ttft_slo_s) == 1.0


def test_a_request_that_was_let_in_beyond_its_slo_teaches_nothing() -> None:
    assert learned(*[13.0] * 20, ttft_slo_s=9.9) == 1.0


def test_near_the_limit_is_what_would_be_with_the_allowance() -> None:
    correction = TTFTCorrection()
    correction.learn(QUEUED, 0.0, 14.0, 14.0, NOW_S)
    correction.learn(QUEUED._replace(queue_s=6.5), 0.0, 11.25, 14.0, NOW_S)
    assert correction.factor(14.0, NOW_S) == pytest.approx(1.5), "7.5 s count 1.4 times, which is 75% of 14 s"


def test_the_delay_by_prompts_that_went_first_is_no_error() -> None:
    correction = TTFTCorrection()
    for _ in range(20):
        correction.learn(QUEUED, 2.0, 12.0, SLO_S, NOW_S)
    assert correction.factor(SLO_S, NOW_S) == 1.0


def test_what_was_learned_in_an_overload_that_is_over_is_forgotten() -> None:
    correction = TTFTCorrection()
    for at_s in range(20):
        correction.learn(QUEUED, 0.0, 13.0, SLO_S, at_s)
    assert correction.factor(SLO_S, MEMORY_S + 19.0) == pytest.approx(1.3), "one is left"
    assert correction.factor(SLO_S, MEMORY_S + 19.5) == 1.0


def test_each_slo_has_a_limit_of_its_own() -> None:
    correction = TTFTCorrection()
    strict = Prediction(queue_s=0.04, transfer_s=0.0, prefill_s=0.005, gap_s=0.1)
    correction.learn(strict, 0.0, 0.5, 0.05, NOW_S)
    assert correction.factor(0.05, NOW_S) == MOST_TTFT
    assert correction.factor(SLO_S, NOW_S) == 1.0
    correction.learn(QUEUED, 0.0, 12.0, SLO_S, NOW_S)
    assert correction.factor(0.05, NOW_S) == MOST_TTFT
    assert correction.factor(SLO_S, NOW_S) == pytest.approx(1.2)


def test_only_so_many_slos_are_remembered() -> None:
    correction = TTFTCorrection()
    slos_s = [10.5 + nth / 1000 for nth in range(101)]
    for slo_s in slos_s:
        correction.learn(QUEUED, 0.0, 12.0, slo_s, NOW_S)
    assert correction.factor(slos_s[0], NOW_S) == 1.0, "of all the one that learned first"
    assert correction.factor(slos_s[1], NOW_S) == pytest.approx(1.2)


CONSTANT_S, BATCH_S = 0.09, 0.01


def corrected(*excesses: float, now_s: float = NOW_S) -> float:
    """What a batch of `BATCH_S` counts for, after reports that batches add so much more than predicted."""
    correction = TBTCorrection()
    for excess in excesses:
        correction.learn(CONSTANT_S + BATCH_S, CONSTANT_S + (1 + excess) * BATCH_S, CONSTANT_S, NOW_S)
    return correction.corrected_s(CONSTANT_S + BATCH_S, CONSTANT_S, now_s) - CONSTANT_S


def test_a_reported_tbt_corrects_what_the_batch_adds_and_no_empty_iteration() -> None:
    assert corrected(0.2) == pytest.approx(1.2 * BATCH_S)
    assert corrected() == pytest.approx(BATCH_S)


def test_one_report_among_many_does_not_decide() -> None:
    assert corrected(*[0.05] * 19, 0.4) == pytest.approx(1.05 * BATCH_S)
    assert corrected(*[0.05] * 16, *[0.4] * 4) == pytest.approx(1.4 * BATCH_S)


def test_a_reported_tbt_is_forgotten() -> None:
    assert corrected(0.2, now_s=NOW_S + MEMORY_S) == pytest.approx(1.2 * BATCH_S)
    assert corrected(0.2, now_s=NOW_S + MEMORY_S + 0.1) == pytest.approx(BATCH_S)


def test_a_reported_tbt_is_bounded_and_never_below_the_prediction() -> None:
    assert corrected(-0.5) == pytest.approx(BATCH_S)
    assert corrected(9.0) == pytest.approx(MOST_TBT * BATCH_S)


def test_a_prediction_without_a_batch_is_not_corrected() -> None:
    correction = TBTCorrection()
    correction.learn(CONSTANT_S, 2 * CONSTANT_S, CONSTANT_S, NOW_S)
    assert correction.corrected_s(CONSTANT_S + BATCH_S, CONSTANT_S, NOW_S) == pytest.approx(
        CONSTANT_S + BATCH_S
    )
