"""BanaServe's performance model (section 4.3) against simulated clusters."""

from statistics import fmean

import numpy as np
import pytest

from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.request import TraceRequest, num_blocks_of
from conductor.performance.model import DecodeCapacity, Pairs, Sizes

WITHIN = 0.15
NUM_REQUESTS = 300


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "sizes", "rate_per_s"),
    [
        (1, 1, Sizes(2048, 64), 4.0),
        (1, 1, Sizes(512, 512), 8.0),
        (1, 3, Sizes(1024, 256), 7.0),
        (2, 1, Sizes(4096, 128), 4.0),
    ],
)
def test_latency_memory_and_throughput_are_those_of_the_simulator(
    num_prefill: int, num_decode: int, sizes: Sizes, rate_per_s: float
) -> None:
    setup = Setup(model="llama-3.1-8b", num_gpus=1, num_prefill=num_prefill, num_decode=num_decode)
    kv_tokens: list[float] = []

    def sample(cluster: DisaggregatedCluster) -> None:
        kv_tokens.append(fmean(decode.batch.num_kv_tokens for decode in cluster.decodes))

    cluster = setup.cluster(sample)
    assert isinstance(cluster, DisaggregatedCluster)
    num_prompt, num_output = int(sizes.num_prompt_tokens), int(sizes.num_output_tokens)
    num_blocks = num_blocks_of(num_prompt)
    found = cluster.run(
        TraceRequest(
            n / rate_per_s, num_prompt, num_output, tuple(range(n * num_blocks, (n + 1) * num_blocks))
        )
        for n in range(NUM_REQUESTS)
    )
    steady = slice(NUM_REQUESTS // 3, 2 * NUM_REQUESTS // 3)
    ttft_s, took_s = found["ttft_s"][steady], (found["end_s"] - found["arrival_s"])[steady]
    shape = setup.shape()
    prefill, decode = shape.costs.profiled
    capacity = DecodeCapacity(decode, setup.max_batch, shape.num_device_blocks * shape.block_tokens)
    nic_bytes_per_s = shape.hardware.nic_bytes_per_s * shape.efficiencies.nic
    transfer_s = shape.model.kv_bytes_per_token / nic_bytes_per_s
    pairs = Pairs(num_prefill, num_decode, prefill, capacity, shape.model.num_layers, transfer_s)
    predicted = pairs.performance(sizes, rate_per_s * float(took_s.mean()))
    span = len(kv_tokens)
    simulated = (
        float(ttft_s.mean()),
        float((took_s - ttft_s).mean()) / (num_output - 1),
        rate_per_s * num_output,
        float(np.mean(kv_tokens[span // 3 : 2 * span // 3])),
    )
    model = predicted.ttft_s, predicted.tpot_s, predicted.output_tokens_per_s, predicted.num_kv_tokens
    assert model == pytest.approx(simulated, rel=WITHIN)
