"""The line through measured iterations (Mooncake, section 3: the local scheduler's prediction)."""

import math
import random
from collections.abc import Iterable

import pytest

from mooncake.messages.costs import prefill_quantities
from workers.decode.tbt_slo.tbt import (
    MAX_MIXED_IN_A_ROW,
    MIN_ITERATIONS,
    IterationPredictors,
    PredictionError,
    PromptCost,
    TBTPredictor,
)


def seconds(batch_size: int, num_kv_tokens: int) -> float:
    return 0.010 + 0.0005 * batch_size + 0.000_000_3 * num_kv_tokens


def observed(points: list[tuple[int, int]], noise: float = 0.0) -> TBTPredictor:
    rng, predictor = random.Random(1), TBTPredictor()
    for batch_size, num_kv_tokens in points:
        measured_s = seconds(batch_size, num_kv_tokens) * (1 + noise * rng.uniform(-1, 1))
        predictor.observe(batch_size, num_kv_tokens, measured_s)
    return predictor


def varied(num: int) -> list[tuple[int, int]]:
    rng = random.Random(2)
    return [
        (size, sum(rng.randrange(100, 4000) for _ in range(size)))
        for size in (rng.randrange(1, 33) for _ in range(num))
    ]


def test_says_nothing_before_it_has_seen_enough() -> None:
    assert observed(varied(MIN_ITERATIONS - 1)).predict_s(1, 100) is None
    assert observed(varied(MIN_ITERATIONS)).predict_s(1, 100) is not None


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.2, 0.1)])
def test_finds_the_line(noise: float, tolerance: float) -> None:
    predictor = observed(varied(600), noise)
    for point in ((1, 500), (16, 30_000), (40, 90_000)):
        assert predictor.predict_s(*point) == pytest.approx(seconds(*point), rel=tolerance)


def test_what_has_not_varied_costs_nothing_more() -> None:
    predictor = observed([(4, 1000)] * 50)
    assert predictor.predict_s(8, 5000) == pytest.approx(seconds(4, 1000))


def test_a_growing_sequence_does_not_make_other_requests_look_expensive() -> None:
    predictor = observed([(1, num_tokens) for num_tokens in range(1000, 3000)])
    assert predictor.predict_s(2, 3000) == pytest.approx(seconds(1, 3000), rel=0.05)


def test_nothing_makes_an_iteration_shorter() -> None:
    predictor = TBTPredictor()
    for batch_size in range(1, 33):
        predictor.observe(batch_size, 100 * batch_size, 0.1 / batch_size)
    many, few = predictor.predict_s(32, 3200), predictor.predict_s(1, 100)
    assert many is not None
    assert few is not None
    assert many >= few


def test_follows_a_machine_that_becomes_slower() -> None:
    predictor = observed(varied(500))
    for point in varied(2000):
        predictor.observe(*point, 3 * seconds(*point))
    assert predictor.predict_s(8, 10_000) == pytest.approx(3 * seconds(8, 10_000), rel=0.02)


def test_cost_of_a_prompt_follows_what_is_measured() -> None:
    cost = PromptCost()
    assert cost.predict_s(10, 50) is None
    cost.observe(100, 5000, 0.2)
    assert cost.predict_s(10, 50) == pytest.approx(0.02)
    for _ in range(100):
        cost.observe(50, 1250, 0.3)
    assert cost.predict_s(10, 50) == pytest.approx(0.06, rel=0.01)
    cost.observe(50, 1250, -1.0)  # an iteration that was faster than predicted
    assert 0 < (cost.predict_s(10, 50) or 0) < 0.06


TOKEN_S, PAIR_S = 0.000_26, 0.000_000_07


def chunk_s(start: int, num_tokens: int) -> float:
    num_tokens, num_pairs = prefill_quantities(num_tokens, start)
    return num_tokens * TOKEN_S + num_pairs * PAIR_S


def learned_cost(chunks: Iterable[tuple[int, int]], factor: float = 1.0) -> PromptCost:
    """The cost after iterations with one chunk each: its start and tokens."""
    cost = PromptCost()
    for start, num_tokens in chunks:
        cost.observe(*prefill_quantities(num_tokens, start), factor * chunk_s(start, num_tokens))
    return cost


LONG_PROMPT = [(start, 500) for start in range(0, 7000, 500)]


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 50), (0, 500), (3500, 200), (6500, 500)])
def test_a_prompt_token_costs_more_the_later_its_position(start: int, num_tokens: int) -> None:
    predicted_s = learned_cost(LONG_PROMPT * 4).predict_s(*prefill_quantities(num_tokens, start))
    assert predicted_s == pytest.approx(chunk_s(start, num_tokens), rel=0.01)


def test_chunks_at_one_position_say_nothing_of_others() -> None:
    cost = learned_cost([(1000, 100)] * 50)
    for start in (0, 1000, 7000):
        predicted_s = cost.predict_s(*prefill_quantities(100, start))
        assert predicted_s == pytest.approx(chunk_s(1000, 100))


def test_no_position_makes_a_token_free_or_a_later_one_quicker() -> None:
    falling, steep = PromptCost(), PromptCost()
    for _ in range(200):
        for num_pairs, falling_s, steep_s in ((100_000, 0.3, 0.0), (300_000, 0.2, 0.4)):
            falling.observe(100, num_pairs, falling_s)
            steep.observe(100, num_pairs, steep_s)
    assert falling.predict_s(100, 100_000) == falling.predict_s(100, 300_000) == pytest.approx(0.25, rel=0.02)
    assert steep.predict_s(100, 0) == pytest.approx(0, abs=1e-9)
    assert steep.predict_s(100, 200_000) == pytest.approx(0.2, rel=0.03), "the mean is kept"


def test_cost_of_positions_follows_a_machine_that_becomes_slower() -> None:
    cost = learned_cost(LONG_PROMPT * 4)
    for start, num_tokens in LONG_PROMPT * 8:
        cost.observe(*prefill_quantities(num_tokens, start), 3 * chunk_s(start, num_tokens))
    for start in (0, 6500):
        predicted_s = cost.predict_s(*prefill_quantities(500, start))
        assert predicted_s == pytest.approx(3 * chunk_s(start, 500), rel=0.02)


@pytest.mark.parametrize("chunks", [LONG_PROMPT, [(0, 100)]], ids=["by position", "one position"])
def test_the_tokens_that_fit_into_a_time_take_this_time(chunks: list[tuple[int, int]]) -> None:
    cost = learned_cost(chunks)
    for start in (0, 1, 500, 100_000):
        for seconds in (0.001, 0.25, 10.0):
            num_tokens = cost.num_tokens_in(seconds, start)
            assert cost.predict_s(*prefill_quantities(num_tokens, start)) == pytest.approx(seconds)
        assert cost.num_tokens_in(0.0, start) == cost.num_tokens_in(-1.0, start) == 0


def test_all_tokens_fit_where_they_cost_nothing_or_nothing_is_known() -> None:
    cost = PromptCost()
    assert cost.num_tokens_in(0.1, 500) == math.inf
    cost.observe(100, 5000, 0.0)
    assert cost.num_tokens_in(0.1, 500) == math.inf


def test_error_of_predictions_follows_what_is_measured() -> None:
    error = PredictionError()
    assert error.high_by_share == 1
    for seconds in [0.15, 0.05] * 50:
        error.observe(0.1, seconds)
    assert error.high_by_share == pytest.approx(2, abs=0.01)
    error.observe(0.1, 1000.0)  # a machine that stood still
    assert error.high_by_share < 2.2
    for _ in range(100):
        error.observe(0.1, 0.1)
    assert error.high_by_share == pytest.approx(1, abs=0.01)


def mixed_s(num_decoded: int, num_prompt_tokens: int) -> float:
    return (0.01 + 0.002 * num_decoded if num_decoded else 0.0) + 0.001 * num_prompt_tokens


def observe(
    predictors: IterationPredictors, num_decoded: int, num_prompt_tokens: int, seconds: float
) -> None:
    """An iteration with `num_decoded` sequences of 100 tokens, and tokens of prompts."""
    num_pairs = prefill_quantities(num_prompt_tokens, 0)[1]
    predictors.observe(num_decoded, 100 * num_decoded, num_prompt_tokens, num_pairs, seconds)


def test_decoding_is_learned_where_every_iteration_has_a_prompt() -> None:
    predictors = IterationPredictors()
    for number in range(2000):
        of = [(0, 50), (1, 60), (4, 20), (8, 30)][number % 4]
        observe(predictors, *of, mixed_s(*of))
    for num_decoded in (1, 4, 8):
        assert predictors.tbt.predict_s(num_decoded, 100 * num_decoded) == pytest.approx(
            mixed_s(num_decoded, 0), rel=0.1
        )
    assert predictors.prompt_cost.predict_s(10, 50) == pytest.approx(0.01, rel=0.1)
    assert predictors.error.high_by_share < 1.1


def test_a_fixed_cost_belongs_to_decoding_though_prompts_alone_have_it_too() -> None:
    """On GPUs an iteration takes a time of its own, whatever it computes."""

    def seconds_of(num_decoded: int, num_prompt_tokens: int) -> float:
        return 0.02 + 0.0005 * num_decoded + 0.0001 * num_prompt_tokens

    predictors = IterationPredictors()
    for number in range(1000):
        of = [(0, 200), (4, 100), (8, 100), (6, 100), (4, 0), (8, 0)][number % 6]
        observe(predictors, *of, seconds_of(*of))
    for num_decoded in (4, 8):
        predicted_s = predictors.tbt.predict_s(num_decoded, 100 * num_decoded)
        assert predicted_s == pytest.approx(seconds_of(num_decoded, 0), rel=0.01)


def test_few_iterations_with_prompts_do_not_teach_what_decoding_takes() -> None:
    predictors = IterationPredictors()
    for _ in range(MIN_ITERATIONS):
        observe(predictors, 4, 0, 0.02)
    observe(predictors, 0, 100, 0.1)
    for _ in range(MAX_MIXED_IN_A_ROW):
        observe(predictors, 4, 20, 0.5)
    assert predictors.tbt.predict_s(4, 400) == pytest.approx(0.02)
    observe(predictors, 4, 20, 0.9)
    assert (predictors.tbt.predict_s(4, 400) or 0.0) > 0.02
    observe(predictors, 4, 0, 0.02)
    learned_s = predictors.tbt.predict_s(4, 400)
    observe(predictors, 4, 20, 0.9)
    assert predictors.tbt.predict_s(4, 400) == learned_s


def test_a_slower_machine_is_noticed() -> None:
    predictors = IterationPredictors()
    for number in range(400):
        of = [(4, 0), (4, 40)][number % 2]
        observe(predictors, *of, mixed_s(*of))
    before = predictors.error.high_by_share
    observe(predictors, 4, 40, 2 * mixed_s(4, 40))
    assert predictors.error.high_by_share > before + 0.1
