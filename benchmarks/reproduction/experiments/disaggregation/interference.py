"""The effect of a prefill on running requests, and its cost in goodput.

The published figures are from the guide `Disaggregated serving explained`: vLLM on eight A100.
"""

from functools import partial
from pathlib import Path

import msgspec

from benchmarks.reproduction.experiment import SEED, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.planner import workload as workloads
from benchmarks.tools.planner.goodput import Goodputs
from benchmarks.tools.planner.search import FINE
from benchmarks.tools.simulator.cluster.machines.cards import HARDWARE, MODELS
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare, Roofline
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.synthetic import SyntheticLoad

MODEL, NODE = "llama2-70b", "a100"
RUNNING, CONTEXT = 30, 2048
PROMPT = 4096
ALONE_S, PREFILL_TOKENS_PER_S = 0.032, 48_200.0
"""Published figures: the seconds of a step without prefills, and prefill tokens a second without steps."""
PUBLISHED_BESIDE_MS = {512: 58.0, 1024: 89.0, 2048: 134.0, 4096: 178.0}
PUBLISHED_CHUNKED_MS = {2048: 112.0, 1024: 71.0, 512: 48.0, 256: 38.0}

INPUT, OUTPUT = 2048, 256
TTFT_SLO_S, TBT_SLO_S, ATTAINMENT = 0.5, 0.05, 0.99
MOST_REQUESTS = 1000
_BASE = Setup(model=MODEL, hardware=NODE, rejects=False)
SYSTEMS = {
    "coupled, whole prompts": (msgspec.structs.replace(_BASE, num_coupled=1), 12.4),
    "coupled, chunks of 512": (msgspec.structs.replace(_BASE, num_coupled=1, chunk_tokens=512), 16.8),
    "1P+1D, 4 devices each": (
        msgspec.structs.replace(_BASE, num_prefill=1, num_decode=1, num_gpus=4),
        21.3,
    ),
}


def run(trace: Trace, folder: Path) -> Outcome:
    """Compute the times of steps beside prefills, and the goodput of each system."""
    costs = Roofline(MODELS[MODEL], HARDWARE[NODE])
    iteration_s = costs.iteration_s((), RUNNING) + RUNNING * CONTEXT * costs.kv_token_s
    rows: list[list[str | float | None]] = [["alone", 1000 * ALONE_S, 1000 * iteration_s, 1.0, 1.0]]

    def beside(what: str, published_ms: float, seconds: float) -> None:
        rows.append(
            [what, published_ms, 1000 * seconds, published_ms / (1000 * ALONE_S), seconds / iteration_s]
        )

    for num_tokens, published_ms in PUBLISHED_BESIDE_MS.items():
        seconds = iteration_s + costs.iteration_s([PromptShare(num_tokens, 0)], 0)
        beside(f"a prompt of {num_tokens:,} before it", published_ms, seconds)
    for num_tokens, published_ms in PUBLISHED_CHUNKED_MS.items():
        share = PromptShare(num_tokens - RUNNING, PROMPT // 2)
        seconds = costs.iteration_s([share], RUNNING) + RUNNING * CONTEXT * costs.kv_token_s
        beside(f"{num_tokens:,} tokens, some of them of a prompt", published_ms, seconds)
    header = ["a step of decoding", "published, ms", "ours, ms", "published, by alone", "ours, by alone"]
    return Outcome([Table(header, rows), _goodputs(costs, iteration_s)])


def _goodputs(costs: Roofline, iteration_s: float) -> Table:
    """Return the goodputs with the published SLOs and with SLOs in proportion.

    An SLO in proportion is the published SLO multiplied by our time and divided by the guide's time. Both are
    times of a request that runs alone.
    """
    prefill_s = costs.iteration_s([PromptShare(INPUT, 0)], 0)
    ttft_s = TTFT_SLO_S / (INPUT / PREFILL_TOKENS_PER_S) * prefill_s
    tbt_s = TBT_SLO_S / ALONE_S * iteration_s
    slos = [(TTFT_SLO_S, TBT_SLO_S), (ttft_s, tbt_s)]
    workload = workloads.of_synthetic(
        SyntheticLoad(1.0, (float(INPUT),), (float(OUTPUT),)), SEED, MOST_REQUESTS
    )
    rows: list[list[str | float | None]] = []
    for name, (system, published) in SYSTEMS.items():
        goodputs: list[float] = []
        for ttft_slo_s, tbt_slo_s in slos:
            setup = msgspec.structs.replace(system, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s)
            load = partial(workload.at, slos=setup.slos, most_requests=MOST_REQUESTS)
            measured = Goodputs(load, ATTAINMENT).measure(setup, 1 / prefill_s, FINE)
            goodputs.append(measured.low_per_s)
        rows.append([name, published, *goodputs])
    header = ["goodput, req/s", "published"]
    header += [f"ours, TTFT {ttft:.3g} s, TBT {1000 * tbt:.3g} ms" for ttft, tbt in slos]
    return Table(header, rows)


def remark(outcome: Outcome) -> str:
    """Return the remark about the direction of both effects."""
    steps, goodputs = outcome.tables
    whole, chunked, disaggregated = (number(row[3]) for row in goodputs.rows)
    longest = steps.rows[len(PUBLISHED_BESIDE_MS)]
    flops = PREFILL_TOKENS_PER_S * 2 * MODELS[MODEL].num_linear_weights
    card = HARDWARE[NODE]
    wins = disaggregated > max(chunked, whole)
    return (
        f"The same direction, more strongly: a prompt of {PROMPT:,} tokens makes the step that waits for it"
        f" {number(longest[4]):.0f} times as long here, {number(longest[3]):.1f} times there, and smaller"
        f" chunks hold it up less. The published prefill of {PREFILL_TOKENS_PER_S:,.0f} tokens/s would need"
        f" {flops / 1e15:.1f} PFLOP/s, of which {card.num_gpus} A100 have"
        f" {card.num_gpus * card.gpu_flops / 1e15:.1f}; ours is slower, so with the published SLOs less is"
        " served: on four of the devices a prefill alone takes nearly all of 0.5 s. With SLOs that are the"
        " same multiples of what one request takes alone (last column) the disaggregated cluster"
        f" {'serves most, as published' if wins else 'does not serve most, against the source'}:"
        f" {disaggregated:.3g} req/s, {whole:.3g} with whole prompts, {chunked:.3g} in chunks."
    )


EXPERIMENT = Experiment(
    "interference",
    "Prefill beside decoding",
    "`Disaggregated serving explained`: TBT of 32 ms alone, up to 178 ms beside a prefill, 48 ms in chunks of"
    " 512, 34 ms disaggregated; goodput 12.4 / 16.8 / 21.3 req/s.",
    f"{MODEL} on 8 x A100. Steps by roofline: {RUNNING} running requests of {CONTEXT:,} tokens, prompts of"
    f" {PROMPT:,} in chunks. Goodput: the rate up to which {ATTAINMENT:.0%} of the requests are within both"
    f" SLOs, to {FINE:.0%}; {INPUT:,} tokens in, {OUTPUT} out, Poisson. Disaggregated is half and half"
    " (published: 3 and 5 devices).",
    remark,
    run,
    cost=9,
)
