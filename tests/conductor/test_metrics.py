"""What Prometheus is told about the Conductor's own state."""

from prometheus_client import CollectorRegistry

from conductor.history import History
from conductor.metrics import ConductorMetrics, HistoryMetrics
from conductor.policy import Limits
from mooncake.messages import Submit
from tests.conductor.test_policy import FRONT, new_conductor, request


def test_strangers_at_the_conductor_are_counted() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(new_conductor(), registry, lambda: 7, dict)
    assert registry.get_sample_value("mooncake_conductor_strangers_total") == 7


def test_what_computes_is_told_by_instance() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(new_conductor(), registry, lambda: 0, dict)
    assert registry.get_sample_value("mooncake_instance_engine", {"instance": "p0", "engine": "cpu"}) == 1


def test_rejections_are_told_by_reason() -> None:
    conductor, history, registry = (
        new_conductor(Limits(max_running_requests=1)),
        History(),
        CollectorRegistry(),
    )
    HistoryMetrics(history, registry)
    for request_id in ("a", "b", "c"):
        message = Submit(request(request_id))
        history.observe(FRONT, message, conductor.handle(FRONT, message, 1.0), 1.0)
    for reason, expected in {"overloaded": 2, "unavailable": 0, "too_large": 0}.items():
        found = registry.get_sample_value("mooncake_rejected_requests_total", {"reason": reason})
        assert found == expected
