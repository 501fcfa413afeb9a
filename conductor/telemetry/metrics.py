"""The Conductor's metrics, read from its state at each scrape.

Owns: the names of these metrics. Does not know: the clock, how decisions are made, how the index is kept.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import nlargest
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from conductor.admission.quotas import Quotas
from conductor.elasticity.control import Elasticity
from conductor.index.event_stream import EventStream
from conductor.index.prefix_index import PrefixIndex
from conductor.performance.utilisation import Utilisation
from conductor.policy import Conductor
from conductor.replication.copies import Replication
from conductor.requests.lifecycle import OPEN_STATES
from conductor.settings import Limits
from conductor.telemetry.families import counters, gauges
from conductor.telemetry.history import History
from conductor.telemetry.instances import instance_metrics
from conductor.view.cluster_view import ClusterView
from conductor.view.decision_stats import (
    ERROR_BOUNDS_S,
    DecisionStats,
    Errors,
    MigrationOutcome,
    MigrationReason,
    MigrationStats,
)
from conductor.view.placement import Reuse
from conductor.view.rejection import Reason
from mooncake.messages.instance_metrics import InstanceReport, instance_text
from mooncake.messages.workers import SPOKEN

MAX_TENANTS = 256
"""The most tenants that have samples of their own: those with the most charged tokens."""


class ConductorMetrics(Collector):
    """Metrics of instances, requests, decisions and the prefix index. The constructor registers them.

    Args:
        conductor: The policy whose state is read.
        registry: The registry of the metrics.
        now_s: A function that returns the time.
        num_refused: A function that returns the number of connections to the Conductor with a wrong cluster
            key, or with none.
        num_unfinished: A function that returns the number of connections that ended in the middle of their
            handshake.
        streams: A function that returns the followed event streams, by messenger.
    """

    def __init__(
        self,
        conductor: Conductor,
        registry: CollectorRegistry,
        now_s: Callable[[], float],
        num_refused: Callable[[], int],
        num_unfinished: Callable[[], int],
        streams: Callable[[], Mapping[str, EventStream]],
    ) -> None:
        self._conductor, self._now_s = conductor, now_s
        self._num_refused, self._num_unfinished = num_refused, num_unfinished
        self._streams = streams
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families of the Conductor's state."""
        conductor = self._conductor
        yield from instance_metrics(conductor)
        states = Counter(tracked.state for tracked in conductor.requests.values())
        yield gauges(
            "mooncake_requests_by_state",
            "accepted requests by state; queued: in the admission queue",
            "state",
            {state.name.lower(): states[state] for state in OPEN_STATES},
        )
        yield GaugeMetricFamily(
            "mooncake_requests_waiting_for_load",
            "accepted requests that wait for load to fall, while their TTFT SLO allows it",
            conductor.num_queued,
        )
        versions = GaugeMetricFamily(
            "mooncake_protocol_version_peers",
            "fronts and instances by the version of the protocol that the conductor speaks with them",
            labels=["kind", "version"],
        )
        for kind, counts in conductor.versions.items():
            for version in range(SPOKEN.oldest, SPOKEN.newest + 1):
                versions.add_metric([kind, str(version)], counts[version])
        yield versions
        yield gauges(
            "mooncake_stage_load",
            "what is predicted of a stage's instances in relation to its SLO, on average",
            "stage",
            stage_loads(conductor.view, conductor.limits, self._now_s()),
        )
        yield GaugeMetricFamily(
            "mooncake_kvcache_balancing_threshold",
            "how many times as long as the own prefix another one is to be fetched",
            conductor.view.balancing.threshold,
        )
        contexts = conductor.contexts
        yield gauges(
            "mooncake_context_cache_blocks",
            "blocks of context caches, and how many of them are pinned in some pool",
            "state",
            {"pinned": contexts.num_pinned, "missing": contexts.num_blocks - contexts.num_pinned},
        )
        yield from elasticity_metrics(conductor.elasticity, conductor.view.utilisation)
        if conductor.replication is not None:
            yield from replication_metrics(conductor.replication)
        yield CounterMetricFamily(
            "mooncake_conductor_unauthenticated_connections",
            "connections that were closed because they showed another key than the cluster's, or none",
            self._num_refused(),
        )
        yield CounterMetricFamily(
            "mooncake_conductor_unfinished_handshakes",
            "connections that ended in the middle of their handshake, with whatever key",
            self._num_unfinished(),
        )
        yield from decision_metrics(conductor.stats)
        yield from quota_metrics(conductor.quotas, self._now_s())
        yield from migration_metrics(conductor.stats.migrations, len(conductor.migrations.in_progress))
        yield from index_metrics(conductor.prefixes, self._streams())


class HistoryMetrics(Collector):
    """Metrics of the ends of requests and of the seconds of their steps. The constructor registers them."""

    def __init__(self, history: History, registry: CollectorRegistry) -> None:
        self._history = history
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families of the history."""
        history = self._history
        yield counters(
            "mooncake_ended_requests", "requests (choices) by their end", "outcome", history.num_ended
        )
        yield counters(
            "mooncake_request_steps", "steps that requests have been through", "step", history.num_steps
        )
        yield counters("mooncake_request_step_seconds", "time that they took", "step", history.step_s)


def stage_loads(view: ClusterView, limits: Limits, now_s: float) -> dict[str, float]:
    """Return the load of each stage (Mooncake, section 7.1).

    The load is the mean predicted time of the stage's instances divided by the stage's SLO. A stage without
    an SLO or without instances is left out.
    """
    loads, of_stages = view.loads, dict[str, float]()
    if limits.ttft_slo_s is not None and loads.is_prefill.any():
        of_stages["prefill"] = float(loads.queue_s(now_s)[loads.is_prefill].mean()) / limits.ttft_slo_s
    if limits.tbt_slo_s is not None and loads.is_decode.any():
        slots = loads.is_decode.nonzero()[0].tolist()
        tbts_s = [
            view.tbt_s(slot, num_decoding, loads.num_decoding_tokens.item(slot))
            for slot in slots
            if (num_decoding := loads.num_decoding.item(slot))
        ]
        of_stages["decode"] = sum(tbts_s) / len(slots) / limits.tbt_slo_s
    return of_stages


def decision_metrics(stats: DecisionStats) -> Iterator[Metric]:
    """Yield the numbers of placements, rejections and fetches, and the errors of predictions."""
    yield counters(
        "mooncake_placements",
        "requests that were given a pair of instances, by where the prefix that is reused comes from",
        "prefix",
        {reuse.value: stats.num_placements[reuse] for reuse in Reuse},
    )
    yield counters(
        "mooncake_rejections",
        "requests that were rejected, by the limit or SLO that they would have missed",
        "reason",
        {reason.value: stats.num_rejections[reason] for reason in Reason},
    )
    yield CounterMetricFamily(
        "mooncake_preemptions",
        "requests that were preempted before they began, or rejected in favour of others",
        stats.num_preempted,
    )
    yield CounterMetricFamily(
        "mooncake_ordered_fetches",
        "prefixes that prefill instances were told to fetch from others",
        stats.num_fetches,
    )
    yield CounterMetricFamily(
        "mooncake_ordered_fetch_blocks",
        "blocks of those that the prefill instance was believed to lack",
        stats.num_fetched_blocks,
    )
    seconds = CounterMetricFamily(
        "mooncake_predictions_seconds",
        "sums over requests: what was predicted at placement, and what it was",
        labels=["of", "kind"],
    )
    for of, errors in (("ttft", stats.ttft), ("tbt", stats.tbt)):
        seconds.add_metric([of, "predicted"], errors.predicted_s)
        seconds.add_metric([of, "actual"], errors.actual_s)
    yield seconds
    yield _histogram("mooncake_ttft_prediction_error_seconds", "from placement to first token", stats.ttft)
    yield _histogram("mooncake_tbt_prediction_error_seconds", "of a request's mean TBT", stats.tbt)


def quota_metrics(quotas: Quotas, now_s: float) -> Iterator[Metric]:
    """Yield the charged and remaining tokens of tenants with a token limit.

    If there are more than `MAX_TENANTS` such tenants, only those with the most charged tokens are shown.
    """
    shown = nlargest(MAX_TENANTS, quotas.by_tenant.items(), key=lambda entry: entry[1].num_charged)
    yield gauges(
        "mooncake_tenant_tokens_left",
        "tokens that a tenant may use at once; less than 0: it waits, as its outputs were longer",
        "tenant",
        {tenant: tokens.left(now_s) for tenant, tokens in shown},
    )
    charged = CounterMetricFamily(
        "mooncake_tenant_tokens",
        "tokens of prompts and outputs that were charged to a tenant, and refunded for rejected requests",
        labels=["tenant", "kind"],
    )
    for tenant, tokens in shown:
        charged.add_metric([tenant, "charged"], tokens.num_charged)
        charged.add_metric([tenant, "refunded"], tokens.num_refunded)
    yield charged


def migration_metrics(migrations: MigrationStats, num_in_progress: int) -> Iterator[Metric]:
    """Yield the numbers of migrations, and their seconds, copied bytes and recomputed tokens."""
    yield GaugeMetricFamily(
        "mooncake_migrations_in_progress",
        "running requests that move to another decode instance",
        num_in_progress,
    )
    ended = CounterMetricFamily(
        "mooncake_migrations",
        "migrations that have ended, by why they began and how they ended; moved: on the destination",
        labels=["reason", "outcome"],
    )
    for reason in MigrationReason:
        for outcome in MigrationOutcome:
            ended.add_metric([reason.value, outcome.value], migrations.num_ended[reason, outcome])
    yield ended
    yield CounterMetricFamily(
        "mooncake_migration_seconds",
        "time from the beginning of migrations to the hand-over; meanwhile the source goes on decoding",
        migrations.seconds,
    )
    yield CounterMetricFamily(
        "mooncake_migration_copied_bytes",
        "KVCache that destinations of migrations have loaded and did not hold before",
        migrations.num_copied_bytes,
    )
    yield CounterMetricFamily(
        "mooncake_migration_recomputed_tokens",
        "tokens that destinations of migrations computed again, as they were in no full block",
        migrations.num_recomputed_tokens,
    )


def index_metrics(prefixes: PrefixIndex, streams: Mapping[str, EventStream]) -> Iterator[Metric]:
    """Yield the numbers of blocks in the prefix index by pool, and of applied KV events."""
    yield GaugeMetricFamily(
        "mooncake_index_keys", "different blocks in the prefix index", prefixes.num_blocks
    )
    held = GaugeMetricFamily(
        "mooncake_index_blocks", "blocks in the prefix index by holder", labels=["instance", "tier"]
    )
    for name in streams:
        for tier, num_blocks in prefixes.num_held(name).items():
            held.add_metric([name, tier.value], num_blocks)
    yield held
    yield gauges(
        "mooncake_index_current",
        "1 while every KV event that is known of has been applied",
        "instance",
        {name: stream.is_current for name, stream in streams.items()},
    )
    yield counters(
        "mooncake_kv_event_batches",
        "batches of KV events applied",
        "instance",
        {name: stream.num_batches for name, stream in streams.items()},
    )
    yield counters(
        "mooncake_kv_event_gaps",
        "times that live batches were missing and replayed",
        "instance",
        {name: stream.num_gaps for name, stream in streams.items()},
    )
    yield counters(
        "mooncake_kv_event_snapshots",
        "snapshots of a pool's contents applied",
        "instance",
        {name: stream.num_snapshots for name, stream in streams.items()},
    )


def replication_metrics(replication: Replication) -> Iterator[Metric]:
    """Yield the numbers of copies of hot prefixes, and of the blocks ordered and dropped for them."""
    yield GaugeMetricFamily(
        "mooncake_replication_copies",
        "copies of hot prefixes that were ordered ahead and have come",
        replication.num_copies,
    )
    yield CounterMetricFamily(
        "mooncake_replication_ordered_blocks",
        "blocks of hot prefixes that prefill instances were told to fetch ahead",
        replication.num_ordered_blocks,
    )
    yield CounterMetricFamily(
        "mooncake_replication_dropped_blocks",
        "blocks of such copies that were dropped again, as others hold them and few ask for them",
        replication.num_dropped_blocks,
    )


def instances_text(conductor: Conductor, model_name: str) -> str:
    """Return the values of the instances' latest heartbeats in Prometheus' text format."""
    return instance_text(
        [
            InstanceReport(instance.name, instance.num_device_pages, instance.heartbeat)
            for instance in conductor.instances
            if instance.heartbeat is not None
        ],
        model_name,
    )


def _histogram(name: str, of: str, errors: Errors) -> Metric:
    bounds = [*map(floatToGoString, ERROR_BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(errors.counts)), strict=True))
    return HistogramMetricFamily(
        name, f"predicted against actual, {of}: the difference", buckets, errors.sum_s
    )


def elasticity_metrics(elasticity: Elasticity, utilisation: Utilisation) -> Iterator[Metric]:
    """Yield all metric families of elasticity.

    The families of desired instances and of decisions are empty without a rebalancer.
    """
    used = GaugeMetricFamily(
        "mooncake_instance_utilisation",
        "share of an instance that was really used: computing time, and bytes of KVCache",
        labels=["instance", "resource"],
    )
    for name, shares in utilisation.by_name().items():
        used.add_metric([name, "compute"], shares.compute)
        used.add_metric([name, "memory"], shares.memory)
    yield used
    rebalancer = elasticity.rebalancer
    yield gauges(
        "mooncake_desired_instances",
        "instances that the load needs within its SLOs, for autoscalers",
        "role",
        rebalancer.desired if rebalancer is not None else {},
    )
    yield counters(
        "mooncake_rebalancer_decisions",
        "changes of roles that were decided",
        "role",
        rebalancer.num_decided.copy() if rebalancer is not None else {},
    )
