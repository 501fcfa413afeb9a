"""The rule by which a helper is too slow, by made-up iterations."""

import pytest

from workers.decode.migration.helper_pace import (
    MIN_ITERATIONS,
    MOST_TIMES_AS_LONG,
    WINDOW_S,
    HelperPace,
    IterationTime,
    WithoutHelper,
)

STEP_S = 0.1


def pace(most_decoded: int = 8) -> HelperPace:
    """Of a helper that has come when iterations of up to so many sequences took `STEP_S`."""
    without = WithoutHelper()
    for number in range(300):
        num_decoded = 1 + number % most_decoded
        without.ended(IterationTime(num_decoded, 100 * num_decoded, STEP_S, None))
    return without.pace()


def verdicts(
    of: HelperPace,
    seconds: list[float],
    slo_s: float | None = None,
    num_decoded: int = 4,
    every_s: float = WINDOW_S / MIN_ITERATIONS,
) -> list[str]:
    """What is said in the end, of iterations that end one after the other."""
    return [
        why
        for number, took_s in enumerate(seconds)
        if (why := of.ended(IterationTime(num_decoded, 100 * num_decoded, took_s, slo_s), number * every_s))
    ]


SLOW_S, FAST_S = 1.1 * MOST_TIMES_AS_LONG * STEP_S, 0.9 * STEP_S
ENOUGH = MIN_ITERATIONS + 1


def test_a_helper_that_makes_iterations_longer_is_too_slow_once_a_window() -> None:
    [why, again] = verdicts(pace(), [SLOW_S] * (2 * ENOUGH))
    assert (
        why == again == (f"{ENOUGH} of {ENOUGH} iterations took more than 1.25 times as long as without it")
    )


def test_a_helper_is_not_too_slow_for_a_few_slow_iterations_or_too_few() -> None:
    assert not verdicts(pace(), [30 * SLOW_S] * 3 + [FAST_S] * (2 * ENOUGH))
    assert not verdicts(pace(), [SLOW_S] * (MIN_ITERATIONS - 1), every_s=WINDOW_S)
    assert not verdicts(pace(), [SLOW_S] * 10 * MIN_ITERATIONS, every_s=0.5 * WINDOW_S / 10 / MIN_ITERATIONS)


def test_larger_batches_than_were_measured_are_not_compared() -> None:
    assert not verdicts(pace(most_decoded=3), [5 * SLOW_S] * (2 * ENOUGH))
    assert not verdicts(HelperPace.unknown(), [5 * SLOW_S] * (2 * ENOUGH))


@pytest.mark.parametrize("num_decoded", [4, 100], ids=["measured before", "larger"])
def test_iterations_that_take_longer_than_the_slo_are_too_slow(num_decoded: int) -> None:
    took_s = 1.05 * STEP_S
    [why] = verdicts(pace(), [took_s] * ENOUGH, slo_s=0.99 * took_s, num_decoded=num_decoded)
    assert why == f"{ENOUGH} of {ENOUGH} iterations took longer than the TBT SLO allows"
    assert not verdicts(pace(), [took_s] * ENOUGH, slo_s=1.01 * took_s, num_decoded=num_decoded)


def test_a_helper_without_which_iterations_would_be_later_still_is_kept() -> None:
    assert not verdicts(pace(), [FAST_S] * (2 * ENOUGH), slo_s=0.5 * FAST_S)
