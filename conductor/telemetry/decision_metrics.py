"""What came of the Conductor's decisions, for `/metrics`.

Owns: names of metrics. Does not know: how decisions are made.
"""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from conductor.view.decision_stats import ERROR_BOUNDS_S, DecisionStats, Errors
from conductor.view.placement import Reason, Reuse


def decision_metrics(stats: DecisionStats) -> Iterator[Metric]:
    """Placements, rejections, fetches, and how far predictions were off."""
    placements = CounterMetricFamily(
        "mooncake_placements",
        "requests that were given a pair of instances, by where the prefix that is reused comes from",
        labels=["prefix"],
    )
    for reuse in Reuse:
        placements.add_metric([reuse.value], stats.num_placements[reuse])
    rejections = CounterMetricFamily(
        "mooncake_rejections",
        "requests that were turned away, by the limit or SLO that they would have missed",
        labels=["reason"],
    )
    for reason in Reason:
        rejections.add_metric([reason.value], stats.num_rejections[reason])
    displaced = CounterMetricFamily(
        "mooncake_displacements",
        "requests that had not begun and gave way to those of a higher class or a tenant with less",
    )
    displaced.add_metric([], stats.num_preempted)
    fetches = CounterMetricFamily(
        "mooncake_ordered_fetches", "prefixes that prefill instances were told to fetch from others"
    )
    fetches.add_metric([], stats.num_fetches)
    blocks = CounterMetricFamily(
        "mooncake_ordered_fetch_blocks", "blocks of those that the prefill instance was believed to lack"
    )
    blocks.add_metric([], stats.num_fetched_blocks)
    seconds = CounterMetricFamily(
        "mooncake_predictions_seconds",
        "sums over requests: what was predicted at placement, and what it was",
        labels=["of", "kind"],
    )
    for of, errors in (("ttft", stats.ttft), ("tbt", stats.tbt)):
        seconds.add_metric([of, "predicted"], errors.predicted_s)
        seconds.add_metric([of, "actual"], errors.actual_s)
    yield from (placements, rejections, displaced, fetches, blocks, seconds)
    yield _histogram("mooncake_ttft_prediction_error_seconds", "from placement to first token", stats.ttft)
    yield _histogram("mooncake_tbt_prediction_error_seconds", "of a request's mean TBT", stats.tbt)


def _histogram(name: str, of: str, errors: Errors) -> HistogramMetricFamily:
    bounds = [*map(floatToGoString, ERROR_BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(errors.counts)), strict=True))
    return HistogramMetricFamily(
        name, f"predicted against actual, {of}: the difference", buckets, errors.sum_s
    )
