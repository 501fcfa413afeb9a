"""What the benchmarks of decoding count: the paper's TBT, the SLOs, the mix."""

import pytest

from benchmarks.decoding.goodput import LONG, SHORT, is_effective, poisson
from benchmarks.decoding.requests import Answer, Planned


def answer(ttft_s: float, gaps_s: list[float]) -> Answer:
    times_s = [ttft_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    return Answer(Planned(0.0, 10, len(times_s)), times_s)


def test_tbt_is_the_mean_of_the_longest_tenth_of_the_gaps() -> None:
    assert answer(1.0, [0.01] * 18 + [0.3, 0.1]).tbt_s == pytest.approx(0.2)
    assert answer(1.0, [0.01, 0.02]).tbt_s == pytest.approx(0.02)


def test_an_answer_is_effective_within_both_slos_and_whole() -> None:
    assert is_effective(answer(4.9, [0.14] * 20))
    assert not is_effective(answer(5.1, [0.01] * 20))
    assert not is_effective(answer(0.1, [0.01] * 18 + [0.2, 0.2]))
    assert not is_effective(Answer(Planned(0.0, 10, 5)))


def test_arrivals_are_seeded_and_of_the_mix() -> None:
    schedule = poisson(10, 200)
    assert schedule == poisson(10, 200)
    assert len(schedule) == pytest.approx(2000, rel=0.1)
    kinds = [(request.num_prompt_tokens, request.num_output_tokens) for request in schedule]
    assert kinds.count(SHORT) / len(kinds) == pytest.approx(0.8, abs=0.05)
    assert set(kinds) == {SHORT, LONG}
