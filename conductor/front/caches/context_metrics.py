"""Prometheus metrics of context caches: their number, and the tokens that they hold and save.

Owns: these metrics. Does not know: how caches are kept.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.front.caches.context_caches import ContextCaches


class ContextMetrics(Collector):
    """Contents and savings of context caches, by API key, for Prometheus; read at each scrape.

    Registers itself. `now` is the clock of the caches.
    """

    def __init__(self, caches: ContextCaches, registry: CollectorRegistry, now: Callable[[], float]) -> None:
        self._caches, self._now = caches, now
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of each key that has made a cache."""
        num_caches = GaugeMetricFamily("mooncake_context_caches", "Context caches", labels=["key"])
        held = GaugeMetricFamily("mooncake_context_cache_tokens", "Tokens in them", labels=["key"])
        prompts = CounterMetricFamily(
            "mooncake_context_cache_prompts", "Prompts that began with a context cache", labels=["key"]
        )
        saved = CounterMetricFamily(
            "mooncake_context_cache_saved_tokens",
            "Of these prompts' context caches, tokens whose KVCache was reused",
            labels=["key"],
        )
        seconds = CounterMetricFamily(
            "mooncake_context_cache_saved_prefill_seconds",
            "Predicted time of the prefill that these tokens did not need",
            labels=["key"],
        )
        for name, caches, savings in self._caches.by_key(self._now()):
            num_caches.add_metric([name], len(caches))
            held.add_metric([name], sum(cache.num_tokens for cache in caches))
            prompts.add_metric([name], savings.num_prompts)
            saved.add_metric([name], savings.num_tokens)
            seconds.add_metric([name], savings.prefill_s)
        yield from (num_caches, held, prompts, saved, seconds)
        yield CounterMetricFamily(
            "mooncake_context_cache_store_failures",
            "Changes of context caches that could not be stored, and were refused",
            value=self._caches.num_store_failures,
        )
