"""What a decode instance learns from its iterations."""

import pytest

from workers.decode.iterations import Iteration
from workers.decode.meter import MAX_MIXED_IN_A_ROW, DecodeMeter
from workers.decode.tbt import MIN_ITERATIONS


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


def test_a_fixed_cost_belongs_to_decoding_though_prompts_alone_have_it_too() -> None:
    """On GPUs an iteration takes a time of its own, whatever it computes."""

    def seconds_of(num_decoded: int, num_prompt_tokens: int) -> float:
        return 0.02 + 0.0005 * num_decoded + 0.0001 * num_prompt_tokens

    meter = DecodeMeter()
    for number in range(1000):
        of = [(0, 200), (4, 100), (8, 100), (6, 100), (4, 0), (8, 0)][number % 6]
        meter.ended(Ended(*of, seconds_of(*of)))
    for num_decoded in (4, 8):
        predicted_s = meter.tbt.predict_s(num_decoded, 100 * num_decoded)
        assert predicted_s == pytest.approx(seconds_of(num_decoded, 0), rel=0.01)


def test_few_iterations_with_prompts_do_not_teach_what_decoding_takes() -> None:
    meter = DecodeMeter()
    for _ in range(MIN_ITERATIONS):
        meter.ended(Ended(4, 0, 0.02))
    meter.ended(Ended(0, 100, 0.1))
    for _ in range(MAX_MIXED_IN_A_ROW):
        meter.ended(Ended(4, 20, 0.5))
    assert meter.tbt.predict_s(4, 400) == pytest.approx(0.02)
    meter.ended(Ended(4, 20, 0.9))
    assert (meter.tbt.predict_s(4, 400) or 0.0) > 0.02
    meter.ended(Ended(4, 0, 0.02))
    learned_s = meter.tbt.predict_s(4, 400)
    meter.ended(Ended(4, 20, 0.9))
    assert meter.tbt.predict_s(4, 400) == learned_s


def test_a_slower_machine_is_noticed() -> None:
    meter = DecodeMeter()
    for number in range(400):
        of = [(4, 0), (4, 40)][number % 2]
        meter.ended(Ended(*of, seconds_of(*of)))
    before = meter.error.high_by_share
    meter.ended(Ended(4, 40, 2 * seconds_of(4, 40)))
    assert meter.error.high_by_share > before + 0.1
