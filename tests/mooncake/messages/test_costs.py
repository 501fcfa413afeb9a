"""What requests have of a batch that they share."""

import pytest

from mooncake.messages.costs import BatchShare, batch_share


def longest_gaps_s(num_requests: int, max_batch: int, num_output: int, step_s: float) -> float:
    """The TBT of requests that come one after the other, as slots come free, and are all equally long."""
    decode_s = (num_output - 1) * step_s
    waited_s = (num_requests - max_batch) / max_batch * decode_s
    gaps_s = [waited_s + step_s, *[step_s] * (num_output - 2)]
    num_longest = round(0.1 * len(gaps_s))
    return sum(sorted(gaps_s)[-num_longest:]) / num_longest


@pytest.mark.parametrize("num_requests", [0, 1, 8])
def test_requests_that_all_have_a_slot_wait_for_none(num_requests: int) -> None:
    assert batch_share(num_requests, 8) == BatchShare(1.0, 1.0)


@pytest.mark.parametrize(("num_requests", "max_batch"), [(9, 8), (12, 8), (64, 16)])
def test_a_request_beyond_the_slots_waits_for_one_once(num_requests: int, max_batch: int) -> None:
    batched, delay = batch_share(num_requests, max_batch)
    assert batched * num_requests == pytest.approx(max_batch)
    assert delay * 0.02 == pytest.approx(longest_gaps_s(num_requests, max_batch, 101, 0.02), rel=0.01)
