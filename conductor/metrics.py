"""The Conductor's metrics, read from its state at each scrape."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.lifecycle import RUNNING_STATES
from conductor.policy import Conductor
from mooncake.messages import Role


class ConductorMetrics(Collector):
    """Instances, requests, and the instances' pools; registers itself."""

    def __init__(self, conductor: Conductor, registry: CollectorRegistry) -> None:
        self._conductor = conductor
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
        yield from self._reported()

    def _reported(self) -> Iterator[Metric]:
        """What the instances said in their last heartbeats."""
        free = GaugeMetricFamily(
            "mooncake_instance_free_device_pages", "free pages of the device's KVCache", labels=["instance"]
        )
        requests = GaugeMetricFamily(
            "mooncake_instance_requests", "requests in the batch, and others", labels=["instance", "state"]
        )
        pages = GaugeMetricFamily(
            "mooncake_pool_pages", "pages of the pool by state", labels=["instance", "state"]
        )
        blocks = CounterMetricFamily(
            "mooncake_pool_blocks", "blocks by what happened to them", labels=["instance", "event"]
        )
        transferred = CounterMetricFamily(
            "mooncake_transfer_bytes", "KVCache moved", labels=["instance", "transport", "direction"]
        )
        for instance in self._conductor.instances:
            if (heartbeat := instance.heartbeat) is None:
                continue
            name, pool = instance.name, heartbeat.pool
            free.add_metric([name], heartbeat.num_free_device_pages)
            requests.add_metric([name, "running"], heartbeat.num_running)
            requests.add_metric([name, "waiting"], heartbeat.num_waiting)
            for state in ("free", "reserved", "sealed", "quarantined"):
                pages.add_metric([name, state], getattr(pool, f"num_{state}"))
            for event in ("hits", "misses", "evictions", "dropped", "checksum_failures"):
                blocks.add_metric([name, event], getattr(pool, f"num_{event}"))
            for direction, by_transport in (("sent", pool.sent_bytes), ("received", pool.received_bytes)):
                for transport, num_bytes in by_transport.items():
                    transferred.add_metric([name, transport, direction], num_bytes)
        yield from (free, requests, pages, blocks, transferred)
