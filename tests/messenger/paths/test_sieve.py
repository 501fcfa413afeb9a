"""Who is given up, in which order."""

from messenger.paths.sieve import Sieve


def filled(*keys: str) -> Sieve[str, str]:
    sieve: Sieve[str, str] = Sieve()
    for key in keys:
        sieve.put(key, key.upper())
    return sieve


def anyone(_: str) -> bool:
    return True


def test_the_oldest_unused_one_goes_first() -> None:
    sieve = filled("a", "b", "c")
    assert [sieve.evict(anyone) for _ in range(4)] == ["A", "B", "C", None]


def test_one_that_was_used_is_spared_once() -> None:
    sieve = filled("a", "b", "c")
    assert sieve.get("a") == "A"
    assert [sieve.evict(anyone) for _ in range(3)] == ["B", "C", "A"]


def test_the_hand_goes_on_where_it_stopped() -> None:
    """A newcomer does not push the hand back: those before it have been looked at already."""
    sieve = filled("a", "b", "c", "d")
    sieve.get("a")
    assert sieve.evict(anyone) == "B"
    sieve.get("a")
    sieve.put("e", "E")
    assert sieve.evict(anyone) == "C"


def test_one_that_may_not_go_stays_and_keeps_its_mark() -> None:
    sieve = filled("a", "b")
    assert sieve.evict(lambda value: value != "A") == "B"
    assert sieve.evict(lambda value: value != "A") is None
    assert list(sieve.values()) == ["A"]


def test_all_used_ones_still_make_room() -> None:
    sieve = filled("a", "b")
    sieve.get("a")
    sieve.get("b")
    assert sieve.evict(anyone) == "A"


def test_only_the_very_value_is_discarded() -> None:
    sieve = filled("a")
    sieve.discard("a", "another")
    assert len(sieve) == 1
    value = sieve.get("a")
    assert value is not None
    sieve.discard("a", value)
    assert len(sieve) == 0
