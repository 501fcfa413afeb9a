"""The decode load of the near future (Mooncake, section 7.4)."""

import math
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.view.forecast.forecast import (
    BUCKET_S,
    Forecast,
    IterationCount,
    OutputLengths,
    RequestForecast,
    SystemForecast,
)
from conductor.view.forecast.timeline import PromptTotals, Timeline
from mooncake.messages.requests import Request, SamplingParams
from tests.examples import num_examples

times = st.integers(0, 4000).map(lambda tenths: 0.1 * tenths + 0.05)


@settings(max_examples=num_examples(60))
@given(
    st.lists(st.tuples(times, st.integers(1, 1000), st.booleans()), max_size=40),
    times,
)
def test_sums_are_those_of_a_list(entries: list[tuple[float, int, bool]], time_s: float) -> None:
    timeline, kept = Timeline(BUCKET_S), []
    for at_s, num_tokens, stays in entries:
        bucket = timeline.add(at_s, num_tokens)
        if stays:
            # What is earlier than everything that was kept counts as if it had come with the first of it.
            kept.append((bucket, num_tokens))
        else:
            timeline.remove(bucket, num_tokens)
    now = math.floor(time_s / BUCKET_S)
    until = [num_tokens for bucket, num_tokens in kept if bucket <= now]
    assert timeline.until(time_s) == PromptTotals(len(until), sum(until))
    everything = PromptTotals(len(kept), sum(num_tokens for _, num_tokens in kept))
    assert timeline.until(timeline.latest) == everything
    assert not kept or timeline.until(timeline.latest - BUCKET_S) != everything
    assert timeline.until(math.inf) == everything
    assert timeline.until(-math.inf) == PromptTotals(0, 0)


@settings(max_examples=num_examples(60))
@given(
    st.lists(st.tuples(times, st.integers(1, 1000)), max_size=40),
    st.lists(st.floats(0, 1), min_size=1, max_size=300),
    times,
)
def test_weights_are_those_of_the_ages(
    entries: list[tuple[float, int]], weights: list[float], now_s: float
) -> None:
    timeline = Timeline(BUCKET_S)
    entries = sorted(entries)
    ages = [math.floor(now_s / BUCKET_S) - timeline.add(*entry) for entry in entries]
    expected = [weights[min(age, len(weights) - 1)] if age >= 0 else 0.0 for age in ages]
    num_tokens = [weight * tokens for weight, (_, tokens) in zip(expected, entries, strict=True)]
    found = timeline.weighted(np.array(weights), now_s)
    assert found == pytest.approx(PromptTotals(sum(expected), sum(num_tokens)), abs=1e-6)


def request(num_tokens: int, kind: str = "a", max_tokens: int = 1000) -> Request:
    return Request("r", [1] * num_tokens, [kind.encode()], SamplingParams(max_tokens), "front")


ITERATION_S = 0.1
F = TypeVar("F", bound=Forecast)


def having_learned(forecast: F, *seconds: float, kind: str = "a") -> F:
    """Decodes that have ended, all with iterations of `ITERATION_S`."""
    forecast.iterations.take(ITERATION_S, 0.0)
    for decode_s in seconds:
        stay = forecast.begin(request(1, kind), 0.0)
        stay.end()
        forecast.learn(request(1, kind), stay, decode_s, round(decode_s / ITERATION_S), decode_s)
    return forecast


def test_prefills_join_and_decodes_leave() -> None:
    forecast = having_learned(SystemForecast(), 8.0)
    forecast.expect(request(100), 10.0, ITERATION_S)
    forecast.expect(request(200), 17.5, ITERATION_S)
    decoded = forecast.begin(request(1000), 5.0)
    assert forecast.at(9.0, 9.0, ITERATION_S) == PromptTotals(1, 1000)
    assert forecast.at(11.0, 9.0, ITERATION_S) == PromptTotals(2, 1100)
    assert forecast.at(14.0, 9.0, ITERATION_S) == PromptTotals(1, 100)
    assert forecast.at(17.7, 9.0, ITERATION_S) == PromptTotals(2, 300)
    assert forecast.at(19.0, 9.0, ITERATION_S) == PromptTotals(1, 200), (
        "the first one has been decoded by then"
    )
    decoded.end()
    assert forecast.at(19.0, 16.0, ITERATION_S) == PromptTotals(2, 300), "it has not even begun: it is late"


def test_a_batch_that_grows_makes_iterations_longer_and_no_answer() -> None:
    forecast = having_learned(SystemForecast(), 8.0)
    forecast.begin(request(1), 10.0)
    forecast.iterations.take(2 * ITERATION_S, 14.0)
    assert forecast.at(20.0, 18.5, 2 * ITERATION_S) == PromptTotals(1, 1), "of 80 iterations it has had 62"
    assert forecast.at(23.0, 18.5, 2 * ITERATION_S) == PromptTotals(0, 0)
    assert forecast.at(20.0, 20.0, ITERATION_S) == PromptTotals(1, 1)
    assert forecast.at(21.7, 20.0, ITERATION_S) == PromptTotals(0, 0), (
        "of iterations that become shorter again"
    )


def test_iterations_are_counted_at_the_pace_of_their_time() -> None:
    iterations = IterationCount()
    iterations.take(0.5, 10.0)
    before = iterations.at(10.0)
    iterations.take(0.25, 12.0)
    assert iterations.at(12.0) - before == pytest.approx(4)
    assert iterations.at(13.0) - before == pytest.approx(8)


def test_no_request_leaves_before_a_decode_has_ended() -> None:
    forecast = SystemForecast()
    forecast.begin(request(10), 0.0)
    assert forecast.at(1e6, 1.0, ITERATION_S) == PromptTotals(1, 10)


def test_of_those_that_are_as_old_as_many_leave_as_did_lately() -> None:
    forecast = having_learned(SystemForecast(), 2.0, 2.0, 10.0, 30.0)
    forecast.begin(request(100), 0.0)
    assert forecast.at(1.0, 0.0, ITERATION_S) == PromptTotals(1, 100)
    assert forecast.at(5.0, 0.0, ITERATION_S) == pytest.approx(PromptTotals(0.5, 50))
    assert forecast.at(20.0, 5.0, ITERATION_S) == pytest.approx(
        PromptTotals(0.5, 50)
    )  # it was none of the short ones
    assert forecast.at(40.0, 20.0, ITERATION_S) == PromptTotals(0, 0)
    # Longer than any: it may last as long again as they did on average, 11 s.
    assert forecast.at(45.0, 40.0, ITERATION_S) == pytest.approx(
        PromptTotals(1 - 5 / 11, 100 * (1 - 5 / 11)), rel=0.05
    )
    assert forecast.at(52.0, 40.0, ITERATION_S) == PromptTotals(0, 0)


def test_of_prefills_that_will_have_ended_long_before_only_long_answers_are_left() -> None:
    forecast = having_learned(SystemForecast(), 2.0, 2.0, 2.0, 30.0)
    for second in range(10):
        forecast.expect(request(100), 100.05 + second, ITERATION_S)
    assert forecast.at(109.5, 100.0, ITERATION_S) == pytest.approx(PromptTotals(2 + 8 / 4, 400))
    assert forecast.at(99.0, 90.0, ITERATION_S) == PromptTotals(0, 0), "none of them will have ended"


def test_t_d_is_a_mean_of_the_latest() -> None:
    forecast = having_learned(SystemForecast(), 1.0, 3.0)
    assert forecast.decode_s == pytest.approx(2.0)
    having_learned(forecast, *[10.0] * 200)
    assert forecast.decode_s == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("forecast", [SystemForecast(), RequestForecast()])
def test_a_request_that_is_not_expected_any_more_is_no_load(forecast: Forecast) -> None:
    for stay in (forecast.expect(request(100), 10.0, ITERATION_S), forecast.begin(request(9), 3.0)):
        stay.end()
    for time_s in (3.0, 10.05, 50.0):
        assert forecast.at(time_s, 3.0, ITERATION_S) == PromptTotals(0, 0)


def test_long_answers_stay_and_short_ones_leave() -> None:
    """Section 7.4, request level."""
    forecast = having_learned(RequestForecast(), *[1.0] * 10, kind="short")
    having_learned(forecast, *[50.0] * 10, kind="long")
    forecast.begin(request(100, "short"), 60.0)
    forecast.begin(request(200, "long"), 60.0)
    forecast.expect(request(400, "long"), 90.0, ITERATION_S)
    assert forecast.at(60.5, 60.5, ITERATION_S) == PromptTotals(2, 300)
    assert forecast.at(61.5, 60.5, ITERATION_S) == PromptTotals(1, 200)
    assert forecast.at(91.0, 60.5, ITERATION_S) == PromptTotals(2, 600)
    assert forecast.at(111.0, 60.5, ITERATION_S) == PromptTotals(1, 400)


def test_what_is_longer_than_most_of_its_kind_stays() -> None:
    forecast = having_learned(RequestForecast(), *[1.0] * 10)
    forecast.begin(request(100), 20.0)
    assert forecast.at(21.5, 20.5, ITERATION_S) == PromptTotals(0, 0)
    assert forecast.at(31.5, 21.5, ITERATION_S) == PromptTotals(1, 100)


def test_lengths_are_those_of_the_kind_once_it_is_known() -> None:
    lengths = OutputLengths()
    assert lengths.expected(request(1, "a", max_tokens=77)) == 77
    for _ in range(10):
        lengths.learn(request(1, "a"), 100)
    assert lengths.expected(request(1, "b")) == 100  # as all
    for number in range(100):
        lengths.learn(request(1, "b"), number % 10)
    assert lengths.expected(request(1, "b")) == 7
    assert lengths.expected(request(1, "a")) == 100
    assert lengths.expected(request(1, "a", max_tokens=50)) == 50


@pytest.mark.parametrize("new_forecast", [SystemForecast, RequestForecast])
@settings(max_examples=num_examples(30))
@given(st.lists(st.tuples(times, st.integers(1, 1000), st.booleans()), max_size=30), times, times)
def test_at_no_time_is_there_more_than_everything(
    new_forecast: type[Forecast], entries: list[tuple[float, int, bool]], now_s: float, later_s: float
) -> None:
    forecast = having_learned(new_forecast(), 0.5, 3.0, 20.0)
    for at_s, num_tokens, begins in sorted(entries):
        if begins:
            forecast.begin(request(num_tokens), at_s)
        else:
            forecast.expect(request(num_tokens), at_s, ITERATION_S)
    most, work = forecast.everything, forecast.at(now_s + later_s, now_s, ITERATION_S)
    assert most == PromptTotals(len(entries), sum(num_tokens for _, num_tokens, _ in entries))
    assert work.num_requests <= most.num_requests + 1e-9
    assert work.num_tokens <= most.num_tokens + 1e-6
