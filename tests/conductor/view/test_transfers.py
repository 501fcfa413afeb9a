"""Predicted times of fetches."""

import pytest

from conductor.view.transfers import GENERIC_BYTES_PER_S, LATENCY_S, SSD_BYTES_PER_S, TransferEstimator
from mooncake.messages.pools import PeerStats, PoolStats

SLOT_OF = {"a": 0, "b": 1, "b.1": 1, "c": 2}
MIB = float(1 << 20)


def pool(**peers: PeerStats) -> PoolStats:
    fields = dict.fromkeys(PoolStats.__struct_fields__, 0)
    return PoolStats(**{**fields, "peers": {name.replace("_", "."): peer for name, peer in peers.items()}})


def estimator() -> TransferEstimator:
    made = TransferEstimator()
    for slot in range(3):
        made.reset(slot)
    return made


def seconds(transfers: TransferEstimator, source: int, num_bytes: float, num_ssd_bytes: float = 0) -> float:
    first_s, byte_s = transfers.costs(source, num_ssd_bytes)
    return first_s + num_bytes * byte_s


def test_size_and_tier_count() -> None:
    transfers = estimator()
    assert seconds(transfers, 0, 0) == pytest.approx(LATENCY_S)
    assert seconds(transfers, 0, 5e8) == pytest.approx(LATENCY_S + 5e8 / GENERIC_BYTES_PER_S)
    from_ssd_s = seconds(transfers, 0, 5e8, 5e8) - seconds(transfers, 0, 5e8)
    assert from_ssd_s == pytest.approx(5e8 / SSD_BYTES_PER_S)


def test_a_congested_source_is_waited_for() -> None:
    transfers = estimator()
    transfers.learn(0, [pool(b=PeerStats(int(30e9), None, 1))], SLOT_OF)
    transfers.learn(2, [pool(b=PeerStats(int(10e9), None, 1))], SLOT_OF)
    assert seconds(transfers, 1, 0) == pytest.approx(LATENCY_S + 4.0)
    assert seconds(transfers, 0, 0) == pytest.approx(LATENCY_S + 3.0)
    transfers.learn(0, [pool()], SLOT_OF)  # the latest word counts
    assert seconds(transfers, 1, 0) == pytest.approx(LATENCY_S + 1.0)
    assert seconds(transfers, 0, 0) == pytest.approx(LATENCY_S)


def test_what_was_ordered_and_what_is_heard_are_the_same_bytes() -> None:
    transfers = estimator()
    transfers.ordered_bytes[1] += 20e9
    assert seconds(transfers, 1, 0) == pytest.approx(LATENCY_S + 2.0)
    transfers.learn(0, [pool(b=PeerStats(int(20e9), None, 1))], SLOT_OF)
    assert seconds(transfers, 1, 0) == pytest.approx(LATENCY_S + 2.0)


def test_the_bandwidth_of_a_source_is_learned_from_either_side() -> None:
    transfers = estimator()
    transfers.learn(0, [pool(b=PeerStats(0, 100 * MIB, 1))], SLOT_OF)
    assert seconds(transfers, 1, 100 * MIB) == pytest.approx(1.0 + LATENCY_S)
    assert seconds(transfers, 0, 100 * MIB) == pytest.approx(1.0 + LATENCY_S)
    for _ in range(30):
        transfers.learn(0, [pool(b=PeerStats(0, 400 * MIB, 1))], SLOT_OF)
    assert seconds(transfers, 1, 100 * MIB) == pytest.approx(0.25 + LATENCY_S, rel=0.01)


def test_a_source_without_fetches_is_expected_to_be_like_the_others() -> None:
    transfers = estimator()
    transfers.learn(0, [pool(b=PeerStats(0, 100 * MIB, 1))], SLOT_OF)
    assert seconds(transfers, 2, 100 * MIB) == pytest.approx(1.0 + LATENCY_S)
    transfers.reset(2)
    assert seconds(transfers, 2, 100 * MIB) == pytest.approx(1.0 + LATENCY_S)


def test_stages_of_an_instance_count_together_and_unknown_messengers_not() -> None:
    transfers = estimator()
    reports = [pool(b=PeerStats(10, None, 1), b_1=PeerStats(20, None, 1), x=PeerStats(500, None, 1))]
    transfers.learn(0, reports, SLOT_OF)
    assert transfers.in_flight_bytes.tolist() == [30, 30, 0]


def test_traffic_of_an_instance_that_has_left_is_forgotten_on_both_sides() -> None:
    transfers = estimator()
    transfers.learn(0, [pool(b=PeerStats(10, None, 1))], SLOT_OF)
    transfers.learn(1, [pool(c=PeerStats(7, None, 1))], SLOT_OF)
    transfers.reset(1)
    assert transfers.in_flight_bytes.tolist() == [0, 0, 0]
    transfers.learn(0, [pool()], SLOT_OF)
    assert transfers.in_flight_bytes.tolist() == [0, 0, 0]
