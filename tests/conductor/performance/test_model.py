"""BanaServe's performance model (section 4.3) by itself; tests/benchmarks/simulator compares it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.performance.model import DecodeCapacity, Pairs, Sizes, overlapped_s
from mooncake.messages.costs import Costs

PREFILL, DECODE = Costs(0.01, 1e-4, 1e-9), Costs(0.005, 1e-4, 1e-7)
CAPACITY = DecodeCapacity(DECODE, max_batch=64, num_device_tokens=100_000)
SIZES = Sizes(1000, 101)


def pairs(num_prefill: int = 1, num_decode: int = 1, capacity: DecodeCapacity = CAPACITY) -> Pairs:
    return Pairs(num_prefill, num_decode, PREFILL, capacity, num_layers=32)


def test_the_papers_example_of_a_layer_hides_its_transfer() -> None:
    """Equation 17: 270 ms, half of 1,000 tokens cached, 4 KB a layer and token at 200 Gbit/s."""
    num_layers, compute_s, transfer_s = 32, 0.27 * 0.5, 32 * 4096 * 500 / 25e9
    assert compute_s / num_layers == pytest.approx(4.22e-3, rel=0.01)
    assert transfer_s / num_layers == pytest.approx(0.082e-3, rel=0.01)
    assert overlapped_s(compute_s, transfer_s, num_layers) - compute_s == pytest.approx(0.082e-3, rel=0.01)


def test_a_transfer_that_is_longer_than_the_computation_shows() -> None:
    assert overlapped_s(1.0, 3.0, 10) == pytest.approx(3.1)


def test_one_request_alone_takes_its_prefill_and_its_iterations() -> None:
    found = pairs().performance(SIZES, 1)
    prefill_s, iteration_s = PREFILL.seconds(1000, 500_000), DECODE.seconds(1, 1050.5)
    assert found.tpot_s == pytest.approx(iteration_s)
    assert found.ttft_s == pytest.approx(prefill_s)
    assert found.output_tokens_per_s == pytest.approx(101 / (prefill_s + 100 * iteration_s))


@pytest.mark.parametrize("num_output_tokens", [201, 2001])
def test_requests_wait_for_iterations_to_end_before_prefill_and_before_decode(num_output_tokens: int) -> None:
    """Equation 20: T_q where no stage is full."""
    found = pairs().performance(Sizes(200, num_output_tokens), 20)
    prefill_s = PREFILL.seconds(200, 20_000)
    assert 0.02 < found.prefill_utilisation < 0.8
    wait_s = (1 + found.prefill_utilisation) * found.tpot_s / 2
    assert found.ttft_s == pytest.approx(prefill_s + wait_s, rel=1e-3)


def test_answers_of_one_token_are_as_many_as_prompts_can_be_computed() -> None:
    found, prefill_s = pairs().performance(Sizes(1000, 1), 10), PREFILL.seconds(1000, 500_000)
    assert found.output_tokens_per_s == pytest.approx(1 / prefill_s)
    assert found.ttft_s == pytest.approx(10 * prefill_s)


def test_requests_queue_where_prefill_is_full() -> None:
    found, prefill_s = pairs().performance(SIZES, 100), PREFILL.seconds(1000, 500_000)
    assert found.prefill_utilisation == pytest.approx(1.0)
    assert found.output_tokens_per_s == pytest.approx(101 / prefill_s)
    assert found.ttft_s > 90 * prefill_s


@given(slots=st.floats(1, 64), num_tokens=st.floats(2_000, 200_000))
def test_a_full_decode_stage_is_as_fast_as_its_largest_batch(slots: float, num_tokens: float) -> None:
    capacity = DecodeCapacity(DECODE, slots, num_tokens)
    found = pairs(1000, 1, capacity).performance(Sizes(1000, 100), 2000)
    assert found.batch_size == pytest.approx(capacity.batch_size(1050), rel=1e-3)
    assert found.output_tokens_per_s == pytest.approx(100 / 99 * capacity.tokens_per_s(1050), rel=1e-3)
    assert found.num_kv_tokens <= max(num_tokens, 1050)


@given(
    sizes=st.builds(Sizes, st.floats(1, 1e5), st.floats(1, 1e4), st.just(0.0)),
    num_requests=st.floats(1, 1000),
    num_prefill=st.integers(1, 9),
    num_decode=st.integers(1, 9),
)
def test_the_rate_is_that_of_littles_law_and_no_stage_does_more_than_it_can(
    sizes: Sizes, num_requests: float, num_prefill: int, num_decode: int
) -> None:
    found = pairs(num_prefill, num_decode).performance(sizes, num_requests)
    answer_s = found.ttft_s + (sizes.num_output_tokens - 1) * found.tpot_s
    rate_per_s = found.output_tokens_per_s / sizes.num_output_tokens
    assert rate_per_s * answer_s == pytest.approx(num_requests, rel=1e-6)
    assert found.prefill_utilisation <= 1 + 1e-9
    assert found.decode_utilisation <= 1 + 1e-9
    assert found.ttft_s >= sizes.prefill_s(PREFILL) * (1 - 1e-6)
