"""Metrics with one label, made from a table of the label's values and their samples.

Owns: the conversion of tables to metrics. Does not know: the samples.
"""

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Label = TypeVar("Label", bound=str)


def gauges(name: str, text: str, label: str, values: Mapping[Label, float]) -> Metric:
    """Return a gauge `name` with help `text` and one sample for each value of `label`."""
    return _filled(GaugeMetricFamily(name, text, labels=[label]), values)


def counters(name: str, text: str, label: str, values: Mapping[Label, float]) -> Metric:
    """Return a counter `name` with help `text` and one sample for each value of `label`."""
    return _filled(CounterMetricFamily(name, text, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Label, float]) -> Metric:
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family
