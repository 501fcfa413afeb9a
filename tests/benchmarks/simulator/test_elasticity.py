"""Simulated clusters that follow their load: roles change, requests migrate, instances join and leave."""

import itertools
from collections.abc import Iterator

import msgspec

from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.requests import Outcome, Results, SimulatedRequest
from benchmarks.tools.simulator.setup import Join, Leave, Setup, simulate
from benchmarks.tools.traces.phases import Phase, in_phases
from benchmarks.tools.traces.request import TraceRequest
from conductor.view.decision_stats import MigrationOutcome, MigrationReason
from mooncake.messages.migration import Prepare
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import Abort, Role
from tests.benchmarks.simulator.loads import SMALL, conversations

STRICT = msgspec.structs.replace(SMALL, pool_tokens=None, ttft_slo_s=4.0, tbt_slo_s=0.025, block_tokens=128)
LONG_PROMPTS, LONG_ANSWERS = Phase(60.0, 6.9, 4096, 128), Phase(60.0, 8.0, 1024, 1024)


def load(*phases: Phase, seed: int = 1) -> Iterator[TraceRequest]:
    """Each phase once."""
    end_s = sum(phase.duration_s for phase in phases)
    return itertools.takewhile(lambda request: request.arrival_s < end_s, in_phases(phases, 1.0, seed))


def run(setup: Setup, requests: Iterator[TraceRequest]) -> tuple[DisaggregatedCluster, Results]:
    cluster = setup.cluster()
    assert isinstance(cluster, DisaggregatedCluster)
    ended: list[SimulatedRequest] = []
    end = cluster.results.end

    def note(request: SimulatedRequest, outcome: Outcome, now_s: float) -> None:
        end(request, outcome, now_s)
        if outcome is Outcome.FINISHED:
            ended.append(request)

    cluster.results.end = note  # type: ignore[method-assign]  # the gaps are not kept
    results = cluster.run(requests)
    for request in ended:
        assert sum(number for number, _ in request.gaps) == request.num_output_tokens - 1
        assert all(seconds > 0 for _, seconds in request.gaps)
    return cluster, results


def num_moved(cluster: DisaggregatedCluster, reason: MigrationReason) -> int:
    return cluster.conductor.stats.migrations.num_ended[reason, MigrationOutcome.MOVED]


def test_roles_follow_a_load_that_changes() -> None:
    phases = LONG_PROMPTS, LONG_ANSWERS
    rebalancing = msgspec.structs.replace(STRICT, rebalancing=True)
    static, _ = simulate(STRICT, load(*phases))
    follows, _ = simulate(rebalancing, load(*phases))
    assert follows.summary.num_effective > 1.1 * static.summary.num_effective
    assert follows.conductor is not None
    assert 2 <= follows.conductor["num_switches"] <= 3  # to 3P+1D, and then to 1P+3D
    again, _ = simulate(rebalancing, load(*phases))
    assert again.summary == follows.summary


def test_bursts_that_are_soon_over_cost_nothing() -> None:
    few, burst = Phase(50.0, 4.0, 1024, 1024), Phase(10.0, 16.0, 4096, 128)
    phases = [few, burst] * 4
    static, _ = simulate(STRICT, load(*phases))
    follows, _ = simulate(msgspec.structs.replace(STRICT, rebalancing=True), load(*phases))
    assert follows.summary.num_effective >= 0.97 * static.summary.num_effective


def test_roles_stay_where_the_load_does() -> None:
    rebalancing = msgspec.structs.replace(STRICT, rebalancing=True)
    steady, _ = simulate(rebalancing, load(Phase(60.0, 6.0, 2048, 300)))
    assert steady.conductor is not None
    assert steady.conductor["num_switches"] == 0


def test_an_instance_leaves_and_no_request_is_lost() -> None:
    leaving = msgspec.structs.replace(SMALL, leaves=(Leave(5.0, "decode-0"), Leave(8.0, "prefill-1")))
    cluster, results = run(leaving, iter(conversations(250, rate_per_s=20.0, seed=1)))
    assert results.num(Outcome.FINISHED) == 250
    assert num_moved(cluster, MigrationReason.DRAIN) > 0
    assert [instance.node.name for instance in cluster.instances] == ["prefill-0", "decode-1"]


def test_an_instance_joins_and_gets_requests() -> None:
    joined = msgspec.structs.replace(SMALL, joins=(Join(3.0, Role.DECODE), Join(3.0, Role.PREFILL)))
    cluster, results = run(joined, iter(conversations(250, rate_per_s=20.0, seed=1)))
    assert results.num(Outcome.FINISHED) == 250
    assert len(cluster.prefills) == len(cluster.decodes) == 3
    assert cluster.prefills[-1].busy_s > 0
    assert cluster.decodes[-1].busy_s > 0


def test_requests_that_migrate_have_one_long_gap_at_most() -> None:
    leaving = msgspec.structs.replace(STRICT, leaves=(Leave(20.0, "decode-0"),))
    cluster, results = run(leaving, load(Phase(60.0, 4.0, 2048, 400)))
    assert num_moved(cluster, MigrationReason.DRAIN) >= 8
    assert results.num(Outcome.FAILED) == 0
    finished = results["outcome"] == Outcome.FINISHED
    assert finished.sum() > 0.9 * len(results)
    assert results["tbt_s"][finished].max() < 0.03


def test_a_destination_prepares_for_a_request_that_has_just_ended() -> None:
    cluster = STRICT.cluster()
    assert isinstance(cluster, DisaggregatedCluster)
    source, destination = cluster.decodes
    request = Request("ended", [1] * 300, [b"1", b"2"], SamplingParams(max_tokens=8), reply_to="")
    ref = Ref(1, "ended", 1)
    destination.receive(Prepare(ref, request, source.node.shards, 1.0))
    assert destination.migrating.num_held_tokens == 300
    destination.receive(Abort(ref))
    assert destination.migrating.num_held_tokens == destination.migrating.num_held == 0
