"""The Conductor's metrics: its own state, its decisions, the prefix index."""

import pytest
from prometheus_client import CollectorRegistry

from conductor.index.event_stream import EventStream
from conductor.index.prefix_index import PrefixIndex
from conductor.settings import Limits
from conductor.telemetry.history import History
from conductor.telemetry.metrics import (
    ConductorMetrics,
    HistoryMetrics,
    decision_metrics,
    index_metrics,
    migration_metrics,
    stage_loads,
)
from conductor.view.cluster_view import ClusterView
from conductor.view.decision_stats import DecisionStats
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import Cancel, Submit
from mooncake.messages.kv_events import KVEvents, KVSnapshot, KVStored, ReplayDone
from mooncake.messages.pools import Tier
from mooncake.messages.workers import Role
from tests.conductor.replication.test_copies import Cluster
from tests.conductor.small_cluster import FRONT, new_conductor, request
from tests.conductor.transcript import Transcript


def test_unauthenticated_peers_of_the_conductor_are_counted() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(new_conductor(), registry, lambda: 0.0, lambda: 7, lambda: 3, dict)
    assert registry.get_sample_value("mooncake_conductor_unauthenticated_connections_total") == 7
    assert registry.get_sample_value("mooncake_conductor_unfinished_handshakes_total") == 3


def test_requests_in_the_admission_queue_are_told_from_those_that_wait_for_an_instance() -> None:
    conductor = new_conductor(Limits(ttft_slo_s=9.0, tbt_slo_s=0.00515, max_waiting=1))
    for request_id in ("runs", "queued"):
        conductor.handle(FRONT, Submit(request(request_id)), 1.0)
    registry = CollectorRegistry()
    ConductorMetrics(conductor, registry, lambda: 1.0, lambda: 0, lambda: 0, dict)
    value = registry.get_sample_value
    states = ("reserving", "queued", "waiting")
    assert [value("mooncake_requests_by_state", {"state": state}) for state in states] == [1, 1, 0]
    assert value("mooncake_requests_waiting_for_load") == 1


def test_migrations_are_told_by_reason_and_outcome() -> None:
    transcript = Transcript()
    for line in (
        *(
            "cluster decode=2",
            "submit r tokens=100 max_tokens=50",
            "reserved r",
            "prefilled r",
            "holds d1 20 prompt=r",
        ),
        *("migrate r to=d1", "precopied r output=5", "at 2", "prepared r tokens=104", "precopied r output=6"),
        *("handedover r output=8", "migrate r to=d0"),
    ):
        transcript.run(line)
    families = {family.name: family for family in migration_metrics(transcript.stats.migrations, 1)}
    ended = families["mooncake_migrations"].samples
    assert {tuple(sample.labels.values()): sample.value for sample in ended if sample.value} == {
        ("by_hand", "moved"): 1
    }
    totals = {name: family.samples[0].value for name, family in families.items()}
    assert totals["mooncake_migrations_in_progress"] == 1
    assert totals["mooncake_migration_seconds"] == 2
    assert totals["mooncake_migration_copied_bytes"] == 6 * 256  # 26 blocks, of which 20 were held
    assert totals["mooncake_migration_recomputed_tokens"] == 4


def test_what_computes_is_told_by_instance() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(new_conductor(), registry, lambda: 0.0, lambda: 0, lambda: 0, dict)
    assert registry.get_sample_value("mooncake_instance_engine", {"instance": "p0", "engine": "cpu"}) == 1


def test_ends_and_steps_of_requests_are_told() -> None:
    conductor, history, registry = (
        new_conductor(Limits(max_running_requests=1)),
        History(),
        CollectorRegistry(),
    )
    HistoryMetrics(history, registry)
    for number, request_id in enumerate(("a", "b", "c")):
        message, now_s = Submit(request(request_id)), float(number)
        history.observe(FRONT, message, conductor.handle(FRONT, message, now_s), now_s)
    cancel = Cancel("a")
    history.observe(FRONT, cancel, conductor.handle(FRONT, cancel, 5.0), 5.0)
    for outcome, expected in {"rejected": 2, "aborted": 1, "refused": 0, "failed": 0}.items():
        assert registry.get_sample_value("mooncake_ended_requests_total", {"outcome": outcome}) == expected
    for step, (num, seconds) in {"queued": (3, 0), "reserving": (1, 5), "decoding": (0, 0)}.items():
        assert registry.get_sample_value("mooncake_request_steps_total", {"step": step}) == num
        assert registry.get_sample_value("mooncake_request_step_seconds_total", {"step": step}) == seconds


class Decisions:
    """Collects what `decision_metrics` yields."""

    def __init__(self, stats: DecisionStats) -> None:
        self._stats = stats

    def collect(self) -> object:
        return decision_metrics(self._stats)


def scraped(transcript: Transcript) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Decisions(transcript.stats))  # type: ignore[arg-type]
    return registry


def test_predictions_are_compared_with_what_happened() -> None:
    transcript = Transcript()
    for line in (
        "cluster prefill_costs=0,0.01,0 decode_costs=0.01,0.01,0 ttft_slo=3",
        "holds p0 5",
        "holds d0 10",
        "submit r1 tokens=100 prompt=a",  # 1 ms for 5 blocks of d0, 600 ms for 60 tokens; 20 ms for a token
        "submit r2 tokens=300 prompt=b",
        "reserved r1",
        "at 0.851",
        "prefilled r1 cached=40",
        "at 1.851",
        "finished r1 tokens=11",
    ):
        transcript.run(line)
    registry = scraped(transcript)
    value = registry.get_sample_value
    assert value("mooncake_placements_total", {"prefix": "remote"}) == 1
    assert value("mooncake_placements_total", {"prefix": "local"}) == 0
    assert value("mooncake_rejections_total", {"reason": "ttft_slo_s"}) == 1
    assert value("mooncake_ordered_fetches_total") == 1
    assert value("mooncake_ordered_fetch_blocks_total") == 5
    predicted = value("mooncake_predictions_seconds_total", {"of": "ttft", "kind": "predicted"})
    assert predicted == pytest.approx(0.601, abs=1e-4)
    assert value("mooncake_ttft_prediction_error_seconds_sum") == pytest.approx(0.25, abs=1e-4)
    assert value("mooncake_ttft_prediction_error_seconds_bucket", {"le": "0.2"}) == 0
    assert value("mooncake_ttft_prediction_error_seconds_bucket", {"le": "0.5"}) == 1
    assert value("mooncake_ttft_prediction_error_seconds_count") == 1
    assert value("mooncake_tbt_prediction_error_seconds_sum") == pytest.approx(0.08)


def test_an_inlined_prompt_is_no_fetch_whatever_its_pool_turns_out_to_hold() -> None:
    transcript = Transcript()
    for line in (
        "cluster prefill=0 decode=0 both=1",
        "submit r1 tokens=100 prompt=a",
        "reserved r1 held=25",
        "prefilled r1 cached=96",
    ):
        transcript.run(line)
    value = scraped(transcript).get_sample_value
    assert value("mooncake_placements_total", {"prefix": "none"}) == 1
    assert value("mooncake_ordered_fetches_total") == 0
    assert value("mooncake_ordered_fetch_blocks_total") == 0


def test_the_index_is_told_by_the_pools_that_are_followed() -> None:
    prefixes, streams = PrefixIndex(), {name: EventStream(name, 1) for name in ("p0.0", "p0.1")}
    prefixes.add_instance("p0", list(streams))
    stored = KVStored(Tier.SSD, [bytes(16), bytes(15) + b"1"])
    prefixes.apply("p0.0", [stored, KVStored(Tier.DRAM, [bytes(16)])])
    stream = streams["p0.0"]
    stream.tick(0.0)
    stream.receive(KVSnapshot("p0.0", 1, 4, Tier.DRAM, [], is_last=True), 0.0)
    stream.receive(KVEvents("p0.0", 1, 6, []), 0.0)
    stream.receive(ReplayDone("p0.0", 1, 5), 0.0)
    stream.receive(KVEvents("p0.0", 1, 5, []), 0.0)
    samples = {
        (sample.name.removeprefix("mooncake_"), *sorted(sample.labels.values())): sample.value
        for family in index_metrics(prefixes, streams)
        for sample in family.samples
    }
    assert samples == {
        ("index_keys",): 2,
        ("index_blocks", "dram", "p0.0"): 1,
        ("index_blocks", "p0.0", "ssd"): 2,
        ("index_blocks", "dram", "p0.1"): 0,
        ("index_blocks", "p0.1", "ssd"): 0,
        ("index_blocks", "device", "p0.0"): 0,
        ("index_blocks", "device", "p0.1"): 0,
        ("index_current", "p0.0"): 1,
        ("index_current", "p0.1"): 0,
        ("kv_event_batches_total", "p0.0"): 2,
        ("kv_event_batches_total", "p0.1"): 0,
        ("kv_event_gaps_total", "p0.0"): 0,
        ("kv_event_gaps_total", "p0.1"): 0,
        ("kv_event_snapshots_total", "p0.0"): 1,
        ("kv_event_snapshots_total", "p0.1"): 0,
    }


LIMITS = Limits(ttft_slo_s=4.0, tbt_slo_s=0.1)


@pytest.fixture
def view() -> ClusterView:
    cluster = Cluster()
    cluster.view = ClusterView(profiled=(Costs(0.0, 0.01, 0.0), Costs(0.02, 0.01, 0.0)))
    for name in ("p0", "p1"):
        cluster.add(name)
    for name in ("d0", "d1"):
        cluster.add(name, Role.DECODE)
    return cluster.view


def slot(view: ClusterView, name: str) -> int:
    found = view.slot_of(name)
    assert found is not None
    return found


def test_loads_are_means_over_the_instances_of_a_stage(view: ClusterView) -> None:
    assert stage_loads(view, LIMITS, 0.0) == {"prefill": 0.0, "decode": 0.0}
    view.loads.assign_prefill(slot(view, "p0"), "r", 4.0)
    view.loads.order_prefill(slot(view, "p0"), "r", 30.0, 100.0)
    assert stage_loads(view, LIMITS, 102.0)["prefill"] == pytest.approx((2.0 + 0.0) / 2 / 4.0)
    for _ in range(3):
        view.loads.assign_decode(slot(view, "d1"), 8)
        view.loads.begin_decode(slot(view, "d1"), 8)
    view.loads.assign_decode(slot(view, "d0"), 8)
    assert stage_loads(view, LIMITS, 0.0)["decode"] == pytest.approx((0.0 + 0.05) / 2 / 0.1), (
        "what is decoded now"
    )


def test_a_step_takes_what_those_in_the_batches_take(view: ClusterView) -> None:
    for name in ("d0", "d1"):
        for _ in range(4):
            view.loads.assign_decode(slot(view, name), 8)
            view.loads.begin_decode(slot(view, name), 8)
    assert view.mean_iteration_s() == pytest.approx(0.02 + 4 * 0.01)
    view.loads.set_awaiting_turn(slot(view, "d0"), 2)
    assert view.mean_iteration_s() == pytest.approx(0.02 + 3 * 0.01), "two wait for their turn"


def test_a_stage_without_an_slo_or_instances_has_no_load(view: ClusterView) -> None:
    assert stage_loads(view, Limits(), 0.0) == {}
    assert stage_loads(ClusterView(), LIMITS, 0.0) == {}
