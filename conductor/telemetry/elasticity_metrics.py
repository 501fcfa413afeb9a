"""The metrics of elasticity: needed instances, utilisation, decisions of the rebalancer.

Owns: the names of these metrics. Does not know: how anything is decided.
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from conductor.elasticity.control import Elasticity
from conductor.performance.utilisation import Utilisation
from conductor.telemetry.families import counters, gauges


def elasticity_metrics(elasticity: Elasticity, utilisation: Utilisation) -> Iterator[Metric]:
    """Yield all metric families of elasticity. Without a rebalancer its families are empty."""
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
