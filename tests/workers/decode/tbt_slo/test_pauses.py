"""The rule for a batch that leaves its cores to prompts which are prefilled on them."""

import pytest

from mooncake.messages.costs import TBT_SLO_SHARE
from mooncake.messages.requests import Ref, Request, SamplingParams
from tests.workers.planned import decoded
from workers.decode.batching.iterations import PlannedChunk
from workers.decode.sequence import Sequence
from workers.decode.tbt_slo.pauses import MAX_PAUSE_S, DecodePauses, pause_s
from workers.decode.tbt_slo.tbt import IterationPredictors

MAX_BATCH = 8


def sequence(tbt_slo_s: float | None = None) -> Sequence:
    request = Request("r", [1], [], SamplingParams(9), "front")
    return Sequence(0, Ref(1, "r", 1), request, [1, 2], tbt_slo_s=tbt_slo_s)


def learned(iteration_s: float) -> IterationPredictors:
    predictors = IterationPredictors()
    for _ in range(20):
        predictors.tbt.observe(1, 2, iteration_s)
    return predictors


@pytest.mark.parametrize(
    ("num_decoded", "num_prefilled", "iteration_s", "tbt_slo_s", "expected_s"),
    [
        (8, 16, 0.02, None, 0.02),  # it computes half of the time
        (4, 16, 0.02, None, 0.06),  # a quarter
        (4, 16, 0.02, 0.2, 0.06),
        (4, 4, 0.02, None, 0.0),
        (4, 1, 0.02, None, 0.0),
        (4, 0, 0.02, None, 0.0),
        (4, 16, None, None, 0.0),  # nothing is known of the batch
        (1, 100, 0.02, None, MAX_PAUSE_S),
        (1, 100, 0.02, 0.05, TBT_SLO_SHARE * 0.05 - 0.02),
        (1, 100, 0.02, 0.02, 0.0),  # it is too slow as it is
    ],
)
def test_fewer_than_are_prefilled_compute_for_their_share_of_the_time(
    num_decoded: int,
    num_prefilled: int,
    iteration_s: float | None,
    tbt_slo_s: float | None,
    expected_s: float,
) -> None:
    assert pause_s(num_decoded, num_prefilled, iteration_s, tbt_slo_s) == pytest.approx(expected_s)


def test_a_pause_ends_in_time_whatever_happens_meanwhile() -> None:
    way, alone = DecodePauses(learned(0.02), MAX_BATCH), decoded(sequence())
    way.ended(100.0)
    with way.prefill(shares_cores=True), way.prefill(shares_cores=True):
        with way.prefill(shares_cores=True), way.prefill(shares_cores=False):
            assert way.remaining_s(alone, 90.0, is_running=True) == pytest.approx(0.04)
            assert way.remaining_s(alone, 100.01, is_running=False) == pytest.approx(0.03)
            assert way.remaining_s(decoded(sequence(), sequence()), 100.0, is_running=False) == pytest.approx(
                0.01
            )
        assert way.remaining_s(alone, 100.01, is_running=False) == pytest.approx(0.01)
        assert way.remaining_s(alone, 100.03, is_running=False) == 0
    assert way.remaining_s(alone, 100.0, is_running=False) == 0


def test_the_first_iteration_and_one_after_a_rest_begin_at_once() -> None:
    way = DecodePauses(learned(0.02), MAX_BATCH)
    with way.prefill(shares_cores=True), way.prefill(shares_cores=True):
        assert way.remaining_s(decoded(sequence()), 100.0, is_running=False) == 0
        way.ended(100.0)
        assert way.remaining_s(decoded(sequence()), 200.0, is_running=False) == 0


def test_the_tightest_slo_of_the_batch_counts() -> None:
    way = DecodePauses(learned(0.02), MAX_BATCH)
    way.ended(100.0)
    with way.prefill(shares_cores=True), way.prefill(shares_cores=True), way.prefill(shares_cores=True):
        batch = decoded(sequence(0.2), sequence(0.03))
        assert way.remaining_s(batch, 100.0, is_running=False) == pytest.approx(TBT_SLO_SHARE * 0.03 - 0.02)


def test_prompts_for_which_the_batch_has_no_place_are_not_waited_for() -> None:
    way = DecodePauses(learned(0.02), max_batch=2)
    way.ended(100.0)
    with way.prefill(shares_cores=True), way.prefill(shares_cores=True), way.prefill(shares_cores=True):
        assert way.remaining_s(decoded(sequence()), 100.0, is_running=False) == 0
        assert way.remaining_s(decoded(sequence(), sequence()), 100.0, is_running=False) == 0


def test_an_iteration_with_a_prompt_is_not_delayed() -> None:
    way = DecodePauses(learned(0.02), MAX_BATCH)
    way.ended(100.0)
    with way.prefill(shares_cores=True), way.prefill(shares_cores=True):
        prompt = PlannedChunk(sequence(), 8, of_prompt=True)
        assert way.remaining_s([*decoded(sequence()), prompt], 100.0, is_running=False) == 0


def test_what_leaves_by_an_error_is_not_waited_for() -> None:
    way = DecodePauses(learned(0.02), MAX_BATCH)
    way.ended(100.0)
    with pytest.raises(RuntimeError), way.prefill(shares_cores=True), way.prefill(shares_cores=True):
        raise RuntimeError
    assert way.remaining_s(decoded(sequence()), 100.0, is_running=False) == 0
