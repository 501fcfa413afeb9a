"""Busy polls: when they are tried, and that no event is lost or late for them."""

import itertools
import socket
import time
from collections.abc import Iterator

import pytest

from messenger.transport.busy_poll import Backoff, BusyPollSelector
from tests.deadline import DEADLINE_S

POLL_S = 0.001


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def skipped(backoff: Backoff) -> int:
    """Sleeps until the next busy poll."""
    return next(number for number in itertools.count() if backoff.may_poll())


def test_polls_that_are_of_no_use_are_tried_half_as_often_until_one_is() -> None:
    backoff, nums_skipped = Backoff(), []
    for _ in range(9):
        nums_skipped.append(skipped(backoff))
        backoff.polled(was_useful=False, late_s=0.0)
    assert nums_skipped == [0, 1, 3, 7, 15, 31, 63, 64, 64]
    assert skipped(backoff) == 64
    backoff.polled(was_useful=True, late_s=-POLL_S)
    assert skipped(backoff) == 0


def test_a_sleep_that_was_brief_makes_the_next_poll_worth_it() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.polled(was_useful=False, late_s=0.0)
    backoff.slept_briefly()
    assert skipped(backoff) == 0


def test_where_others_have_the_processor_polls_are_rare_whether_of_use_or_not() -> None:
    backoff, nums_skipped = Backoff(), []
    for was_useful in (True, False, True):
        backoff.polled(was_useful=was_useful, late_s=0.01)
        backoff.slept_briefly()
        nums_skipped.append(skipped(backoff))
    assert nums_skipped == [4, 20, 64]


def test_an_event_during_a_busy_poll_is_returned(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    ticks = itertools.count()

    def now_s() -> float:
        if (tick := next(ticks)) == 3:
            far.send(b"1")
        return tick * POLL_S / 10

    with BusyPollSelector(POLL_S, now_s) as selector:
        key = selector.register(near, 1)
        assert [each for each, _ in selector.select()] == [key]
        assert next(ticks) < 10, "it has not polled on"


def test_an_event_after_a_busy_poll_is_waited_for(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    ticks = itertools.count()

    def now_s() -> float:
        if (tick := next(ticks)) == 11:  # the poll has ended at 10
            far.send(b"1")
        return tick * POLL_S / 10

    with BusyPollSelector(POLL_S, now_s) as selector:
        key = selector.register(near, 1)
        assert [each for each, _ in selector.select()] == [key]


@pytest.mark.parametrize("poll_s", [0.0, POLL_S])
def test_a_short_wait_is_no_busy_poll(poll_s: float) -> None:
    def now_s() -> float:
        raise AssertionError("it polls")

    with BusyPollSelector(poll_s, now_s) as selector:
        assert selector.select(0) == []
        assert selector.select(poll_s) == []


def test_a_busy_poll_counts_as_waiting() -> None:
    times = iter([0.0, *[DEADLINE_S] * 3])
    with BusyPollSelector(POLL_S, lambda: next(times)) as selector:
        begun_s = time.monotonic()
        assert selector.select(DEADLINE_S) == []
        assert time.monotonic() - begun_s < DEADLINE_S
