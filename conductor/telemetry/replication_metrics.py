"""What the replication of hot prefixes does, for `/metrics`.

Owns: names of metrics. Does not know: what is hot.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from conductor.replication.copies import Replication


def replication_metrics(replication: Replication) -> Iterator[Metric]:
    """Copies that were ordered ahead of requests."""
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
