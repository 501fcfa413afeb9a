"""An engine hangs if it has requests and does nothing."""

import pytest

from workers.errors import EngineLostError
from workers.vllm.pulse import Pulse


def test_an_engine_with_requests_must_move() -> None:
    pulse = Pulse(30.0)
    pulse.check(1000.0)  # it has nothing to do
    pulse.asked(1000.0)
    pulse.asked(1010.0)
    pulse.check(1030.0)
    pulse.moved(1030.0)
    pulse.check(1060.0)
    with pytest.raises(EngineLostError, match="2 requests, and no step within 30 s"):
        pulse.check(1060.5)


def test_time_without_requests_does_not_count() -> None:
    pulse = Pulse(30.0)
    pulse.asked(0.0)
    pulse.ended()
    pulse.check(100.0)
    pulse.asked(200.0)
    pulse.check(230.0)


def test_an_engine_may_be_given_any_time() -> None:
    pulse = Pulse(None)
    pulse.asked(0.0)
    pulse.check(1e9)
