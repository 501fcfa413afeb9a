"""The TBT of a request, and what requests have of a batch that they share."""

import numpy as np
import pytest

from mooncake.messages.costs import BatchShare, batch_share, tbt_s

STEP_S, NUM_OUTPUT = 0.02, 201


def tbts_s(num_requests: int, max_batch: int) -> list[float]:
    """The TBTs of requests that wait until so many others have left, as chance has it."""
    draw = np.random.default_rng(1)
    decode_s = (NUM_OUTPUT - 1) * STEP_S
    waits_s = draw.gamma(num_requests - max_batch, decode_s / max_batch, 10_000)
    num_longest = round(0.1 * (NUM_OUTPUT - 1))
    return [float(wait_s + num_longest * STEP_S) / num_longest for wait_s in waits_s]


def test_the_tbt_of_a_request_is_the_mean_of_its_longest_tenth_of_gaps() -> None:
    assert tbt_s([]) is None
    assert tbt_s([0.3]) == 0.3
    assert tbt_s([0.1] * 9 + [0.7]) == 0.7
    assert tbt_s([0.1] * 9 + [0.7, 0.3]) == pytest.approx(0.5)  # two of eleven
    assert tbt_s([0.1] * 18 + [0.6, 0.4]) == pytest.approx(0.5)


@pytest.mark.parametrize("num_requests", [0, 1, 8])
def test_requests_that_all_have_a_slot_wait_for_none(num_requests: int) -> None:
    assert batch_share(num_requests, 8) == BatchShare(1.0, 1.0)


@pytest.mark.parametrize(("num_requests", "max_batch"), [(9, 8), (12, 8), (40, 32), (64, 16)])
def test_nearly_all_requests_beyond_the_slots_wait_no_longer_than_predicted(
    num_requests: int, max_batch: int
) -> None:
    batched, delay = batch_share(num_requests, max_batch)
    assert batched * num_requests == pytest.approx(max_batch)
    assert 0.94 < np.mean(np.array(tbts_s(num_requests, max_batch)) <= delay * STEP_S) < 0.99
