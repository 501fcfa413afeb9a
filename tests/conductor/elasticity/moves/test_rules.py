"""Rules of moves: which request leaves which batch, for which other one."""

from collections import Counter
from dataclasses import replace

import pytest

from conductor.elasticity.moves.batches import Coming, InstanceBatch, Resident, can_be_emptied
from conductor.elasticity.moves.defragmentation import defragment
from conductor.elasticity.moves.limits import Move, RecentMoves
from conductor.elasticity.moves.priorities import keep_headroom
from conductor.elasticity.moves.relief import relieve
from conductor.view.decision_stats import MigrationReason
from mooncake.messages.costs import Costs

COSTS = Costs(0.01, 0.0, 1e-6)
"""An iteration takes 10 ms, and 1 ms for each thousand tokens."""
SLO_S = 0.02


def resident(name: str, num_tokens: int, *, slo_s: float | None = SLO_S, priority: int = 0) -> Resident:
    return Resident(name, num_tokens, 0, num_tokens, slo_s, priority)


def batch(
    name: str, *residents: Resident, free: int = 100_000, coming: tuple[Coming, ...] = ()
) -> InstanceBatch:
    return InstanceBatch(name, residents, COSTS, 8, 200_000, 200_000, free, coming)


def shown(moves: list[Move] | None) -> list[tuple[str, str, str]]:
    assert moves is not None
    return [(move.request_id, move.source, move.destination) for move in moves]


def test_relieves_a_late_batch_of_its_cheapest_request_that_suffices() -> None:
    late = batch("d0", resident("a", 6000), resident("b", 4000), resident("c", 1000))
    moves = relieve([late, batch("d1", resident("e", 1000))])
    assert shown(moves) == [("c", "d0", "d1")]
    assert moves[0].reason is MigrationReason.RELIEVE


def test_a_request_that_suffices_alone_goes_before_a_cheaper_one_that_does_not() -> None:
    late = batch("d0", resident("a", 6000), resident("b", 5000), resident("c", 500))
    assert shown(relieve([late, batch("d1")])) == [("b", "d0", "d1")]


def test_no_relief_where_the_destination_would_need_relief_itself() -> None:
    late = batch("d0", resident("a", 6000), resident("b", 4500))
    assert relieve([late, batch("d1", resident("e", 5000))]) == []


def test_no_relief_to_an_instance_that_drains_or_has_no_pages() -> None:
    late = batch("d0", resident("a", 6000), resident("b", 4500))
    assert relieve([late, batch("d1", free=5000)]) == []
    assert relieve([late, replace(batch("d1"), takes_requests=False)]) == []


def test_no_relief_to_an_instance_whose_free_pages_are_at_its_helper() -> None:
    late = batch("d0", resident("a", 6000), resident("b", 4500))
    owner = replace(batch("d1", free=100_000), num_tokens_at_helper=80_000)
    assert shown(relieve([late, owner])) == [("b", "d0", "d1")]
    assert relieve([late, replace(owner, num_tokens_at_helper=90_000)]) == []


def test_a_batch_without_slos_is_never_late() -> None:
    full = batch("d0", resident("a", 90_000, slo_s=None))
    assert relieve([full, batch("d1")]) == []


def test_the_strict_request_may_leave_itself() -> None:
    late = batch("d0", resident("a", 8000, slo_s=0.1), resident("b", 1000, slo_s=0.015))
    assert shown(relieve([late, batch("d1")])) == [("b", "d0", "d1")]


def test_two_late_batches_do_not_share_one_place() -> None:
    late = [batch(name, resident(f"{name}a", 6000), resident(f"{name}b", 4500)) for name in ("d0", "d1")]
    moves = relieve([*late, batch("d2", resident("e", 2000))])
    assert len(moves) == 1


def test_lower_classes_make_room_before_the_first_class_is_late() -> None:
    crowded = batch("d0", resident("strict", 5000), resident("lax", 3000, slo_s=1.0, priority=5))
    moves = keep_headroom([crowded, batch("d1", resident("e", 3000, slo_s=1.0, priority=5))])
    assert shown(moves) == [("lax", "d0", "d1")]
    assert moves[0].reason is MigrationReason.PRIORITY


def test_a_lower_class_does_not_go_where_the_first_class_is() -> None:
    crowded = batch("d0", resident("strict", 5000), resident("lax", 3000, slo_s=1.0, priority=5))
    assert keep_headroom([crowded, batch("d1", resident("strict too", 100))]) == []


def test_one_class_alone_makes_no_room() -> None:
    assert keep_headroom([batch("d0", resident("a", 5000), resident("b", 4000)), batch("d1")]) == []


def test_short_requests_move_for_a_long_one_that_waits() -> None:
    waiting = Coming("long", 9000, SLO_S * 10, has_waited_s=3.0)
    residents = [resident(name, size, slo_s=None) for name, size in (("a", 1000), ("b", 3000), ("c", 2500))]
    source = batch("d0", *residents, free=6500, coming=(waiting,))
    moves = defragment([source, batch("d1", free=100_000)])
    assert shown(moves) == [("c", "d0", "d1")]  # the smallest that suffices


def test_nothing_moves_if_not_enough_would_be_freed() -> None:
    waiting = Coming("long", 50_000, has_waited_s=3.0)
    source = batch("d0", resident("a", 1000, slo_s=None), free=6500, coming=(waiting,))
    assert defragment([source, batch("d1")]) == []


def test_a_request_that_has_just_come_finds_room_by_itself() -> None:
    waiting = Coming("long", 9000, has_waited_s=0.1)
    source = batch("d0", resident("a", 5000, slo_s=None), free=6500, coming=(waiting,))
    assert defragment([source, batch("d1")]) == []


@pytest.mark.parametrize(("longest", "fits"), [(2000, True), (7000, False)])
def test_an_instance_can_be_emptied_if_all_requests_fit_others_within_their_slos(
    longest: int, fits: bool
) -> None:
    batches = [
        batch("d0", resident("a", 1000), resident("b", longest)),
        batch("d1", resident("c", 4000)),
        batch("d2", resident("d", 5000)),
    ]
    assert can_be_emptied(batches[0], batches) is fits


def move(request_id: str = "a", source: str = "d0", destination: str = "d1") -> Move:
    return Move(request_id, source, destination, MigrationReason.RELIEVE)


def test_a_request_does_not_move_again_soon() -> None:
    recent = RecentMoves()
    recent.note(move(), 100.0)
    batches = [batch("d1", resident("a", 1000), resident("b", 1000))]
    (settled,) = recent.settled(batches, 105.0)
    assert [of.may_move for of in settled.residents] == [False, True]
    recent.forget(111.0)
    (settled,) = recent.settled(batches, 111.0)
    assert all(of.may_move for of in settled.residents)


def test_source_and_destination_are_left_alone_until_their_figures_are_new() -> None:
    recent = RecentMoves()
    recent.note(move(), 100.0)
    batches = [batch("d0"), batch("d1"), batch("d2")]
    assert [of.instance for of in recent.settled(batches, 101.0)] == ["d2"]
    assert len(recent.settled(batches, 102.0)) == 3


@pytest.mark.parametrize(("in_flight", "kept"), [({}, 2), ({"d0": 1}, 2), ({"d5": 3}, 1), ({"d5": 4}, 0)])
def test_few_moves_are_in_flight_at_a_time(in_flight: dict[str, int], kept: int) -> None:
    recent = RecentMoves()
    moves = [move("a", "d0", "d2"), move("b", "d0", "d3"), move("c", "d1", "d2"), move("d", "d4", "d3")]
    assert len(recent.within(moves, Counter(in_flight))) == kept
