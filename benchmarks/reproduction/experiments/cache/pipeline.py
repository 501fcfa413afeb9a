"""The pipeline of layers (fetch, compute, store), and the lowest bandwidth at which it hides transfers.

These are equations 12 to 17 of BanaServe, section 4.2.
"""

import math
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.prefill.links import NUM_LAYERS, OverLink, crossover, needed_bits_per_s
from benchmarks.reproduction.experiment import Cell, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.cluster.machines.cards import GBPS, HARDWARE, MODELS
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare, Roofline
from conductor.performance.model import overlapped_s

LENGTHS = (1024, 4096, 16384, 65536, 131072)
CACHED = (0.25, 0.5, 0.75, 0.9, 0.97)
DEVICES = (("llama-3.1-8b", "a100", 1), ("llama-13b", "a100", 1), ("llama3-70b", "a800", 8))
PAPER_GBPS = 200.0
GIGABIT = 1e9
FETCHED = (
    OverLink(512, 1024, math.inf, 0.0007, 0.0101, 0.307, 0.316),
    OverLink(512, 1024, 0.614e9, 0.0060, 0.0113, 0.307, 0.371),
    OverLink(512, 1024, 0.384e9, 0.0086, 0.0111, 0.307, 0.341),
    OverLink(512, 1024, 0.307e9, 0.0109, 0.0123, 0.307, 0.393),
    OverLink(512, 1024, 0.246e9, 0.0134, 0.0112, 0.307, 0.424),
    OverLink(512, 1024, 0.154e9, 0.0214, 0.0105, 0.307, 0.658),
    OverLink(1024, 2048, math.inf, 0.0013, 0.0244, 0.738, 0.750),
    OverLink(1024, 2048, 0.512e9, 0.0131, 0.0266, 0.738, 0.873),
    OverLink(1024, 2048, 0.320e9, 0.0206, 0.0255, 0.738, 0.816),
    OverLink(1024, 2048, 0.256e9, 0.0257, 0.0251, 0.738, 0.824),
    OverLink(1024, 2048, 0.205e9, 0.0321, 0.0253, 0.738, 1.008),
    OverLink(1024, 2048, 0.128e9, 0.0514, 0.0253, 0.738, 1.574),
    OverLink(1536, 2048, math.inf, 0.0014, 0.0131, 0.394, 0.407),
    OverLink(1536, 2048, 1.437e9, 0.0077, 0.0139, 0.394, 0.437),
    OverLink(1536, 2048, 0.898e9, 0.0116, 0.0143, 0.394, 0.487),
    OverLink(1536, 2048, 0.719e9, 0.0143, 0.0140, 0.394, 0.500),
    OverLink(1536, 2048, 0.575e9, 0.0176, 0.0157, 0.394, 0.597),
    OverLink(1536, 2048, 0.359e9, 0.0275, 0.0153, 0.394, 0.856),
    OverLink(2048, 4096, math.inf, 0.0023, 0.0682, 2.048, 2.091),
    OverLink(2048, 4096, 0.369e9, 0.0357, 0.0692, 2.048, 2.141),
    OverLink(2048, 4096, 0.230e9, 0.0571, 0.0699, 2.048, 2.194),
    OverLink(2048, 4096, 0.184e9, 0.0715, 0.0719, 2.048, 2.419),
    OverLink(2048, 4096, 0.147e9, 0.0893, 0.0697, 2.048, 2.822),
    OverLink(2048, 4096, 0.092e9, 0.1428, 0.0682, 2.048, 4.371),
    OverLink(3072, 4096, math.inf, 0.0027, 0.0377, 1.114, 1.159),
    OverLink(3072, 4096, 1.017e9, 0.0208, 0.0408, 1.114, 1.334),
    OverLink(3072, 4096, 0.635e9, 0.0320, 0.0410, 1.114, 1.371),
    OverLink(3072, 4096, 0.508e9, 0.0390, 0.0416, 1.114, 1.410),
    OverLink(3072, 4096, 0.407e9, 0.0486, 0.0451, 1.114, 1.579),
    OverLink(3072, 4096, 0.254e9, 0.0777, 0.0384, 1.114, 2.375),
    OverLink(4096, 5472, math.inf, 0.0035, 0.0612, 1.863, 1.857),
    OverLink(4096, 5472, 0.811e9, 0.0334, 0.0642, 1.863, 2.089),
    OverLink(4096, 5472, 0.507e9, 0.0524, 0.0665, 1.863, 2.215),
    OverLink(4096, 5472, 0.405e9, 0.0650, 0.0687, 1.863, 2.227),
    OverLink(4096, 5472, 0.324e9, 0.0813, 0.0647, 1.863, 2.569),
    OverLink(4096, 5472, 0.203e9, 0.1300, 0.0630, 1.863, 3.967),
)
"""Measured prefills of our worker over links, from docs/benchmarks.md, "Prefixes over slow links".

The first link of each prompt has no limit.
"""
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


def run(trace: Trace, folder: Path) -> Outcome:
    """Return three tables: needed bandwidth by roofline, measured fetches, and measured stores."""
    rows: list[list[Cell]] = []
    for model, hardware, num_gpus in DEVICES:
        for num_tokens in LENGTHS:
            layers = [
                layer_of(model, hardware, num_gpus, num_tokens, int(share * num_tokens)) for share in CACHED
            ]
            needed = [layer.needed_bytes_per_s / GBPS for layer in layers]
            rows.append([f"{model}, {num_gpus} x {hardware.upper()}", f"{num_tokens:,}", *needed])
    header = ["model", "prompt tokens", *(f"{share:.0%} cached, Gbit/s" for share in CACHED)]
    return Outcome([Table(header, rows), _fetched(), _stored()])


def _fetched() -> Table:
    """Return the measured crossover of each prompt, and its time at half of the needed bandwidth.

    A transfer shows if the prefill takes 5% longer than over a link without limit. Other times of prefills
    are multiples of the time of the computation alone.
    """
    rows: list[list[Cell]] = []
    for (num_cached, num_tokens), of_prompt in groupby(FETCHED, key=lambda link: link[:2]):
        links = list(of_prompt)
        slowest, needed = links[-1], needed_bits_per_s(num_cached, links[0].alone_s)
        by_model = crossover([(link.bits_per_s, link.model_s / link.alone_s) for link in links])
        shown = crossover([(link.bits_per_s, link.total_s / links[0].total_s) for link in links])
        assert by_model is not None
        assert shown is not None
        rows.append(
            [
                f"{num_cached:,} of {num_tokens:,}",
                1000 * fmean(link.compute_s for link in links),
                *(bits_per_s / GIGABIT for bits_per_s in (needed, by_model, shown)),
                1000 * slowest.transfer_s,
                slowest.model_s / slowest.alone_s,
                slowest.total_s / slowest.alone_s,
            ]
        )
    header = ["cached of tokens", "T_F,layer, ms", "needed, Gbit/s", "shows below, by the model", "measured"]
    return Table([*header, "at half the needed: T_KV, ms", "prefill, by the model", "measured"], rows)


def _stored() -> Table:
    """Return the times of passes whose transfers take as long as the computation.

    The times are multiples of the time of the computation alone.
    """
    rows: list[list[Cell]] = []
    for num_tokens, (alone_s, pipeline_s, after_s) in SLOW_S.items():
        predicted = overlapped_s(alone_s, alone_s, NUM_LAYERS) / alone_s
        rows.append([f"{num_tokens:,}", predicted, pipeline_s / alone_s, 2.0, after_s / alone_s])
    header = ["tokens, stores with T_KV = T_F,layer", "pipeline, by the model", "measured"]
    return Table([*header, "one after the other, by the model", "measured"], rows)


def remark(outcome: Outcome) -> str:
    """Return the remark about the crossover."""
    needed, fetched, stored = (table.rows for table in outcome.tables)
    of = {(str(row[0]).split(",")[0], str(row[1])): row for row in needed}
    small, large = of["llama-3.1-8b", "4,096"], of["llama-3.1-8b", "131,072"]
    widest = max(number(cell) for row in needed for cell in row[2:])
    num_beyond = sum(number(row[-1]) > PAPER_GBPS for row in needed)
    most = max(number(row[2]) for row in fetched)
    shows = [number(row[4]) / number(row[3]) for row in fetched]
    slow = max(abs(number(row[7]) / number(row[6]) - 1) for row in fetched)
    farthest = max(abs(number(row[1]) - number(row[2])) for row in stored)
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
        f" Our worker on a CPU core needs {most:.2g} Gbit/s at most. A fetch begins to show (5% longer) below"
        f" {min(shows):.2f} to {max(shows):.2f} times the bandwidth of the model, and with half of what is"
        f" needed a prefill takes within {slow:.0%} what the model says. With stores that take as long as"
        f" computing, the pipeline takes within {farthest:.0%} what the model says."
    )


EXPERIMENT = Experiment(
    "pipeline",
    "Fetch, compute and store, layer by layer",
    "BanaServe, section 4.2 and equations 12 to 17: fetching a layer's KVCache hides behind computing while"
    " T_KV <= T_F,layer: 0.082 ms against 4.22 ms at 200 Gbit/s with half of 1,000 tokens cached.",
    "The bandwidth at which both are equal. By roofline: fetches and stores go in opposite directions at the"
    " same time; the longer of both counts. Measured: our worker, SmolLM2-135M on one core, with prefixes"
    " that arrive over a limited link, T_F,layer and T_KV layer by layer, times as multiples of the"
    " computation alone ([benchmarks.md](benchmarks.md#prefixes-over-slow-links)); and with stores slowed"
    " down until they take as long as computing ([benchmarks.md](benchmarks.md#prefill)).",
    remark,
    run,
)
