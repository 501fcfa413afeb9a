"""The metrics of a process that asks etcd which Conductor leads.

Owns: the names of these metrics. Does not know: elections.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from mooncake.leadership.leaders import Reach


def register_reach(registry: CollectorRegistry, reach: Reach) -> None:
    """Add to `registry` the metric of every process that uses etcd: whether etcd answers."""
    gauge = Gauge("mooncake_etcd_reachable", "whether etcd answers this process", registry=registry)
    gauge.set_function(lambda: float(reach.is_given))


def register_leadership(registry: CollectorRegistry, leads: Callable[[], bool]) -> None:
    """Add to `registry` the metric of a Conductor: whether it leads. `leads` returns the value."""
    gauge = Gauge("mooncake_conductor_leads", "whether this conductor leads, or stands by", registry=registry)
    gauge.set_function(lambda: float(leads()))
