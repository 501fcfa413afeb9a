"""What the benchmarks of decoding count: the paper's TBT, the SLOs, the mix."""

import asyncio
from collections.abc import Iterable
from typing import cast

import pytest

from benchmarks.decode.goodput import (
    LONG,
    SHORT,
    Row,
    best,
    best_that_serves_both_kinds,
    compare,
    is_effective,
    measure,
    poisson,
    row_of,
)
from benchmarks.decode.requests import Answer, Planned, Sender


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


def answered(kind: tuple[int, int], ttft_s: float) -> Answer:
    return Answer(Planned(0.0, *kind), [ttft_s + 0.01 * token for token in range(kind[1])])


def test_goodput_counts_what_is_in_time_and_tells_the_kinds_apart() -> None:
    answers = [answered(SHORT, 1.0)] * 8 + [answered(LONG, 1.0), answered(LONG, 6.0)]
    assert row_of(2.0, answers, 5.0) == Row(2.0, 9 / 5, 1.0, 0.5)
    assert row_of(2.0, [answered(SHORT, 1.0)], 5.0).long_share is None


class ServerOf:
    """One that answers in time up to so many requests a second, and then nobody."""

    def __init__(self, most_per_s: float, duration_s: float) -> None:
        self._most = most_per_s * duration_s
        self.num_sent: list[int] = []

    async def send_all(self, schedule: Iterable[Planned]) -> list[Answer]:
        requests = list(schedule)
        self.num_sent.append(len(requests))
        ttft_s = 1.0 if len(requests) <= self._most else 6.0
        return [answered((r.num_prompt_tokens, r.num_output_tokens), ttft_s) for r in requests]


def test_a_server_is_known_by_its_best_rate_and_offered_no_more_once_it_is_overloaded() -> None:
    server = ServerOf(2.5, 100.0)
    rows = asyncio.run(measure("a server", cast(Sender, server), [1.0, 2.0, 4.0, 8.0], 100.0))
    assert best(rows).rate_per_s == 2.0
    assert best(rows).goodput_per_s == pytest.approx(2.0, rel=0.2)
    assert server.num_sent[1:] == [len(poisson(rate, 100.0)) for rate in (1.0, 2.0, 4.0)]


def test_ours_is_known_by_its_best_rate_at_which_long_prompts_are_not_turned_away() -> None:
    fair, greedy = Row(2, 1.9, 1.0, 0.95), Row(4, 3.4, 1.0, 0.4)
    assert best_that_serves_both_kinds([Row(1, 0.9, 1.0, 1.0), fair, greedy]) is fair
    assert best_that_serves_both_kinds([greedy, Row(5, 2.0, 1.0, 0.1)]) is greedy


@pytest.mark.parametrize(
    ("ours", "peer", "tuned", "expected"),
    [
        (Row(2, 2.3, 1.0, 0.9), Row(1, 1.0, 1.0, 1.0), Row(1, 1.2, 1.0, 1.0), True),
        (Row(2, 2.3, 1.0, 0.8), Row(1, 1.0, 1.0, 1.0), Row(1, 1.2, 1.0, 1.0), False),
        (Row(2, 2.1, 1.0, 1.0), Row(1, 1.0, 1.0, 1.0), Row(1, 1.0, 1.0, 1.0), False),
        (Row(2, 2.3, 1.0, 1.0), Row(1, 1.0, 1.0, 1.0), Row(1, 1.4, 1.0, 1.0), False),
        (Row(2, 2.3, 1.0, 1.0), None, None, True),
        (Row(2, 2.3, 1.0, None), None, None, True),  # there was none
    ],
)
def test_goodput_is_not_bought_by_turning_long_prompts_away(
    ours: Row, peer: Row | None, tuned: Row | None, expected: bool
) -> None:
    assert compare(ours, peer, tuned, (2.2, 1.75)) is expected
