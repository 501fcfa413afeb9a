"""What a decode instance learns from its iterations."""

import pytest

from workers.decode.iterations import Iteration
from workers.decode.meter import DecodeMeter


class Ended(Iteration):
    """An iteration that has ended: `num_decoded` sequences of 100 tokens, and tokens of prompts."""

    def __init__(self, num_decoded: int, num_prompt_tokens: int, seconds: float) -> None:
        self.num_decoded, self.num_kv_tokens = num_decoded, 100 * num_decoded
        self.num_prompt_tokens = num_prompt_tokens
        self.began_s = self.forward_began_s = 0.0
        self.ended_s = seconds
        self._tokens = []


def seconds_of(num_decoded: int, num_prompt_tokens: int) -> float:
    return (0.01 + 0.002 * num_decoded if num_decoded else 0.0) + 0.001 * num_prompt_tokens


def test_decoding_is_learned_where_every_iteration_has_a_prompt() -> None:
    meter = DecodeMeter()
    for number in range(2000):
        of = [(0, 50), (1, 60), (4, 20), (8, 30)][number % 4]
        meter.ended(Ended(*of, seconds_of(*of)))
    for num_decoded in (1, 4, 8):
        assert meter.tbt.predict_s(num_decoded, 100 * num_decoded) == pytest.approx(
            seconds_of(num_decoded, 0), rel=0.1
        )
    assert meter.prompt_cost.predict_s(10) == pytest.approx(0.01, rel=0.1)
    assert meter.error.high_by_share < 1.1


def test_a_slower_machine_is_noticed() -> None:
    meter = DecodeMeter()
    for number in range(400):
        of = [(4, 0), (4, 40)][number % 2]
        meter.ended(Ended(*of, seconds_of(*of)))
    before = meter.error.high_by_share
    meter.ended(Ended(4, 40, 2 * seconds_of(4, 40)))
    assert meter.error.high_by_share > before + 0.1
