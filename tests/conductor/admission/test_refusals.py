"""What decode instances say when they refuse counts for a while."""

import pytest

from conductor.admission.refusals import HALF_LIFE_S, MOST, Refusals


def test_nothing_is_allowed_for_before_anybody_refuses() -> None:
    assert Refusals().factor(5.0) == 1.0


def test_a_difference_fades() -> None:
    refusals = Refusals()
    refusals.note(0.100, 0.104, 10.0)
    assert refusals.factor(10.0) == pytest.approx(1.04)
    assert refusals.factor(10.0 + HALF_LIFE_S) == pytest.approx(1.02)
    refusals.note(0.100, 0.101, 10.0 + HALF_LIFE_S)  # another instance differs by less
    assert refusals.factor(10.0 + HALF_LIFE_S) == pytest.approx(1.02)
    assert refusals.factor(10.0 + 20 * HALF_LIFE_S) == pytest.approx(1.0, abs=1e-6)


def test_it_is_bounded_and_never_below_the_prediction() -> None:
    refusals = Refusals()
    refusals.note(0.2, 0.1, 0.0)
    assert refusals.factor(0.0) == 1.0
    refusals.note(0.1, 0.9, 0.0)
    assert refusals.factor(0.0) == MOST
