"""Steps of vLLM are counted by the outputs that they bring."""

from mooncake.messages.requests import Ref
from workers.vllm.meter import DecodeMeter

A, B = Ref(1, "a", 0), Ref(1, "b", 0)


def test_a_step_brings_each_request_one_output() -> None:
    meter = DecodeMeter()
    for step in range(4):
        meter.drew(A, 1, 10.0 + step)
        meter.drew(B, 1, 10.25 + step)
    stats = meter.stats
    assert (stats.num_iterations, stats.num_tokens, stats.forward_s) == (3, 6, 3.0)


def test_an_idle_engine_takes_no_step() -> None:
    meter = DecodeMeter()
    for began_s in (0.0, 100.0):
        for step in range(3):
            meter.drew(A, 1, began_s + step)
        meter.left(A)
    stats = meter.stats
    assert (stats.num_iterations, stats.num_tokens, stats.forward_s) == (4, 4, 4.0)


def test_prompts_are_counted_that_are_computed_beside_decoding() -> None:
    meter = DecodeMeter()
    meter.computed(1000, as_decode=False)  # before the session
    meter.computed(1300, as_decode=True)
    meter.computed(1700, as_decode=False)  # in the role of a prefill instance
    meter.computed(1750, as_decode=True)
    assert meter.stats.mixed.num_prompt_tokens == 350
