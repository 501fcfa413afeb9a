"""Prompts inlined by choice, compared with clusters that always or never transfer KVCache."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.reproduction.experiment import SEED, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, synthesize

NUM_NODES = 4
BASE = Setup(model="llama3-70b", ttft_slo_s=10.0, tbt_slo_s=0.1, block_tokens=128)
PAIRS = {"num_prefill": NUM_NODES // 2, "num_decode": NUM_NODES // 2}
SYSTEMS = tuple(
    msgspec.structs.replace(BASE, **fields)
    for fields in (PAIRS, {"num_both": NUM_NODES}, {**PAIRS, "inlining": True})
)
LENIENT_TTFT_S = 30.0
LENIENT = tuple(msgspec.structs.replace(setup, ttft_slo_s=LENIENT_TTFT_S) for setup in SYSTEMS)
SPEEDS, LENIENT_SPEEDS = (0.5, 1.0, 1.5, 2.0), (1.0, 2.0)
NUM_TRACE_REQUESTS, NUM_RANDOM, NUM_REQUESTS = 1500, 10, 800
OFFERED = 1.1
"""The offered load of a random load, as a multiple of the nodes' capacity."""
BATCH = 60
"""The number of requests that share an iteration, in the estimate of capacity."""


def drawn_load(seed: int) -> SyntheticLoad:
    """Return a random load: lengths, burstiness, turns and shared prefix are drawn.

    Its rate is `OFFERED` times the nodes' capacity.
    """
    rng = random.Random(seed)
    num_input, num_output = 10 ** rng.uniform(2.3, 4.3), 10 ** rng.uniform(1.2, 2.8)
    load = SyntheticLoad(
        rate_per_s=1.0,
        first_input_tokens=_spread(num_input),
        output_tokens=_spread(num_output),
        burstiness=rng.choice([1.0, 1.0, 3.0]),
        follow_up_share=rng.choice([0.0, 0.4, 0.8]),
        turn_gap_s=(5.0, 30.0),
        shared_prefix_tokens=rng.choice([0, 0, 1024]),
        added_input_tokens=(50.0, 50.0 + num_input / 2),
    )
    return msgspec.structs.replace(load, rate_per_s=OFFERED * capacity_per_s(load))


def _spread(mean: float) -> tuple[float, ...]:
    return (0.25 * mean, 0.5 * mean, mean, 2.25 * mean)


def capacity_per_s(load: SyntheticLoad) -> float:
    """Return the requests a second that the nodes can compute if each prefix is computed once."""
    costs, requests = SYSTEMS[0].shape().costs, list(islice(synthesize(load, SEED), 300))
    known, seconds = set[int](), 0.0
    for request in requests:
        num_known = next(
            (index for index, block in enumerate(request.hash_ids) if block not in known),
            len(request.hash_ids),
        )
        known.update(request.hash_ids)
        num_cached = min(num_known * BLOCK_TOKENS, request.num_input_tokens - 1)
        token_s = costs.iteration_s((), BATCH) / BATCH + costs.kv_token_s * request.num_input_tokens
        seconds += costs.iteration_s([PromptShare(request.num_input_tokens - num_cached, num_cached)], 0)
        seconds += request.num_output_tokens * token_s
    return NUM_NODES * len(requests) / seconds


def run(trace: Trace, folder: Path) -> Outcome:
    """Simulate all loads. The table has one row for each."""
    of_trace = [(SYSTEMS, "", speed) for speed in SPEEDS]
    of_trace += [(LENIENT, f", TTFT within {LENIENT_TTFT_S:g} s", speed) for speed in LENIENT_SPEEDS]
    rows = [
        _row(f"trace x{speed:g}{terms}", partial(trace.load, speed, NUM_TRACE_REQUESTS), systems)
        for systems, terms, speed in of_trace
    ]
    for seed in range(NUM_RANDOM):
        load = drawn_load(seed)
        tokens = f"{sum(load.first_input_tokens) / 4:,.0f} in, {sum(load.output_tokens) / 4:,.0f} out"
        rows.append(_row(tokens, partial(_first, load), SYSTEMS))
    header = [
        "load",
        "req/s",
        *(f"{setup.name}" for setup in SYSTEMS),
        "by the better one",
        "prompt tokens by that",
        "inlined",
    ]
    return Outcome([Table(header, rows)])


def _first(load: SyntheticLoad) -> Iterator[TraceRequest]:
    return islice(synthesize(load, SEED), NUM_REQUESTS)


def _row(
    name: str, load: Callable[[], Iterator[TraceRequest]], systems: Sequence[Setup]
) -> list[str | float | None]:
    runs = [simulate(setup, load()) for setup in systems]
    shares = [run.summary.effective_share for run, _ in runs]
    tokens = [_effective_tokens(results, setup) for (_, results), setup in zip(runs, systems, strict=True)]
    better = max((0, 1), key=shares.__getitem__)
    chosen, _ = runs[-1]
    assert chosen.conductor is not None
    num_inlined = chosen.conductor["num_inlined"] / max(1, chosen.summary.num_finished)
    by_better = shares[-1] / shares[better], tokens[-1] / tokens[better]
    return [name, chosen.rate_per_s, *shares, *by_better, num_inlined]


def _effective_tokens(results: Results, setup: Setup) -> float:
    """Return the prompt tokens of requests that met both SLOs."""
    is_effective = (results["ttft_s"] <= setup.ttft_slo_s) & ~(results["tbt_s"] > setup.tbt_slo_s)
    return float(results["num_input_tokens"][is_effective].sum())


def remark(outcome: Outcome) -> str:
    """Return the remark: on how many loads the choice is equal to the better of the fixed systems."""
    rows = outcome.tables[0].rows
    ratios = [number(row[5]) for row in rows]
    num_good, worst = sum(ratio >= 0.99 for ratio in ratios), rows[ratios.index(min(ratios))]
    by_pairs = min(number(row[4]) / number(row[2]) for row in rows)
    return (
        f"By choice at least 99% as many requests are effective as with the better of the two on {num_good}"
        f" of {len(ratios)} loads. The worst is {worst[0]}: {number(worst[5]):.1%} as many, with"
        f" {number(worst[6]):.1%} as many prompt tokens. Where much is refused, shares of requests depend on"
        " how long the accepted prompts are. Against 2P+2D without inlining, which transfers all KVCache,"
        f" it is at least {by_pairs:.1%} on every load."
    )


EXPERIMENT = Experiment(
    "inlining",
    "Prompts that decode instances compute, by choice",
    "Mooncake (arXiv), section 5: prefill stays apart, except where a prompt can be inlined into the decoding"
    " batch within its TBT SLO. No figures.",
    f"llama3-70b on {NUM_NODES} nodes, TTFT within {BASE.ttft_slo_s:g} s unless said otherwise, TBT within"
    f" {BASE.tbt_slo_s:g} s; blocks of {BASE.block_tokens} tokens. Effective requests by all, of the first"
    f" {NUM_TRACE_REQUESTS:,} of the trace at several speeds and of {NUM_RANDOM} random loads of"
    f" {NUM_REQUESTS}, which offer {OFFERED:g} times what the nodes can compute.",
    remark,
    run,
    cost=40,
)
