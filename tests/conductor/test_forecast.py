"""The decode load of the near future (Mooncake, section 7.4)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.forecast import OutputLengths, RequestForecast, SystemForecast
from conductor.timeline import BUCKET_S, Timeline, Work
from mooncake.requests import Request, SamplingParams

times = st.integers(0, 4000).map(lambda tenths: 0.1 * tenths + 0.05)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(times, st.integers(1, 1000), st.booleans()), max_size=40),
    times,
)
def test_sums_are_those_of_a_list(entries: list[tuple[float, int, bool]], time_s: float) -> None:
    timeline, kept = Timeline(), []
    for at_s, num_tokens, stays in entries:
        bucket = timeline.add(at_s, num_tokens)
        if stays:
            # What is earlier than everything that was kept counts as if it had come with the first of it.
            kept.append((bucket, num_tokens))
        else:
            timeline.remove(bucket, num_tokens)
    now = math.floor(time_s / BUCKET_S)
    until = [num_tokens for bucket, num_tokens in kept if bucket <= now]
    assert timeline.until(time_s) == Work(len(until), sum(until))
    everything = Work(len(kept), sum(num_tokens for _, num_tokens in kept))
    assert timeline.until(math.inf) == everything
    assert timeline.until(-math.inf) == Work(0, 0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(times, st.integers(1, 1000)), max_size=40),
    st.lists(st.floats(0, 1), min_size=1, max_size=300),
    times,
)
def test_weights_are_those_of_the_ages(
    entries: list[tuple[float, int]], weights: list[float], now_s: float
) -> None:
    timeline = Timeline()
    entries = sorted(entry for entry in entries if entry[0] <= now_s)
    ages = [math.floor(now_s / BUCKET_S) - timeline.add(*entry) for entry in entries]
    expected = [weights[min(age, len(weights) - 1)] for age in ages]
    num_tokens = [weight * tokens for weight, (_, tokens) in zip(expected, entries, strict=True)]
    found = timeline.weighted(np.array(weights), now_s)
    assert found == pytest.approx(Work(sum(expected), sum(num_tokens)), abs=1e-6)


def request(num_tokens: int, kind: str = "a", max_tokens: int = 1000) -> Request:
    return Request("r", [1] * num_tokens, [kind.encode()], SamplingParams(max_tokens), "front")


def test_prefills_join_and_decodes_leave() -> None:
    forecast = SystemForecast()
    forecast.expect(request(100), 10.0, 0.1)
    forecast.expect(request(200), 20.0, 0.1)
    forecast.begin(request(1000), 5.0, 0.1)
    forecast.learn(request(1), 8.0, 10)
    assert forecast.at(9.0, 9.0) == Work(1, 1000)
    assert forecast.at(11.0, 9.0) == Work(2, 1100)
    assert forecast.at(14.0, 9.0) == Work(1, 100)
    assert forecast.at(21.0, 9.0) == Work(2, 300)


def test_nobody_leaves_before_a_decode_has_ended() -> None:
    forecast = SystemForecast()
    forecast.begin(request(10), 0.0, 0.1)
    assert forecast.at(1e6, 1.0) == Work(1, 10)


def test_of_those_that_are_as_old_as_many_leave_as_did_lately() -> None:
    forecast = SystemForecast()
    for seconds in (2.0, 2.0, 10.0, 30.0):
        forecast.learn(request(1), seconds, 10)
    forecast.begin(request(100), 0.0, 0.1)
    assert forecast.at(1.0, 0.0) == Work(1, 100)
    assert forecast.at(5.0, 0.0) == pytest.approx(Work(0.5, 50))
    assert forecast.at(20.0, 5.0) == pytest.approx(Work(0.5, 50))  # it was none of the short ones
    assert forecast.at(40.0, 20.0) == Work(0, 0)
    # Longer than any: it may last as long again as they did on average, 11 s.
    assert forecast.at(45.0, 40.0) == pytest.approx(Work(1 - 5 / 11, 100 * (1 - 5 / 11)))
    assert forecast.at(52.0, 40.0) == Work(0, 0)


def test_t_d_is_a_mean_of_the_latest() -> None:
    forecast = SystemForecast()
    for seconds in (1.0, 3.0):
        forecast.learn(request(1), seconds, 10)
    assert forecast.decode_s == pytest.approx(2.0)
    for _ in range(200):
        forecast.learn(request(1), 10.0, 10)
    assert forecast.decode_s == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("forecast", [SystemForecast(), RequestForecast()])
def test_who_is_not_expected_any_more_is_nobodys_load(forecast: SystemForecast) -> None:
    for stay in (forecast.expect(request(100), 10.0, 0.1), forecast.begin(request(9), 3.0, 0.1)):
        stay.end()
    for time_s in (0.0, 10.05, 50.0):
        assert forecast.at(time_s, 0.0) == Work(0, 0)


def test_long_answers_stay_and_short_ones_leave() -> None:
    """Section 7.4, request level."""
    forecast = RequestForecast()
    for _ in range(10):
        forecast.learn(request(1, "short"), 1.0, 10)
        forecast.learn(request(1, "long"), 9.0, 500)
    forecast.begin(request(100, "short"), 0.0, 0.1)
    forecast.begin(request(200, "long"), 0.0, 0.1)
    forecast.expect(request(400, "long"), 30.0, 0.1)
    assert forecast.at(0.5, 0.5) == Work(2, 300)
    assert forecast.at(1.5, 0.5) == Work(1, 200)
    assert forecast.at(31.0, 0.5) == Work(2, 600)
    assert forecast.at(51.0, 0.5) == Work(1, 400)


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
