"""What follows from the outcomes of the closed loops."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.simulator.calibration import one_instance, pair
from benchmarks.tools.simulator.calibration.costs import Calibration, mean, non_negative, times
from benchmarks.tools.simulator.calibration.loops import Loop, MixedLoop
from benchmarks.tools.simulator.calibration.one_instance import LOOPS, Factors, fitted
from benchmarks.tools.simulator.calibration.pair import BUSY_LOOPS, LONG, SHORT, calibrated
from benchmarks.tools.simulator.cluster.closed_loops import ClosedLoop
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.cluster.shape import JoinCosts
from benchmarks.tools.simulator.real_server import DEFAULT, PATIENT_S, PATIENT_TBT_S
from benchmarks.tools.simulator.this_machine import simulated_server
from benchmarks.tools.traces.request import TraceRequest
from conductor.settings import Limits
from mooncake.messages.costs import Costs, prefill_quantities

PREFILL, DECODE = Costs(0.01, 1e-3, 0.0), Costs(0.02, 0.0, 0.0)


def looped(name: str, ttft_s: float, gap_s: float, each_s: float) -> list[Outcome]:
    """A loop in which a first token leaves every `each_s`."""
    loop = pair.LOOPS[name]
    answered_s = ttft_s + gap_s * (loop.num_output_tokens - 1)
    return [
        Outcome(
            number=n,
            kind=Kind.FINISHED,
            scheduled_s=n * each_s,
            num_input_tokens=loop.num_input_tokens,
            lag_s=0.0,
            answered_s=answered_s,
            ttft_s=ttft_s,
            tbt_s=1.3 * gap_s,
            num_output_tokens=loop.num_output_tokens,
        )
        for n in range(loop.num_requests)
    ]


@pytest.mark.parametrize("busy_prompt_s", [0.02, 0.06])
def test_a_pair_takes_longer_than_its_profile_says(busy_prompt_s: float) -> None:
    """A server that is a tenth slower, takes 50 ms more for a first token, and longer when busy; each request
    that joins takes 4 ms and 10 us a token, and each prompt takes its instance 20 ms of the 50, or 60 ms
    while another instance computes."""
    decode = DECODE._replace(constant_s=0.08)

    def ttft_s(name: str) -> float:
        num_tokens = pair.LOOPS[name].num_input_tokens
        num_passes = -(-num_tokens // 512)
        once_s = PREFILL.seconds(*prefill_quantities(num_tokens, 0)) + (num_passes - 1) * PREFILL.constant_s
        return 0.05 + 1.1 * once_s

    gap_s = 1.2 * decode.constant_s

    def busy(name: str) -> list[Outcome]:
        each_s = busy_prompt_s + 1.4 * (ttft_s(name) - 0.05)  # somebody is always decoded meanwhile
        join_s = 0.004 + 1e-5 * pair.LOOPS[name].num_input_tokens
        return looped(name, 2.0, 1.25 * gap_s / (1 - join_s / each_s), each_s)

    found = calibrated(
        (PREFILL, decode),
        {
            SHORT: looped(SHORT, ttft_s(SHORT), gap_s, 1.0),
            LONG: looped(LONG, ttft_s(LONG), gap_s, 3.0),
            **{name: busy(name) for name in BUSY_LOOPS},
        },
    )
    assert found.prefill == pytest.approx(times(1.1, PREFILL))
    assert found.decode == pytest.approx(times(1.2, decode))
    prompt_s = min(busy_prompt_s, 0.05)
    assert (found.first_token_s, found.prompt_s) == pytest.approx((0.05 - prompt_s, prompt_s))
    assert found.busy_prompt_s == pytest.approx(busy_prompt_s)
    assert found.slowdowns == pytest.approx((1.4, 1.25))
    assert found.join_costs == pytest.approx((0.004, 1e-5))
    assert found.longest_mean == pytest.approx(1.3)
    assert found.costs.profiled == (PREFILL, decode)
    assert found.costs.kv_token_s == 1.2 * decode.second_s


def test_the_factors_are_those_of_the_measured_loops() -> None:
    true = Factors(1.1, 1.3, 1.2, 0.003, 0.02)

    def figures(of: Factors) -> list[float]:
        prefill_s, decode_s, token_s = 0.1 * of.prefill, 0.02 * of.decode, of.token_s
        ttft_s = prefill_s + of.latency_s
        return [prefill_s, ttft_s, decode_s + token_s, decode_s + 8 * token_s, of.beside]

    assert tuple(fitted(figures, figures(true))) == pytest.approx(tuple(true))


def test_no_factor_is_negative() -> None:
    """The first figure would be matched by a latency below 0."""

    def figures(of: Factors) -> list[float]:
        return [of.prefill + of.latency_s, of.prefill, of.beside, of.decode, of.token_s]

    assert fitted(figures, [0.9, 1.0, 1.0, 1.0, 1.0]).latency_s == 0.0


def test_one_instance_is_as_slow_as_its_loops() -> None:
    """The outcomes are those of a simulated server, which has other costs than the profile."""
    profiled = Costs(0.0127, 1.74e-4, 7.0e-8), Costs(0.0117, 3.4e-4, 1.36e-6)
    server = Calibration(
        profiled,
        times(0.95, profiled[0]),
        times(1.1, profiled[1])._replace(first_s=1.1 * profiled[1].first_s + 1e-4),
        times(1.02, profiled[0]),
        0.012,
        longest_mean=1.0,
        gap_s=0.015,
    )
    limits = Limits(ttft_slo_s=PATIENT_S, tbt_slo_s=PATIENT_TBT_S)
    loops = {name: ClosedLoop(loop.concurrency, requests_of(loop)) for name, loop in LOOPS.items()}
    results = simulated_server(DEFAULT, server, limits).run_loops(loops.values())
    in_order = iter(outcomes_of(results))
    found = one_instance.calibrated(
        profiled, {name: list(itertools.islice(in_order, len(loop.requests))) for name, loop in loops.items()}
    )
    assert tuple(found.prefill) == pytest.approx(tuple(server.prefill), rel=0.02)
    assert tuple(found.beside) == pytest.approx(tuple(server.beside), rel=0.02)
    assert found.decode.seconds(8, 2000) == pytest.approx(server.decode.seconds(8, 2000), rel=0.02)
    assert found.decode.seconds(24, 5000) == pytest.approx(server.decode.seconds(24, 5000), rel=0.02)
    assert found.first_token_s == pytest.approx(server.first_token_s, abs=0.001)


def requests_of(loop: Loop | MixedLoop) -> list[TraceRequest]:
    """Return the requests of a loop, or requests of similar sizes."""
    if isinstance(loop, Loop):
        return [TraceRequest(0.0, loop.num_input_tokens, loop.num_output_tokens)] * loop.num_requests
    sizes = itertools.cycle(itertools.product(loop.input_tokens, loop.output_tokens))
    of_loop = itertools.islice(sizes, loop.num_requests)
    return [TraceRequest(0.0, int(num_input), int(num_output)) for num_input, num_output in of_loop]


def outcomes_of(results: Results) -> list[Outcome]:
    """Return the outcomes in order of arrival."""
    columns = ("arrival_s", "ttft_s", "tbt_s", "end_s", "num_input_tokens", "num_output_tokens")
    return [
        Outcome(
            number=number,
            kind=Kind.FINISHED,
            scheduled_s=arrival_s,
            num_input_tokens=int(num_input),
            lag_s=0.0,
            answered_s=end_s - arrival_s,
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            num_output_tokens=int(num_output),
        )
        for number, (arrival_s, ttft_s, tbt_s, end_s, num_input, num_output) in enumerate(
            sorted(zip(*(results[name].tolist() for name in columns), strict=True))
        )
    ]


def test_no_cost_is_negative() -> None:
    """The second factor would be -1."""
    assert non_negative([(1.0, 1.0), (1.0, 2.0)], [1.0, 0.0], [1.0, 1.0]) == pytest.approx([0.5, 0.0])


def test_the_mean_of_rounds() -> None:
    slow = Calibration(
        (PREFILL, DECODE), PREFILL, DECODE, PREFILL, 0.02, 1.4, 0.03, 0.01, (1.2, 1.4), JoinCosts(0.2, 0.4)
    )
    found = mean([slow, replace(slow, decode=times(2.0, DECODE), first_token_s=0.04, slowdowns=(1.0, 1.2))])
    assert found.profiled == (PREFILL, DECODE)
    assert (found.prefill, found.decode, found.beside) == (PREFILL, times(1.5, DECODE), PREFILL)
    assert (found.first_token_s, found.longest_mean) == pytest.approx((0.03, 1.4))
    assert (found.gap_s, found.prompt_s) == pytest.approx((0.03, 0.01))
    assert found.slowdowns == pytest.approx((1.1, 1.3))
    assert found.join_costs == pytest.approx((0.2, 0.4))
