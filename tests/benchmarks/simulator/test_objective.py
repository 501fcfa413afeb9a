"""The measured terms of BanaServe's objective: utilisation, mean latency and throughput (equation 19)."""

import pytest

from benchmarks.tools.simulator.report import SimulatedRun
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.traces.request import TraceRequest, num_blocks_of

PROMPT_TOKENS = 4096


def setup(**instances: int) -> Setup:
    return Setup(model="llama-3.1-8b", num_gpus=1, **instances)


def run(cluster: Setup, num_requests: int, num_output: int, each_s: float = 0.0) -> SimulatedRun:
    """Simulate requests of one size, whose prompts have no common blocks."""
    num_blocks = num_blocks_of(PROMPT_TOKENS)
    load = [
        TraceRequest(
            n * each_s, PROMPT_TOKENS, num_output, tuple(range(n * num_blocks, (n + 1) * num_blocks))
        )
        for n in range(num_requests)
    ]
    return simulate(cluster, load)[0]


def test_an_instance_that_computes_prompts_all_the_time_is_used_fully() -> None:
    whole = run(setup(num_coupled=1), 40, num_output=1).terms
    with_idle = run(setup(num_prefill=1, num_decode=1), 40, num_output=1).terms
    assert whole.utilisation == pytest.approx(1.0, abs=0.05)
    assert with_idle.utilisation == pytest.approx(0.5, abs=0.05)


def test_a_decode_instance_with_one_request_is_hardly_used() -> None:
    """The instance iterates nearly all the time, but a batch of 256 takes little longer."""
    assert run(setup(num_prefill=1, num_decode=1), 1, num_output=1000).terms.utilisation < 0.05


def test_the_mean_latency_is_the_sum_of_the_mean_ttft_and_the_mean_time_per_token() -> None:
    found = run(setup(num_prefill=1, num_decode=1), 1, num_output=101)
    answer_s = found.summary.duration_s - found.summary.ttft_s.mean
    assert found.terms.latency_s == pytest.approx(found.summary.ttft_s.mean + answer_s / 100, rel=0.01)
    assert found.terms.output_tokens_per_s == found.summary.output_tokens_per_s


def test_computing_that_is_saved_by_the_cache_does_not_count() -> None:
    load = [
        TraceRequest(n * 5.0, PROMPT_TOKENS, 1, tuple(range(num_blocks_of(PROMPT_TOKENS)))) for n in range(9)
    ]
    cached = simulate(setup(num_coupled=1), load)[0].terms
    assert cached.utilisation < 0.4 * run(setup(num_coupled=1), 9, 1, each_s=5.0).terms.utilisation
