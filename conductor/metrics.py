"""The Conductor's metrics, read from its state at each scrape."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from conductor.lifecycle import RUNNING_STATES
from conductor.policy import Conductor
from mooncake.messages import Role


class ConductorMetrics(Collector):
    """Gauges of instances and requests; registers itself."""

    def __init__(self, conductor: Conductor, registry: CollectorRegistry) -> None:
        self._conductor = conductor
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
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
        free = GaugeMetricFamily(
            "mooncake_instance_free_device_pages", "free pages of the device's KVCache", labels=["instance"]
        )
        for instance in self._conductor.instances:
            assigned.add_metric([instance.name], instance.num_assigned_tokens)
            if instance.heartbeat is not None:
                free.add_metric([instance.name], instance.heartbeat.num_free_device_pages)
        yield assigned
        yield free
