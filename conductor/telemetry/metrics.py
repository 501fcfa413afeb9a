"""The Conductor's metrics, read from its state at each scrape."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.index.event_stream import EventStream
from conductor.policy import Conductor
from conductor.requests.lifecycle import RUNNING_STATES
from conductor.telemetry.decision_metrics import decision_metrics
from conductor.telemetry.history import History
from conductor.telemetry.index_metrics import index_metrics
from conductor.telemetry.replication_metrics import replication_metrics
from mooncake.messages.instance_metrics import InstanceReport, instance_text
from mooncake.messages.workers import InstanceState, Role


class ConductorMetrics(Collector):
    """Instances, requests, decisions, and the prefix index; registers itself.

    `num_refused` counts connections to the Conductor that showed another key, or none, `num_unfinished`
    those that ended in the middle of their handshake. `streams` are the KV events that are followed, by
    messenger.
    """

    def __init__(
        self,
        conductor: Conductor,
        registry: CollectorRegistry,
        num_refused: Callable[[], int],
        num_unfinished: Callable[[], int],
        streams: Callable[[], Mapping[str, EventStream]],
    ) -> None:
        self._conductor = conductor
        self._num_refused, self._num_unfinished = num_refused, num_unfinished
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

        yield GaugeMetricFamily(
            "mooncake_requests_waiting_for_load",
            "accepted requests that wait for load to fall, while their TTFT SLO allows it",
            self._conductor.num_queued,
        )

        stages = GaugeMetricFamily(
            "mooncake_stage_load",
            "what is predicted of a stage's instances in relation to its SLO, on average",
            labels=["stage"],
        )
        for stage, load in self._conductor.stage_loads(time.monotonic()).items():
            stages.add_metric([stage], load)
        yield stages

        yield GaugeMetricFamily(
            "mooncake_kvcache_balancing_threshold",
            "how many times as long as the own prefix another one is to be fetched",
            self._conductor.view.balancing.threshold,
        )

        draining = GaugeMetricFamily(
            "mooncake_instance_draining", "1 for an instance that is given no more work", labels=["instance"]
        )
        for instance in self._conductor.instances:
            draining.add_metric([instance.name], instance.state is not InstanceState.SERVING)
        yield draining

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

        blocks = GaugeMetricFamily(
            "mooncake_context_cache_blocks",
            "blocks of context caches, and how many of them are pinned in some pool",
            labels=["state"],
        )
        contexts = self._conductor.contexts
        blocks.add_metric(["pinned"], contexts.num_pinned)
        blocks.add_metric(["missing"], contexts.num_blocks - contexts.num_pinned)
        yield blocks

        if (replication := self._conductor.replication) is not None:
            yield from replication_metrics(replication)

        yield CounterMetricFamily(
            "mooncake_conductor_strangers",
            "connections that were closed because they showed another key than the cluster's, or none",
            self._num_refused(),
        )
        yield CounterMetricFamily(
            "mooncake_conductor_unfinished_handshakes",
            "connections that ended in the middle of their handshake, with whatever key",
            self._num_unfinished(),
        )
        yield from decision_metrics(self._conductor.stats)
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
            ("mooncake_ended_requests", "requests (choices) by their end", "outcome", history.num_ended),
            ("mooncake_request_steps", "steps that requests have been through", "step", history.num_steps),
            ("mooncake_request_step_seconds", "time that they took", "step", history.step_s),
        ):
            family = CounterMetricFamily(name, text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family


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
