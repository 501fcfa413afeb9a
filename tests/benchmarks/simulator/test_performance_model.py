"""BanaServe's performance model (section 4.3) against simulated clusters, and the figures of real ones."""

from dataclasses import replace
from statistics import fmean

import msgspec
import pytest

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.simulator.calibration.costs import Calibration
from benchmarks.tools.simulator.calibration.loops import Loop
from benchmarks.tools.simulator.cluster.closed_loops import ClosedLoop
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.performance_model import PREDICTED, Figures, measured, predicted
from benchmarks.tools.simulator.real_server import PAIR
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.simulator.this_machine import simulated_server
from benchmarks.tools.traces.request import TraceRequest, num_blocks_of
from conductor.performance.model import Pairs, Sizes
from conductor.settings import Limits
from mooncake.messages.costs import Costs

WITHIN = 0.15
PATIENT_S = 600.0
"""A TTFT and a TBT SLO that nothing misses. With both, first tokens are held until their requests join a
batch."""
NUM_REQUESTS = 1000
PROFILED = Costs(0.005, 4.3e-4, 1.9e-7), Costs(0.008, 3.9e-4, 1.6e-6)
MACHINE = Calibration(
    PROFILED, *PROFILED, beside=PROFILED[0], first_token_s=0.0, longest_mean=1.0, gap_s=0.01, prompt_s=0.02
)
"""Costs as those of a CPU core that decodes, and of another one that computes prompts."""


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "sizes", "rate_per_s"),
    [
        (1, 1, Sizes(2048, 64), 4.0),
        (1, 1, Sizes(512, 512), 8.0),
        (1, 3, Sizes(1024, 256), 7.0),
        (2, 1, Sizes(4096, 128), 4.0),
    ],
)
def test_latency_memory_throughput_and_utilisation_are_those_of_the_simulator(
    num_prefill: int, num_decode: int, sizes: Sizes, rate_per_s: float
) -> None:
    setup = Setup(
        model="llama-3.1-8b",
        num_gpus=1,
        num_prefill=num_prefill,
        num_decode=num_decode,
        ttft_slo_s=PATIENT_S,
        tbt_slo_s=PATIENT_S,
    )
    kv_tokens: list[float] = []
    busy_s: list[float] = []

    def sample(cluster: DisaggregatedCluster) -> None:
        kv_tokens.append(fmean(decode.batch.num_kv_tokens for decode in cluster.decodes))
        busy_s.append(fmean(prefill.busy_s for prefill in cluster.prefills))

    num_prompt, num_output = int(sizes.num_prompt_tokens), int(sizes.num_output_tokens)
    num_blocks = num_blocks_of(num_prompt)
    requests = (
        TraceRequest(
            n / rate_per_s, num_prompt, num_output, tuple(range(n * num_blocks, (n + 1) * num_blocks))
        )
        for n in range(NUM_REQUESTS)
    )
    run, found = simulate(setup, requests, on_second=sample)
    steady = slice(NUM_REQUESTS // 3, 2 * NUM_REQUESTS // 3)
    ttft_s, took_s = found["ttft_s"][steady], (found["end_s"] - found["arrival_s"])[steady]
    shape = setup.shape()
    nic_bytes_per_s = shape.hardware.nic_bytes_per_s * shape.efficiencies.nic
    transfer_s = shape.model.kv_bytes_per_token / nic_bytes_per_s
    prefill, num_layers = shape.costs.profiled[0], shape.model.num_layers
    pairs = Pairs(num_prefill, num_decode, prefill, setup.decode_capacity(), num_layers, transfer_s)
    predicted = pairs.performance(sizes, rate_per_s * float(took_s.mean()))
    begin, end = len(kv_tokens) // 3, 2 * len(kv_tokens) // 3
    simulated = (
        float(ttft_s.mean()),
        float((took_s - ttft_s).mean()) / (num_output - 1),
        rate_per_s * num_output,
        fmean(kv_tokens[begin:end]),
        (busy_s[end] - busy_s[begin]) / (end - begin),
    )
    model = (
        predicted.ttft_s,
        predicted.tpot_s,
        predicted.output_tokens_per_s,
        predicted.num_kv_tokens,
        predicted.prefill_utilisation,
    )
    assert model == pytest.approx(simulated, rel=WITHIN)
    of_run, of_model = (msgspec.structs.astuple(of.terms) for of in (run, predicted))
    assert of_model == pytest.approx(of_run, rel=WITHIN)


@pytest.mark.parametrize("name", PREDICTED)
def test_closed_loops_take_as_long_as_simulated_ones(name: str) -> None:
    """In the loop of many short requests T_q is a quarter of TTFT."""
    loop = PREDICTED[name]
    cluster = simulated_server(PAIR, MACHINE, Limits(ttft_slo_s=PATIENT_S, tbt_slo_s=PATIENT_S))
    request = TraceRequest(0.0, loop.num_input_tokens, loop.num_output_tokens, ())
    results = cluster.run_loops([ClosedLoop(loop.concurrency, 5 * loop.num_requests * [request])])
    outcomes = [
        outcome(loop, arrival_s, end_s - arrival_s, ttft_s)
        for arrival_s, end_s, ttft_s in zip(
            *(results[column].tolist() for column in ("arrival_s", "end_s", "ttft_s")), strict=True
        )
    ]
    model = predicted(loop, replace(MACHINE, busy_prompt_s=MACHINE.prompt_s))
    assert model == pytest.approx(measured(loop, outcomes), rel=WITHIN)


def test_a_closed_loop_is_measured_without_its_beginning_and_its_end() -> None:
    """Two clients, whose answers take 2 s; at the beginning and at the end they take longer."""
    loop = Loop(100, 16, concurrency=2, num_requests=12, seed=0)
    found, now_s = list[Outcome](), 0.0
    for turn in range(6):
        answered_s = 2.0 if 0 < turn < 5 else 7.0
        found += 2 * [outcome(loop, now_s, answered_s, ttft_s=answered_s - 1.5)]
        now_s += answered_s
    assert measured(loop, found) == pytest.approx(Figures(0.5, 0.1, 16 / 1.0, 1.5 * 108))


def outcome(loop: Loop, scheduled_s: float, answered_s: float, ttft_s: float) -> Outcome:
    return Outcome(
        number=0,
        kind=Kind.FINISHED,
        scheduled_s=scheduled_s,
        num_input_tokens=loop.num_input_tokens,
        lag_s=0.0,
        answered_s=answered_s,
        ttft_s=ttft_s,
        num_output_tokens=loop.num_output_tokens,
    )
