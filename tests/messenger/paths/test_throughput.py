"""How fast a path is, from what came over it."""

import pytest

from messenger.paths.throughput import Throughput

MIB = 1 << 20


def test_nothing_is_known_before_something_has_moved() -> None:
    flow = Throughput()
    flow.begun(100, 0.0)
    assert (flow.pending_bytes, flow.bandwidth_bytes_per_s) == (100, None)
    flow.ended(100, 0.01, moved_bytes=100)
    assert (flow.pending_bytes, flow.bandwidth_bytes_per_s) == (0, None)  # too little to tell


def test_a_burst_is_a_sample_when_it_is_through() -> None:
    flow = Throughput()
    flow.begun(MIB, 5.0)
    flow.begun(MIB, 5.0)
    flow.ended(MIB, 5.005, moved_bytes=MIB)
    assert flow.bandwidth_bytes_per_s is None
    flow.ended(MIB, 5.01, moved_bytes=MIB)
    assert flow.bandwidth_bytes_per_s == pytest.approx(2 * MIB / 0.01)


def test_a_long_transfer_is_sampled_while_it_lasts() -> None:
    flow = Throughput()
    for _ in range(100):
        flow.begun(MIB, 0.0)
    for number in range(1, 101):
        flow.ended(MIB, number * 0.01, moved_bytes=MIB)
    assert flow.pending_bytes == 0
    assert flow.bandwidth_bytes_per_s == pytest.approx(100 * MIB)


def test_idle_time_does_not_count() -> None:
    flow = Throughput()
    for start_s in (0.0, 1000.0):
        flow.begun(MIB, start_s)
        flow.ended(MIB, start_s + 0.01, moved_bytes=MIB)
    assert flow.bandwidth_bytes_per_s == pytest.approx(100 * MIB)


def test_later_samples_weigh_more_than_earlier_ones() -> None:
    flow = Throughput()
    for number in range(20):
        flow.begun(MIB, float(number))
        flow.ended(MIB, number + (0.01 if number < 10 else 0.02), moved_bytes=MIB)
    assert flow.bandwidth_bytes_per_s is not None
    assert flow.bandwidth_bytes_per_s == pytest.approx(50 * MIB, rel=0.05)


def test_what_was_given_up_says_nothing() -> None:
    flow = Throughput()
    flow.begun(MIB, 0.0)
    flow.ended(MIB, 30.0, moved_bytes=0)
    assert flow.bandwidth_bytes_per_s is None  # and not 0: nobody could divide by it
    flow.begun(MIB, 40.0)
    flow.ended(MIB, 40.01, moved_bytes=MIB)
    known = flow.bandwidth_bytes_per_s
    flow.begun(MIB, 50.0)
    flow.ended(MIB, 50.1, moved_bytes=0)
    assert flow.bandwidth_bytes_per_s == known
    assert flow.pending_bytes == 0


def test_what_was_given_up_does_not_count_as_moved() -> None:
    flow = Throughput()
    flow.begun(MIB, 0.0)
    flow.begun(MIB, 0.0)
    flow.ended(MIB, 0.01, moved_bytes=0)
    flow.ended(MIB, 0.02, moved_bytes=MIB)
    assert flow.bandwidth_bytes_per_s == pytest.approx(50 * MIB)


def test_two_events_at_one_moment_divide_by_no_zero() -> None:
    flow = Throughput()
    flow.begun(MIB, 7.0)
    flow.ended(MIB, 7.0, moved_bytes=MIB)
    assert flow.bandwidth_bytes_per_s is not None


def test_small_transfers_are_a_sample_together() -> None:
    flow = Throughput()
    flow.begun(4096, 0.0)
    flow.ended(4096, 0.06, moved_bytes=4096)  # somebody was busy
    assert flow.bandwidth_bytes_per_s is None
    for number in range(1000):
        flow.begun(65536, 1.0 + number)
        flow.ended(65536, 1.0 + number + 1e-4, moved_bytes=65536)
    assert flow.bandwidth_bytes_per_s is not None
    assert flow.bandwidth_bytes_per_s > 100e6
