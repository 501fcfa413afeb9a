"""What Prometheus is told about the Conductor's decisions."""

import pytest
from prometheus_client import CollectorRegistry

from conductor.telemetry.decision_metrics import decision_metrics
from conductor.view.decision_stats import DecisionStats
from tests.conductor.transcript import Transcript


class Decisions:
    """Collects what `decision_metrics` yields."""

    def __init__(self, outcomes: DecisionStats) -> None:
        self._outcomes = outcomes

    def collect(self) -> object:
        return decision_metrics(self._outcomes)


def scraped(transcript: Transcript) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Decisions(transcript.stats))  # type: ignore[arg-type]
    return registry


def test_predictions_are_compared_with_what_happened() -> None:
    transcript = Transcript()
    for line in (
        "cluster prefill_costs=0,0.01,0 decode_costs=0.01,0.01,0 ttft_slo=3",
        "holds p0 5",
        "holds d0 10",
        "submit r1 tokens=100",  # 1 ms for 5 blocks of d0, 600 ms for 60 tokens; 20 ms for each token
        "submit r2 tokens=300 prompt=b",
        "reserved r1",
        "at 0.851",
        "prefilled r1 cached=40",
        "at 1.851",
        "finished r1 tokens=11",
    ):
        transcript.run(line)
    registry = scraped(transcript)
    value = registry.get_sample_value
    assert value("mooncake_placements_total", {"prefix": "remote"}) == 1
    assert value("mooncake_placements_total", {"prefix": "local"}) == 0
    assert value("mooncake_rejections_total", {"reason": "ttft_slo_s"}) == 1
    assert value("mooncake_ordered_fetches_total") == 1
    assert value("mooncake_ordered_fetch_blocks_total") == 5
    predicted = value("mooncake_predictions_seconds_total", {"of": "ttft", "kind": "predicted"})
    assert predicted == pytest.approx(0.601, abs=1e-4)
    assert value("mooncake_ttft_prediction_error_seconds_sum") == pytest.approx(0.25, abs=1e-4)
    assert value("mooncake_ttft_prediction_error_seconds_bucket", {"le": "0.2"}) == 0
    assert value("mooncake_ttft_prediction_error_seconds_bucket", {"le": "0.5"}) == 1
    assert value("mooncake_ttft_prediction_error_seconds_count") == 1
    assert value("mooncake_tbt_prediction_error_seconds_sum") == pytest.approx(0.08)
