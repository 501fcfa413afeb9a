"""The metrics of a process that learns from etcd which Conductor leads.

Owns: names of metrics. Does not know: elections.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from mooncake.leadership.leaders import Reach


def register_reach(registry: CollectorRegistry, reach: Reach) -> None:
    """Add to `registry` the metric of all processes that use etcd: whether etcd answers."""
    gauge = Gauge("mooncake_etcd_reachable", "whether etcd answers this process", registry=registry)
    gauge.set_function(lambda: float(reach.is_given))


def register_leadership(registry: CollectorRegistry, leads: Callable[[], bool]) -> None:
    """Add to `registry` the metric of Conductors: whether this one leads, as `leads` returns."""
    gauge = Gauge("mooncake_conductor_leads", "whether this conductor leads, or stands by", registry=registry)
    gauge.set_function(lambda: float(leads()))
