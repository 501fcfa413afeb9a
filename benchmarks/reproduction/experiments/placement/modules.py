"""The gain by moving modules between devices, and the largest possible gain.

The published figures are BanaServe's Figures 1, 2(b) and 8 to 11.
"""

import dataclasses
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from benchmarks.reproduction.experiment import (
    FIVE_SEEDS,
    Cell,
    Experiment,
    Outcome,
    Table,
    Trace,
    mean_of,
    number,
)
from benchmarks.tools.simulator.cluster.coupled_cluster import CoupledCluster
from benchmarks.tools.simulator.cluster.machines.cards import hardware_card, model_card
from benchmarks.tools.simulator.cluster.machines.costs import Roofline
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.moved_layers import PERIOD_S
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.simulator.summary import summarize
from benchmarks.tools.traces.request import TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, synthesize
from mooncake.config.policies import Scheduling

NUM_DEVICES = 4
BASE = Setup(hardware="a100", num_gpus=1, rejects=False)
HALF = NUM_DEVICES // 2
CHUNK_TOKENS = 2048
VLLM, DISTSERVE, ALGORITHM_2, OURS = "vLLM-like", "DistServe-like", "Algorithm 2", "ours"
BANASERVE = "BanaServe"
IDEAL = "ideal"
"""The name of the ideal system: one device with the speed and memory of all devices together."""
SETUPS = {
    VLLM: replace(BASE, num_coupled=NUM_DEVICES, chunk_tokens=CHUNK_TOKENS),
    DISTSERVE: replace(BASE, num_prefill=HALF, num_decode=HALF),
    ALGORITHM_2: replace(BASE, num_prefill=HALF, num_decode=HALF, scheduling=Scheduling.BANASERVE),
    BANASERVE: replace(
        BASE, num_prefill=HALF, num_decode=HALF, scheduling=Scheduling.BANASERVE, moves_layers=True
    ),
    OURS: replace(BASE, num_both=NUM_DEVICES),
}
SYSTEMS = (*SETUPS, IDEAL)
OUTPUT_TOKENS = 512
CONTEXT_TOKENS = {"llama-13b": 4096, "opt-13b": 2048}
RATES_PER_S = (1.0, 10.0, 20.0)
ARRIVALS_S = 30.0
FIGURES = {
    ("llama-13b", "short"): ("8", 1.2, 1.2),
    ("opt-13b", "short"): ("9", 3.9, 3.9),
    ("llama-13b", "long"): ("10", 1.5, 1.5),
    ("opt-13b", "long"): ("11", 1.3, 1.3),
}
"""The number of the figure and the largest published gains in throughput, by model and load.

The gains are relative to vLLM and to DistServe (section 5.2).
"""


def load_of(name: str, model: str) -> SyntheticLoad:
    """Return a load with the paper's lengths (Figure 7), cut to the model's context."""
    if name == "short":
        inputs = tuple(float(tokens) for tokens in range(5, 50, 5))
    else:
        most = CONTEXT_TOKENS[model] - OUTPUT_TOKENS
        inputs = tuple(min(2000.0 * (85_000 / 2000) ** (part / 8), most) for part in range(9))
    return SyntheticLoad(1.0, tuple(sorted(inputs)), (float(OUTPUT_TOKENS),))


def _results(system: str, model: str, load: SyntheticLoad, rate_per_s: float, seed: int) -> Results:
    if system == IDEAL:
        shape = replace(BASE, model=model, num_coupled=1).shape()
        one = shape.hardware
        whole = dataclasses.replace(
            one,
            gpu_flops=NUM_DEVICES * one.gpu_flops,
            gpu_memory_bytes_per_s=NUM_DEVICES * one.gpu_memory_bytes_per_s,
            gpu_memory_bytes=NUM_DEVICES * one.gpu_memory_bytes,
        )
        costs, max_batch = Roofline(shape.model, whole), NUM_DEVICES * shape.max_batch
        shape = dataclasses.replace(shape, hardware=whole, costs=costs, max_batch=max_batch)
        return CoupledCluster(shape, 1, NUM_DEVICES * CHUNK_TOKENS).run(_requests(load, rate_per_s, seed))
    return _simulated(replace(SETUPS[system], model=model), load, rate_per_s, seed)


def _simulated(setup: Setup, load: SyntheticLoad, rate_per_s: float, seed: int) -> Results:
    return setup.cluster().run(_requests(load, rate_per_s, seed))


def _requests(load: SyntheticLoad, rate_per_s: float, seed: int) -> list[TraceRequest]:
    endless = synthesize(replace(load, rate_per_s=rate_per_s), seed)
    return list(takewhile(lambda request: request.arrival_s < ARRIVALS_S, endless))


def run(trace: Trace, folder: Path) -> Outcome:
    """Simulate each figure and rate.

    The tables have the gains beside the published ones, throughput, latency, and use of the devices.
    """
    throughput: list[list[Cell]] = []
    latency: list[list[Cell]] = []
    gains: list[list[Cell]] = []
    for (model, name), (figure, by_vllm, by_distserve) in FIGURES.items():
        load, of_rates = load_of(name, model), list[dict[str, float]]()
        for rate_per_s in RATES_PER_S:
            tokens_per_s, latency_s = dict[str, list[float]](), dict[str, list[float]]()
            for system in SYSTEMS:
                runs = [_results(system, model, load, rate_per_s, seed) for seed in FIVE_SEEDS]
                tokens_per_s[system] = [summarize(of).output_tokens_per_s for of in runs]
                latency_s[system] = [float((of["end_s"] - of["arrival_s"]).mean()) for of in runs]
            begin: list[Cell] = [f"{figure}: {model}, {name}", rate_per_s]
            throughput.append([*begin, *(mean_of(tokens_per_s[system]) for system in SYSTEMS)])
            latency.append([*begin, *(mean_of(latency_s[system]) for system in SYSTEMS)])
            mean = {system: fmean(values) for system, values in tokens_per_s.items()}
            of_rates.append(mean)

        gains.append(
            [
                f"{figure}: {model}, {name}",
                by_vllm,
                *(_largest_gain(of_rates, system, VLLM) for system in (BANASERVE, IDEAL)),
                *(
                    by_distserve,
                    _largest_gain(of_rates, BANASERVE, DISTSERVE),
                    _largest_gain(of_rates, IDEAL, DISTSERVE),
                ),
                f"{mean[OURS] / mean[IDEAL]:.0%}",
            ]
        )
    header = ["figure", "req/s", *SYSTEMS]
    gain_header = [
        "figure",
        "tokens/s by vLLM's, published at most",
        BANASERVE,
        IDEAL,
        "by DistServe's, published at most",
        BANASERVE,
        IDEAL,
        f"ours by ideal at {RATES_PER_S[-1]:g} req/s",
    ]
    return Outcome(
        [Table(gain_header, gains), Table(header, throughput), Table(header, latency), _use_of_devices()]
    )


def _largest_gain(of_rates: Sequence[dict[str, float]], system: str, rival: str) -> float:
    return max(of_rate[system] / of_rate[rival] for of_rate in of_rates)


def _use_of_devices() -> Table:
    """Return the table of the use of devices: operations as a share of the peak, and held memory.

    It compares one device with both roles, and one device of each role.
    """
    rows: list[list[Cell]] = []
    whole, pair = replace(BASE, num_coupled=1), replace(BASE, num_prefill=1, num_decode=1)
    for setup, name, rate_per_s in (
        *((whole, "short", rate) for rate in (1.0, 4.0, 10.0)),
        (pair, "short", 4.0),
        (pair, "long", 1.0),
    ):
        model = "llama-13b"
        of_model, load = replace(setup, model=model), load_of(name, model)
        runs = [_simulated(of_model, load, rate_per_s, seed) for seed in FIVE_SEEDS]
        of_seeds = [_shares(results, model, apart=setup is pair) for results in runs]
        means = [mean_of(shares) for shares in zip(*of_seeds, strict=True)]
        blank: list[Cell] = [None] * (4 - len(means))
        rows.append([setup.name, name, rate_per_s, *blank, *means])
    return Table(
        ["devices", "prompts", "req/s", "prefill: of peak", "memory", "decode: of peak", "memory"], rows
    )


def _shares(results: Results, model: str, *, apart: bool) -> list[float]:
    """Return the used shares of peak and memory, of each device.

    The devices are a prefill and a decode device (`apart`), or one device with both roles.
    """
    card, device = model_card(model), hardware_card("a100").with_gpus(1)
    seconds = float(results["end_s"].max() - results["arrival_s"].min())
    inputs, outputs = results["num_input_tokens"], results["num_output_tokens"]
    attention = 2 * card.num_layers * card.hidden
    prefill = float((2 * card.num_linear_weights * inputs + attention * inputs**2).sum())
    decode = float(
        (2 * card.num_linear_weights * outputs + attention * outputs * (2 * inputs + outputs)).sum()
    )
    running_s = results["end_s"] - results["arrival_s"] - results["ttft_s"]
    held = float((running_s * (inputs + outputs / 2)).sum()) / seconds
    held_before = float((results["ttft_s"] * inputs).sum()) / seconds
    peak = device.gpu_flops * seconds

    def of_memory(num_tokens: float) -> float:
        return (card.weights_bytes + card.kv_bytes_per_token * num_tokens) / device.gpu_memory_bytes

    if not apart:
        return [(prefill + decode) / peak, of_memory(held)]
    return [prefill / peak, of_memory(held_before), decode / peak, of_memory(held)]


def remark(outcome: Outcome) -> str:
    """Return the remark that says which published gains a balance of devices can explain."""
    gains = outcome.tables[0].rows
    moved_by_vllm, by_vllm, moved_by_distserve, by_distserve = (
        [number(row[column]) for row in gains] for column in (2, 3, 5, 6)
    )
    beyond = [str(row[0]) for row in gains if number(row[1]) > number(row[3])]
    within = [str(row[0]) for row in gains if str(row[0]) not in beyond]
    return (
        "However layers and heads are spread, their devices have no more operations, bandwidth and memory"
        f" than all of them as one. That one serves at most {_range(by_vllm)} times as much as coupled"
        f" devices, and {_range(by_distserve)} times as much as a fixed division. Published gains over vLLM"
        f" above that: {', '.join(beyond) or 'none'}; within it: {', '.join(within) or 'none'}. What is above"
        " must come from the rivals' software. The two models"
        " have one size and shape, and so nearly the same loads with short prompts, but published gains of"
        " 1.2 and 3.9. BanaServe's policy, with layers that move from decode to prefill devices by its"
        f" Algorithm 1, serves at most {_range(moved_by_distserve)} times as much as a fixed division, and"
        f" {_range(moved_by_vllm)} times as much as coupled devices. By equation 32 a prefill device that"
        " always computes and a decode device whose memory is full are used alike, about 1 of 2. So while"
        " long prompts keep both so, no layer moves. Instances that do both (`ours`, chosen"
        " request by request) are nearer to `ideal` without moving modules. Algorithm 2 routes prompts, and"
        " what is short here is decoding. Prompts of"
        " LongBench are cut to the contexts, 4,096 and 2,048 tokens: neither model takes the paper's 85,000."
        " The asymmetry of Figure 2(b) is there: one device has operations to spare, the other memory."
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


EXPERIMENT = Experiment(
    "modules",
    "Layers and heads that move, at best",
    "BanaServe, Figures 1, 2(b) and 8 to 11: 1.2 to 3.9 times vLLM's throughput, 1.1 to 2.8 times"
    " DistServe's (abstract; section 5.2 has other figures, used below), by layers and heads that move,"
    " routing and a store that all share.",
    f"{NUM_DEVICES} A100 (the paper does not say how many); inputs of 5 to 45 tokens (Alpaca) or 2,000"
    f" and more, cut to the context (LongBench), {OUTPUT_TOKENS} tokens out, the paper's limit; Poisson"
    f" arrivals for {ARRIVALS_S:g} s. Means of {len(FIVE_SEEDS)} seeds with 95% confidence intervals:"
    f" tokens/s, then seconds from arrival to end, then use of devices. `{DISTSERVE}`: {HALF} that"
    f" prefill and {HALF} that decode; `{ALGORITHM_2}`: the same with BanaServe's routing;"
    f" `{BANASERVE}`: this with layers that move (every {PERIOD_S} s, by the server's thresholds, over"
    f" NVLink); `{OURS}`: {NUM_DEVICES} with both roles; `{IDEAL}`: one device as fast"
    f" and large as {NUM_DEVICES}, so weights are held once and nothing is sent.",
    remark,
    run,
    cost=60,
)
