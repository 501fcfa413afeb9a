"""Which heads of a layer have come."""

from itertools import permutations

import pytest

from kvstore.transfer.partial_layers import PartialLayers

SIX = [range(2), range(2, 5), range(5, 6)]


@pytest.mark.parametrize("order", list(permutations(SIX)))
def test_a_layer_is_complete_with_its_last_heads_in_any_order(order: tuple[range, ...]) -> None:
    parts = PartialLayers(6)
    for number, heads in enumerate(order):
        assert parts.begin(3, 1, heads)
        assert not parts.have_arrived(3, 1, heads)
        assert parts.complete(3, 1, heads) == (number == 2)
    assert not parts.knows(3, 1)


@pytest.mark.parametrize("heads", [range(2), range(1, 2), range(1, 3), range(6)])
@pytest.mark.parametrize("has_arrived", [True, False])
def test_heads_that_were_begun_are_not_begun_again(heads: range, has_arrived: bool) -> None:
    parts = PartialLayers(6)
    assert parts.begin(3, 1, range(2))
    if has_arrived:
        parts.complete(3, 1, range(2))
    assert not parts.begin(3, 1, heads)
    assert parts.have_arrived(3, 1, heads) == (has_arrived and heads.stop <= 2)
    assert parts.begin(3, 1, range(2, 6))
    assert parts.begin(3, 2, heads)
    assert parts.begin(4, 1, heads)


def test_heads_that_were_abandoned_can_be_begun_again() -> None:
    parts = PartialLayers(6)
    parts.begin(3, 1, range(2))
    parts.begin(3, 1, range(2, 6))
    assert not parts.abandon(3, 1, range(2))
    assert parts.begin(3, 1, range(1))
    assert not parts.abandon(3, 1, range(1))
    assert parts.abandon(3, 1, range(2, 6))
    assert not parts.knows(3, 1)


def test_a_layer_with_heads_that_have_arrived_is_known_when_the_others_are_abandoned() -> None:
    parts = PartialLayers(6)
    parts.begin(3, 1, range(2))
    parts.complete(3, 1, range(2))
    parts.begin(3, 1, range(2, 6))
    assert not parts.abandon(3, 1, range(2, 6))
    assert parts.knows(3, 1)
    assert parts.have_arrived(3, 1, range(1, 2))
