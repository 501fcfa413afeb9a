"""What the prefix index knows of the pools, for `/metrics`.

Owns: names of metrics. Does not know: how the index is kept.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from conductor.index.event_stream import EventStream
from conductor.index.prefix_index import PrefixIndex


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
