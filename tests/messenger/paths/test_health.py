"""When a path is left alone, and for how long."""

import pytest

from messenger.paths.health import FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_USELESS_LANES, PathHealth
from messenger.transport.transports import Remedy


def lost(standing: PathHealth, now_s: float, remedy: Remedy | None, **facts: bool) -> bool:
    held_s = 1.0 if not facts.pop("held_long", False) else 2 * LONGEST_PAUSE_S
    return standing.lost(now_s, held_s, remedy, **{"was_asked": True, "has_answered": False, **facts})


def test_a_device_in_trouble_benches_its_path_at_once_for_longer_each_time() -> None:
    standing, pauses_s = PathHealth(), []
    now_s = 100.0
    for _ in range(8):
        assert lost(standing, now_s, Remedy.OTHER_PATH)
        pauses_s.append(standing.pause_s(now_s))
        now_s += pauses_s[-1]
    assert pauses_s[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses_s[-1] == LONGEST_PAUSE_S


@pytest.mark.parametrize("remedy", [Remedy.RETRY, Remedy.GIVE_UP, None])
def test_lanes_that_never_answer_bench_their_path(remedy: Remedy | None) -> None:
    standing = PathHealth()
    outcomes = [lost(standing, n, remedy) for n in range(MOST_USELESS_LANES)]
    assert outcomes == [False] * (MOST_USELESS_LANES - 1) + [True]


def test_a_lane_that_was_of_use_or_was_not_asked_is_no_reason() -> None:
    standing = PathHealth()
    for n in range(4 * MOST_USELESS_LANES):
        facts = {"was_asked": False} if n % 2 else {"has_answered": True}
        assert not lost(standing, n, Remedy.RETRY, **facts)
    assert standing.pause_s(100.0) == 0


def test_lanes_that_fall_together_count_once() -> None:
    standing = PathHealth()
    assert lost(standing, 100.0, Remedy.OTHER_PATH)
    assert not lost(standing, 100.1, Remedy.OTHER_PATH)
    standing.failed(100.1)
    assert standing.pause_s(100.0) == FIRST_PAUSE_S


def test_a_path_that_has_held_for_long_begins_anew() -> None:
    standing = PathHealth()
    standing.failed(0.0)
    standing.failed(FIRST_PAUSE_S)
    assert lost(standing, 1000.0, Remedy.OTHER_PATH, has_answered=True, held_long=True)
    assert standing.pause_s(1000.0) == FIRST_PAUSE_S
