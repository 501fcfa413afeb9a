"""Which front is next."""

from conductor.picker.fronts import MOST_ENDPOINTS, READY_FOR_S, WatchedFront, WatchedFronts

BLUE, GREEN = "http://blue:8000", "http://green:8000"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fronts_of(clock: Clock, **clusters: tuple[str, int]) -> WatchedFronts:
    """Fronts that are ready: `a=(BLUE, 2)` is at a:8000, in a cluster with 2 decode instances."""
    fronts = WatchedFronts(clock)
    for name, (cluster, num_decode) in clusters.items():
        fronts.is_ready(f"{name}:8000", cluster, num_decode)
    return fronts


def begin(fronts: WatchedFronts, address: str) -> WatchedFront:
    front = fronts.begins(address)
    assert front is not None
    return front


def test_the_front_with_the_fewest_requests_is_first() -> None:
    fronts = fronts_of(Clock(), a=(BLUE, 1), b=(BLUE, 1), c=(BLUE, 1))
    begun = [begin(fronts, address) for address in ("a:8000", "a:8000", "b:8000", "c:8000", "c:8000")]
    assert fronts.choose()[0] == "b:8000"
    for front in begun[3:]:
        fronts.ends(front)
    assert fronts.choose() == ["c:8000", "b:8000", "a:8000"]


def test_equal_fronts_take_turns() -> None:
    fronts = fronts_of(Clock(), a=(BLUE, 1), b=(BLUE, 1), c=(GREEN, 2))
    chosen = []
    for _ in range(8):
        chosen.append(fronts.choose()[0])
        fronts.ends(begin(fronts, chosen[-1]))
    assert chosen == ["a:8000", "c:8000", "b:8000", "c:8000"] * 2


def test_clusters_get_requests_as_they_have_decode_instances() -> None:
    fronts = fronts_of(Clock(), a=(BLUE, 3), b=(BLUE, 3), c=(GREEN, 1))
    given = {BLUE: 0, GREEN: 0}
    for _ in range(40):
        address = fronts.choose()[0]
        fronts.begins(address)
        given[GREEN if address == "c:8000" else BLUE] += 1
    assert given == {BLUE: 30, GREEN: 10}


def test_the_second_address_is_of_another_cluster() -> None:
    fronts = fronts_of(Clock(), a=(BLUE, 1), b=(BLUE, 1), c=(GREEN, 1))
    fronts.begins("c:8000")
    first, second, third = fronts.choose()
    assert (second, {first, third}) == ("c:8000", {"a:8000", "b:8000"})


def test_no_more_addresses_are_told_than_a_gateway_tries() -> None:
    fronts = fronts_of(Clock(), **{f"front{number}": (BLUE, 1) for number in range(20)})
    assert len(fronts.choose()) == MOST_ENDPOINTS


def test_a_front_that_waits_for_a_conductor_is_kept_for_a_while() -> None:
    clock = Clock()
    fronts = fronts_of(clock, a=(BLUE, 1))
    clock.now_s += READY_FOR_S
    assert fronts.choose() == ["a:8000"]
    clock.now_s += 0.1
    assert fronts.choose() == []
    fronts.is_ready("a:8000", BLUE, 1)
    assert fronts.choose() == ["a:8000"]


def test_a_front_that_does_not_answer_is_chosen_no_more() -> None:
    fronts = fronts_of(Clock(), a=(BLUE, 1), b=(BLUE, 1))
    fronts.is_gone("a:8000")
    fronts.is_gone("a:8000")
    assert fronts.choose() == ["b:8000"]
    assert fronts.addresses(BLUE) == {"b:8000"}
    assert fronts.begins("a:8000") is None


def test_what_a_front_had_before_it_was_gone_ends_without_being_counted_again() -> None:
    fronts = fronts_of(Clock(), a=(BLUE, 1), b=(BLUE, 1))
    before = begin(fronts, "a:8000")
    begin(fronts, "b:8000")
    fronts.is_gone("a:8000")
    fronts.is_ready("a:8000", BLUE, 1)
    begin(fronts, "a:8000")
    begin(fronts, "a:8000")
    fronts.ends(before)
    assert fronts.choose() == ["b:8000", "a:8000"]


def test_only_what_the_gateway_allows_is_chosen() -> None:
    fronts = fronts_of(Clock(), a=(BLUE, 1), b=(BLUE, 1))
    fronts.is_ready("[fd00::1]:8000", BLUE, 1)
    assert fronts.choose({"b:8000", "x:8000"}) == ["b:8000"]
    assert fronts.choose({"a"}) == ["a:8000"]
    assert fronts.choose({"fd00::1"}) == ["[fd00::1]:8000"]
    assert fronts.choose({"a:9"}) == []
    assert fronts.choose([]) == []


def test_a_cluster_without_decode_instances_breaks_nothing() -> None:
    assert fronts_of(Clock(), a=(BLUE, 0)).choose() == ["a:8000"]
