"""The pipeline of layers (fetch, compute, store), and the lowest bandwidth at which it hides transfers.

These are equations 12 to 17 of BanaServe, section 4.2.
"""

from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduction.experiment import Cell, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.cluster.machines.cards import GBPS, HARDWARE, MODELS
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare, Roofline
from conductor.performance.model import overlapped_s

LENGTHS = (1024, 4096, 16384, 65536, 131072)
CACHED = (0.25, 0.5, 0.75, 0.9, 0.97)
DEVICES = (("llama-3.1-8b", "a100", 1), ("llama-13b", "a100", 1), ("llama3-70b", "a800", 8))
PAPER_GBPS = 200.0
MEASURED_S = {1024: 0.714, 2048: 1.692, 4096: 4.650, 8160: 13.857}
"""Measured seconds to compute the second half of a prompt if its first half is cached.

The keys are the tokens of the whole prompt. The seconds are from docs/benchmarks.md, "Prefill".
"""
SMOLLM2_LAYERS, SMOLLM2_LAYER_BYTES = 30, 3 * 64 * 2 * 2
"""The layers of SmolLM2-135M, and the bytes of a token's KVCache in one layer (equation 15)."""
SLOW_S = {
    1024: (1.229, 1.265, 2.525),
    2048: (2.887, 2.915, 5.859),
    4096: (7.328, 7.393, 15.082),
    8160: (21.071, 21.093, 42.326),
}
"""Measured seconds of prefills by the number of prompt tokens, from docs/benchmarks.md.

The three values are: the computation alone; with stores in the pipeline; with stores after the computation.
The stores take as long as the computation.
"""


class Layer(NamedTuple):
    """One layer of a prefill: the seconds to compute it, and the bytes that are fetched and stored."""

    compute_s: float
    fetched_bytes: float
    stored_bytes: float

    @property
    def needed_bytes_per_s(self) -> float:
        """The bandwidth of one direction at which T_KV = T_F,layer. Both directions work at the same time."""
        return max(self.fetched_bytes, self.stored_bytes) / self.compute_s


def layer_of(model: str, hardware: str, num_gpus: int, num_tokens: int, num_cached: int) -> Layer:
    """Return one layer by roofline, of a prompt with `num_cached` cached tokens.

    Equation 12 multiplies the time of the whole forward pass by the hit rate r. Here the new part, 1 - r, is
    computed after the cached tokens. At the paper's r = 0.5 both are nearly equal.
    """
    card, devices = MODELS[model], HARDWARE[hardware].with_gpus(num_gpus)
    num_new = num_tokens - num_cached
    compute_s = Roofline(card, devices).iteration_s([PromptShare(num_new, num_cached)], 0)
    token_bytes = card.kv_bytes_per_token / card.num_layers
    return Layer(compute_s / card.num_layers, num_cached * token_bytes, num_new * token_bytes)


def measured_layer(num_tokens: int) -> Layer:
    """Return a layer of our worker on a CPU core, for a prompt of which half is cached."""
    num_bytes = num_tokens / 2 * SMOLLM2_LAYER_BYTES
    return Layer(MEASURED_S[num_tokens] / SMOLLM2_LAYERS, num_bytes, num_bytes)


def run(trace: Trace, folder: Path) -> Outcome:
    """Return three tables: needed bandwidth by roofline and as measured, and the time at the crossover."""
    rows: list[list[Cell]] = []
    for model, hardware, num_gpus in DEVICES:
        for num_tokens in LENGTHS:
            layers = [
                layer_of(model, hardware, num_gpus, num_tokens, int(share * num_tokens)) for share in CACHED
            ]
            needed = [layer.needed_bytes_per_s / GBPS for layer in layers]
            rows.append([f"{model}, {num_gpus} x {hardware.upper()}", f"{num_tokens:,}", *needed])
    header = ["model", "prompt tokens", *(f"{share:.0%} cached, Gbit/s" for share in CACHED)]
    measured: list[list[Cell]] = []
    for num_tokens in MEASURED_S:
        layer = measured_layer(num_tokens)
        measured.append([f"{num_tokens:,}", 1000 * layer.compute_s, layer.needed_bytes_per_s / GBPS])
    of_worker = Table(["tokens, half cached", "computing a layer, ms", "needed, Gbit/s"], measured)
    return Outcome([Table(header, rows), of_worker, _shown()])


def _shown() -> Table:
    """Return the times of passes whose transfers take as long as the computation.

    The times are multiples of the time of the computation alone.
    """
    rows: list[list[Cell]] = []
    for num_tokens, (alone_s, pipeline_s, after_s) in SLOW_S.items():
        predicted = overlapped_s(alone_s, alone_s, SMOLLM2_LAYERS) / alone_s
        rows.append([f"{num_tokens:,}", predicted, pipeline_s / alone_s, 2.0, after_s / alone_s])
    header = ["tokens, T_KV = T_F,layer", "pipeline, by the model", "measured"]
    return Table([*header, "one after the other, by the model", "measured"], rows)


def remark(outcome: Outcome) -> str:
    """Return the remark about the crossover."""
    needed, measured, shown = (table.rows for table in outcome.tables)
    of = {(str(row[0]).split(",")[0], str(row[1])): row for row in needed}
    small, large = of["llama-3.1-8b", "4,096"], of["llama-3.1-8b", "131,072"]
    widest = max(number(cell) for row in needed for cell in row[2:])
    num_beyond = sum(number(row[-1]) > PAPER_GBPS for row in needed)
    most = max(number(row[2]) for row in measured)
    farthest = max(abs(number(row[1]) - number(row[2])) for row in shown)
    return (
        "Below the bandwidth of a cell the transfer of a layer takes longer than computing it, and the"
        f" excess shows. With half of 4,096 tokens cached {number(small[3]):.2g} Gbit/s are enough for"
        f" Llama-3.1-8B: at the paper's {PAPER_GBPS:g} Gbit/s transfers hide many times over. The hit rate"
        f" raises the need, up to {widest:.0f} Gbit/s here, as the fetch grows and the computation shrinks."
        f" Longer prompts lower it ({number(small[-1]):.0f} Gbit/s for 4,096 tokens with 97% cached,"
        f" {number(large[-1]):.0f} for 131,072), as attention to what is cached takes time, too. Models"
        " without grouped queries (llama-13b) need most. So BanaServe's claim holds for the hit rate of its"
        f" example, and not for prompts that are nearly all cached: {num_beyond} of the {len(needed)} with"
        f" 97% cached need more than {PAPER_GBPS:g} Gbit/s."
        f" Our worker on a CPU core needs {most:.2g} Gbit/s, which any memory has. Measured at the"
        f" crossover, the pipeline takes within {farthest:.0%} what the model says."
    )


EXPERIMENT = Experiment(
    "pipeline",
    "Fetch, compute and store, layer by layer",
    "BanaServe, section 4.2 and equations 12 to 17: fetching a layer's KVCache hides behind computing while"
    " T_KV <= T_F,layer: 0.082 ms against 4.22 ms at 200 Gbit/s with half of 1,000 tokens cached.",
    "The bandwidth at which both are equal. By roofline: fetches and stores go in opposite directions at the"
    " same time; the longer of both counts. Measured: our worker, SmolLM2-135M on one core, and the same with"
    " stores slowed down until they take as long as computing ([benchmarks.md](benchmarks.md#prefill)).",
    remark,
    run,
)
