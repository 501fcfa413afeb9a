"""What a migration would take, and what is learned from requests that have moved."""

import pytest

from conductor.view.migration_costs import MigrationCost, migration_cost
from tests.conductor.transcript import Transcript

BLOCK_BYTES = 256


@pytest.fixture
def cluster() -> Transcript:
    """r is decoded by d0, with a prompt of 25 blocks, and gets a token in about 11 ms."""
    transcript = Transcript()
    for line in (
        "cluster decode=3 prefill_costs=0,0.01,0 decode_costs=0.01,0.001,0",
        "submit r tokens=100 max_tokens=500",
        "reserved r",
        "prefilled r",
        "at 0.01",
    ):
        transcript.run(line)
    return transcript


def cost(cluster: Transcript, destination: str = "d1") -> MigrationCost:
    tracked = cluster.conductor.requests["r"]
    view, instance = cluster.conductor.view, cluster.instance(destination)
    return migration_cost(view, tracked.request, tracked.placed, instance, cluster.now_s)


def test_blocks_that_the_destination_holds_do_not_travel(cluster: Transcript) -> None:
    assert cost(cluster).num_bytes == 25 * BLOCK_BYTES
    cluster.run("holds d1 20 prompt=r")
    assert cost(cluster).num_bytes == 5 * BLOCK_BYTES
    assert cost(cluster, "d2").num_bytes == 25 * BLOCK_BYTES


def test_the_output_travels_too_as_far_as_iterations_tell(cluster: Transcript) -> None:
    cluster.run("at 1.1")
    assert cost(cluster).num_bytes == pytest.approx(50 * BLOCK_BYTES, rel=0.05)
    cluster.run("at 1000")  # no output is longer than it may be
    assert cost(cluster).num_bytes == 150 * BLOCK_BYTES


def test_a_request_that_has_moved_teaches_how_long_it_was_decoded_in_all(cluster: Transcript) -> None:
    for line in (
        *(
            "at 1",
            "migrate r to=d1",
            "precopied r output=90",
            "prepared r tokens=188",
            "precopied r output=90",
        ),
        *("at 2", "handedover r output=92", "at 5", "finished r tokens=300"),
    ):
        cluster.run(line)
    assert cluster.conductor.view.forecast.decode_s == pytest.approx(5.0)
    assert cluster.stats.tbt.counts == [0] * len(cluster.stats.tbt.counts), "the prediction was d0's"
