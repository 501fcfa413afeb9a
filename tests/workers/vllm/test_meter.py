"""Steps of vLLM are counted by the outputs that they bring."""

from mooncake.messages.requests import Ref
from workers.vllm.meter import StepMeter

A, B = Ref(1, "a", 0), Ref(1, "b", 0)


def test_a_step_brings_each_request_one_output() -> None:
    meter = StepMeter()
    for step in range(4):
        meter.drew(A, 1, 10.0 + step)
        meter.drew(B, 1, 10.25 + step)
    stats = meter.stats
    assert (stats.num_iterations, stats.num_tokens, stats.forward_s) == (3, 6, 3.0)


def test_an_idle_engine_takes_no_step() -> None:
    meter = StepMeter()
    for began_s in (0.0, 100.0):
        for step in range(3):
            meter.drew(A, 1, began_s + step)
        meter.left(A)
    stats = meter.stats
    assert (stats.num_iterations, stats.num_tokens, stats.forward_s) == (4, 4, 4.0)
