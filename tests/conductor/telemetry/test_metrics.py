"""What Prometheus is told about the Conductor's own state."""

from prometheus_client import CollectorRegistry

from conductor.rules import Limits
from conductor.telemetry.history import History
from conductor.telemetry.metrics import ConductorMetrics, HistoryMetrics
from mooncake.messages.fronts import Cancel, Submit
from tests.conductor.test_policy import FRONT, new_conductor, request


def test_strangers_at_the_conductor_are_counted() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(new_conductor(), registry, lambda: 7, lambda: 3, dict)
    assert registry.get_sample_value("mooncake_conductor_strangers_total") == 7
    assert registry.get_sample_value("mooncake_conductor_unfinished_handshakes_total") == 3


def test_what_computes_is_told_by_instance() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(new_conductor(), registry, lambda: 0, lambda: 0, dict)
    assert registry.get_sample_value("mooncake_instance_engine", {"instance": "p0", "engine": "cpu"}) == 1


def test_ends_and_steps_of_requests_are_told() -> None:
    conductor, history, registry = (
        new_conductor(Limits(max_running_requests=1)),
        History(),
        CollectorRegistry(),
    )
    HistoryMetrics(history, registry)
    for number, request_id in enumerate(("a", "b", "c")):
        message, now_s = Submit(request(request_id)), float(number)
        history.observe(FRONT, message, conductor.handle(FRONT, message, now_s), now_s)
    cancel = Cancel("a")
    history.observe(FRONT, cancel, conductor.handle(FRONT, cancel, 5.0), 5.0)
    for outcome, expected in {"rejected": 2, "aborted": 1, "finished": 0, "failed": 0}.items():
        assert registry.get_sample_value("mooncake_ended_requests_total", {"outcome": outcome}) == expected
    for step, (num, seconds) in {"queued": (3, 0), "reserving": (1, 5), "decoding": (0, 0)}.items():
        assert registry.get_sample_value("mooncake_request_steps_total", {"step": step}) == num
        assert registry.get_sample_value("mooncake_request_step_seconds_total", {"step": step}) == seconds
