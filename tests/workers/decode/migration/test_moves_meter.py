"""Counters of moves."""

from mooncake.messages.migration import PAUSE_BOUNDS_S
from workers.decode.migration.moves_meter import MovesMeter


def test_counts_outcomes_bytes_and_pauses_by_their_length() -> None:
    meter = MovesMeter()
    for outcome in ("moved", "back", "moved"):
        meter.ended(outcome)
    meter.copied(10)
    meter.copied(5)
    for pause_s in (0.0, PAUSE_BOUNDS_S[0], PAUSE_BOUNDS_S[0] * 1.01, PAUSE_BOUNDS_S[-1] * 2):
        meter.paused(pause_s)
    stats = meter.stats
    assert (stats.num_moves, stats.copied_bytes) == ({"moved": 2, "back": 1}, 15)
    assert stats.num_pauses[:3] == [2, 1, 0]
    assert stats.num_pauses[-1] == 1
    assert len(stats.num_pauses) == len(PAUSE_BOUNDS_S) + 1
    assert stats.pause_s == sum((PAUSE_BOUNDS_S[0], PAUSE_BOUNDS_S[0] * 1.01, PAUSE_BOUNDS_S[-1] * 2))
