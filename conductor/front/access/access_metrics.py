"""What each API key may do and does, for Prometheus; read at each scrape.

Owns: these metric names. Does not know: how requests are let in (`access`).
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.front.access.access import KeyLimits
from conductor.front.access.key_ring import KeyRing

_LIMITS = ("requests_per_minute", "max_concurrent", "max_context_cache_tokens")


class AccessMetrics(Collector):
    """Registers itself."""

    def __init__(self, ring: KeyRing, limits: KeyLimits, registry: CollectorRegistry) -> None:
        self._ring, self._limits = ring, limits
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Of every key that is valid now."""
        allowed = GaugeMetricFamily(
            "mooncake_api_key_limit", "Limits that a key's entry sets", labels=["key", "limit"]
        )
        running = GaugeMetricFamily(
            "mooncake_api_key_running", "Choices of a key's HTTP requests that run now", labels=["key"]
        )
        requests = CounterMetricFamily(
            "mooncake_api_key_requests",
            "HTTP requests of a key that were let in, and those that were beyond its limits",
            labels=["key", "outcome"],
        )
        for key in self._ring.keys:
            for limit in _LIMITS:
                if (value := getattr(key, limit)) is not None:
                    allowed.add_metric([key.name, limit], value)
            use = self._limits.use_of(key)
            running.add_metric([key.name], 0 if use is None else use.num_running)
            requests.add_metric([key.name, "let_in"], 0 if use is None else use.num_let_in)
            requests.add_metric([key.name, "limited"], 0 if use is None else use.num_limited)
        yield from (allowed, running, requests)
