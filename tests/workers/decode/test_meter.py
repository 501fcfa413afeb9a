"""What a decode instance learns from its iterations."""

import pytest

from mooncake.messages.costs import prefill_quantities
from workers.decode.batching.iterations import Iteration
from workers.decode.meter import DecodeMeter
from workers.decode.tbt_slo.tbt import MIN_ITERATIONS


class Ended(Iteration):
    """An iteration that has ended: `num_decoded` sequences of 100 tokens, and tokens of prompts."""

    def __init__(self, num_decoded: int, num_prompt_tokens: int, seconds: float) -> None:
        self.num_decoded, self.num_kv_tokens = num_decoded, 100 * num_decoded
        self.num_prompt_tokens, self.num_prompt_pairs = prefill_quantities(num_prompt_tokens, 0)
        self.num_decoded_beside = self.num_kv_tokens_beside = 0
        self.began_s = self.forward_began_s = 0.0
        self.ended_s = self.forward_s = seconds
        self._tokens = []


def test_iterations_teach_what_decoding_takes_and_what_prompts_add() -> None:
    meter = DecodeMeter()
    for _ in range(MIN_ITERATIONS):
        meter.ended(Ended(4, 0, 0.02))
    meter.ended(Ended(4, 10, 0.05))
    assert meter.predictors.tbt.predict_s(4, 400) == pytest.approx(0.02)
    assert meter.predictors.prompt_cost.predict_s(20, 200) == pytest.approx(0.06)
