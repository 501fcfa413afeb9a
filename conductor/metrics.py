"""The Conductor's metrics, read from its state at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.decision_metrics import decision_metrics
from conductor.event_stream import EventStream
from conductor.history import History
from conductor.lifecycle import RUNNING_STATES
from conductor.policy import Conductor
from conductor.prefix_index import PrefixIndex
from mooncake.instance_metrics import InstanceReport, instance_text
from mooncake.messages import Role


class ConductorMetrics(Collector):
    """Instances and requests; registers itself.

    `num_refused` counts connections to the Conductor that did not show the cluster's key. `streams` are the
    KV events that are followed, by messenger.
    """

    def __init__(
        self,
        conductor: Conductor,
        registry: CollectorRegistry,
        num_refused: Callable[[], int],
        streams: Callable[[], Mapping[str, EventStream]],
    ) -> None:
        self._conductor = conductor
        self._num_refused = num_refused
        self._streams = streams
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One sample a role, a state, an instance."""
        instances = GaugeMetricFamily("mooncake_instances", "registered instances", labels=["role"])
        for role in Role:
            instances.add_metric([role.value], len(self._conductor.instances.of_role(role)))
        yield instances

        requests = GaugeMetricFamily(
            "mooncake_requests_by_state", "accepted requests by state", labels=["state"]
        )
        counts = Counter(tracked.state for tracked in self._conductor.requests.values())
        for state in RUNNING_STATES:
            requests.add_metric([state.name.lower()], counts[state])
        yield requests

        assigned = GaugeMetricFamily(
            "mooncake_instance_assigned_tokens", "prompt tokens assigned to an instance", labels=["instance"]
        )
        for instance in self._conductor.instances:
            assigned.add_metric([instance.name], instance.num_assigned_tokens)
        yield assigned

        engines = GaugeMetricFamily(
            "mooncake_instance_engine",
            "1 for what computes: on CPUs the kernels' instruction set, or torch at about half their speed",
            labels=["instance", "engine"],
        )
        for instance in self._conductor.instances:
            engines.add_metric([instance.name, instance.registration.engine], 1)
        yield engines

        yield CounterMetricFamily(
            "mooncake_conductor_strangers",
            "connections that were closed because they did not show the cluster's key",
            self._num_refused(),
        )
        yield from decision_metrics(self._conductor.outcomes)
        yield from index_metrics(self._conductor.prefixes, self._streams())


class HistoryMetrics(Collector):
    """What has become of requests; registers itself."""

    def __init__(self, history: History, registry: CollectorRegistry) -> None:
        self._history = history
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One sample a reason, an end, a step."""
        history = self._history
        for name, text, label, counts in (
            (
                "mooncake_rejected_requests",
                "requests refused before any token",
                "reason",
                history.num_rejected,
            ),
            ("mooncake_ended_requests", "requests (choices) by their end", "outcome", history.num_ended),
            ("mooncake_request_steps", "steps that requests have been through", "step", history.num_steps),
            ("mooncake_request_step_seconds", "time that they took", "step", history.step_s),
        ):
            family = CounterMetricFamily(name, text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family


def index_metrics(prefixes: PrefixIndex, streams: Mapping[str, EventStream]) -> Iterator[Metric]:
    """What the prefix index knows of each pool, and how that came to be known."""
    yield GaugeMetricFamily(
        "mooncake_index_keys", "different blocks in the prefix index", prefixes.num_blocks
    )
    held = GaugeMetricFamily(
        "mooncake_index_blocks", "blocks in the prefix index by holder", labels=["instance", "tier"]
    )
    current = GaugeMetricFamily(
        "mooncake_index_current",
        "1 while every KV event that is known of has been applied",
        labels=["instance"],
    )
    batches = CounterMetricFamily(
        "mooncake_kv_event_batches", "batches of KV events applied", labels=["instance"]
    )
    gaps = CounterMetricFamily(
        "mooncake_kv_event_gaps", "times that live batches were missing and replayed", labels=["instance"]
    )
    snapshots = CounterMetricFamily(
        "mooncake_kv_event_snapshots", "snapshots of a pool's contents applied", labels=["instance"]
    )
    for name, stream in streams.items():
        for tier, num_blocks in prefixes.num_held(name).items():
            held.add_metric([name, tier.value], num_blocks)
        current.add_metric([name], stream.is_current)
        batches.add_metric([name], stream.num_batches)
        gaps.add_metric([name], stream.num_gaps)
        snapshots.add_metric([name], stream.num_snapshots)
    yield from (held, current, batches, gaps, snapshots)


def instances_text(conductor: Conductor, model_name: str) -> str:
    """What the instances said in their last heartbeats, in Prometheus' text format."""
    return instance_text(
        [
            InstanceReport(instance.name, instance.registration.capacity.num_device_pages, instance.heartbeat)
            for instance in conductor.instances
            if instance.heartbeat is not None
        ],
        model_name,
    )
