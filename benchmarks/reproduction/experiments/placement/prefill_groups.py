"""Long prompts on several prefill nodes: pipelines of chunks, or sequence parallelism (Mooncake, 5.1)."""

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduction.experiment import SEED, Cell, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.cluster.machines.cards import GBPS, HARDWARE, MODELS
from benchmarks.tools.simulator.prefill_groups import Attention, PrefillNodes

NUM_NODES = 4
LENGTHS = (8192, 16384, 32768, 65536, 131072)
LINKS_GBPS = (800, 200, 100, 25)
NUM_PROMPTS = 6000
LOADS = (0.5, 0.8)
"""The offered work, as a share of the most that independent nodes can compute."""
SHORT, LONG, LONG_SHARE = (4096, 16384), (65536, 131072), 0.1
"""The ranges of tokens of short and of long prompts, and the share of long prompts."""
_STEP_TOKENS = 4096
_LEAST_EFFICIENCY = 0.75
"""The least efficiency of an elastic group.

The efficiency is the time of a single node, divided by the group's time and its number of nodes.
"""


class Arrival(NamedTuple):
    """The arrival of a prompt."""

    at_s: float
    num_tokens: int


Served = Callable[[PrefillNodes, Sequence[Arrival]], list[float]]
"""A function that serves prompts in order of arrival. It returns the seconds to each first token."""


def nodes_with(link_gbps: float) -> PrefillNodes:
    """Return the nodes of the experiment, with links of this speed between any two nodes."""
    return PrefillNodes(MODELS["llama3-70b"], HARDWARE["a800"], link_gbps * GBPS)


def apart(nodes: PrefillNodes, arrivals: Sequence[Arrival]) -> list[float]:
    """Compute each prompt on one node. Returns the TTFTs in seconds."""
    free_s, ttfts_s = [0.0] * NUM_NODES, []
    for at_s, num_tokens in arrivals:
        node = min(range(NUM_NODES), key=free_s.__getitem__)
        free_s[node] = max(at_s, free_s[node]) + _sp_s(nodes, num_tokens, 1, Attention.STRIPED)
        ttfts_s.append(free_s[node] - at_s)
    return ttfts_s


def pipeline(nodes: PrefillNodes, arrivals: Sequence[Arrival]) -> list[float]:
    """Compute all prompts on one pipeline of all nodes. Returns the TTFTs in seconds.

    A prompt's first chunk follows the last chunk of the previous prompt.
    """
    ends_s, ttfts_s = [0.0] * NUM_NODES, []
    for at_s, num_tokens in arrivals:
        for stage_s, hidden_s in _stage_times(nodes, num_tokens):
            arrived_s = at_s
            for stage in range(NUM_NODES):
                ends_s[stage] = max(ends_s[stage], arrived_s) + stage_s
                arrived_s = ends_s[stage] + hidden_s
        ttfts_s.append(ends_s[-1] - at_s)
    return ttfts_s


def group(attention: Attention, nodes: PrefillNodes, arrivals: Sequence[Arrival]) -> list[float]:
    """Compute one prompt after the other on all nodes, which share its tokens. Returns TTFTs in seconds."""
    free_s, ttfts_s = 0.0, []
    for at_s, num_tokens in arrivals:
        free_s = max(at_s, free_s) + _sp_s(nodes, num_tokens, NUM_NODES, attention)
        ttfts_s.append(free_s - at_s)
    return ttfts_s


def elastic(nodes: PrefillNodes, arrivals: Sequence[Arrival]) -> list[float]:
    """Compute each prompt on the number of nodes with which it ends first (LoongServe, SOSP 2024).

    Returns the TTFTs in seconds.
    """
    free_s, ttfts_s = [0.0] * NUM_NODES, []
    for at_s, num_tokens in arrivals:
        free_s.sort()
        alone_s = _sp_s(nodes, num_tokens, 1, Attention.STRIPED)
        best_end_s, best = float("inf"), 1
        for num_nodes in range(1, NUM_NODES + 1):
            seconds = _sp_s(nodes, num_tokens, num_nodes, Attention.STRIPED)
            end_s = max(at_s, free_s[num_nodes - 1]) + seconds
            if alone_s >= _LEAST_EFFICIENCY * num_nodes * seconds and end_s < best_end_s:
                best_end_s, best = end_s, num_nodes
        free_s[:best] = [best_end_s] * best
        ttfts_s.append(best_end_s - at_s)
    return ttfts_s


WAYS: dict[str, Served] = {
    "nodes apart": apart,
    "CPP": pipeline,
    "ring": functools.partial(group, Attention.RING),
    "striped": functools.partial(group, Attention.STRIPED),
    "elastic, striped": elastic,
}


@functools.cache
def _sp_s(nodes: PrefillNodes, num_tokens: int, num_nodes: int, attention: Attention) -> float:
    return nodes.sp_s(num_tokens, num_nodes, attention)


@functools.cache
def _stage_times(nodes: PrefillNodes, num_tokens: int) -> list[tuple[float, float]]:
    """Return for each chunk the seconds of a stage, and those of the transfer to the next stage."""
    chunks = nodes.chunks(num_tokens, NUM_NODES)
    return [(nodes.stage_s(chunk, NUM_NODES), nodes.hidden_s(len(chunk))) for chunk in chunks]


def traffic(load: float) -> list[Arrival]:
    """Return arrivals of short and long prompts at random times.

    `load`: the offered work, as in `LOADS`.
    """
    rng, at_s, nodes = random.Random(SEED), 0.0, nodes_with(LINKS_GBPS[0])
    drawn = [SHORT if rng.random() >= LONG_SHARE else LONG for _ in range(NUM_PROMPTS)]
    lengths = [rng.randrange(low, high + 1, _STEP_TOKENS) for low, high in drawn]
    mean_s = statistics.fmean(_sp_s(nodes, length, 1, Attention.STRIPED) for length in lengths)
    arrivals = []
    for length in lengths:
        at_s += rng.expovariate(load * NUM_NODES / mean_s)
        arrivals.append(Arrival(at_s, length))
    return arrivals


def run(trace: Trace, folder: Path) -> Outcome:
    """Compute times on idle nodes, by length and by link, and times under mixed traffic."""
    return Outcome([_by_length(), _by_link(), _mixed()])


def _by_length() -> Table:
    nodes, rows = nodes_with(LINKS_GBPS[0]), list[list[Cell]]()
    for length in LENGTHS:
        served: list[Cell] = [way(nodes, [Arrival(0.0, length)])[0] for way in WAYS.values()]
        rows.append([f"{length:,}", *served])
    return Table(["prompt tokens", *(f"{way}, s" for way in WAYS)], rows)


def _by_link() -> Table:
    rows = list[list[Cell]]()
    for length in (LENGTHS[0], LENGTHS[2], LENGTHS[-1]):
        for gbps in LINKS_GBPS:
            nodes = nodes_with(gbps)
            times: list[Cell] = [
                WAYS[way](nodes, [Arrival(0.0, length)])[0] for way in ("CPP", "ring", "striped")
            ]
            sent: list[Cell] = [
                nodes.sent_bytes(length, NUM_NODES, is_pipeline=kind) / 1e9 for kind in (True, False)
            ]
            rows.append([f"{length:,}", gbps, *times, *sent])
    header = ["prompt tokens", "Gbit/s", "CPP, s", "ring, s", "striped, s"]
    return Table([*header, "a node sends, CPP, GB", "sequence parallel, GB"], rows)


def _mixed() -> Table:
    rows = list[list[Cell]]()
    for load in LOADS:
        arrivals = traffic(load)
        for gbps in (LINKS_GBPS[0], LINKS_GBPS[-1]):
            for name, way in WAYS.items():
                ttfts_s = way(nodes_with(gbps), arrivals)
                row: list[Cell] = [f"{load:.0%}", gbps, name]
                for is_long in (False, True):
                    chosen = [
                        ttft_s
                        for ttft_s, arrival in zip(ttfts_s, arrivals, strict=True)
                        if (arrival.num_tokens >= LONG[0]) is is_long
                    ]
                    row += [statistics.median(chosen), statistics.quantiles(chosen, n=10)[-1]]
                rows.append(row)
    header = ["load", "Gbit/s", "nodes", "short, p50 s", "short, p90 s", "long, p50 s", "long, p90 s"]
    return Table(header, rows)


def remark(outcome: Outcome) -> str:
    """Return the remark that says where a pipeline wins, and why."""
    lengths, links, mixed = outcome.tables
    first, last = lengths.rows[0], lengths.rows[-1]
    wins = [gbps for gbps in LINKS_GBPS if all(_wins(row) for row in links.rows if row[1] == gbps)]
    loses = [gbps for gbps in LINKS_GBPS if not any(_wins(row) for row in links.rows if row[1] == gbps)]
    short_p90_s = {(row[0], row[1], row[2]): number(row[4]) for row in mixed.rows}
    half, fast, slowest = f"{LOADS[0]:.0%}", LINKS_GBPS[0], LINKS_GBPS[-1]
    slow = [number(row[4]) / number(row[2]) for row in links.rows if row[1] == slowest]
    fewer = number(links.rows[0][6]) / number(links.rows[0][5])
    waits = [f"{short_p90_s[half, fast, way]:.1f} s" for way in ("CPP", "striped", "nodes apart")]
    return (
        "On idle nodes and fast links striped attention is ahead: no stage waits for a first chunk. It"
        f" takes {number(first[4]) / number(first[2]):.0%} of the pipeline's time for 8,192 tokens,"
        f" {number(last[4]) / number(last[2]):.0%} for 131,072. Ring attention computes masked blocks too,"
        f" and takes {number(last[3]) / number(last[4]):.1f} times as long as striped attention there. A node"
        f" of a pipeline sends {fewer:.0f} times less, so the link does not matter to it: striped attention"
        f" is ahead at every length with {_shown(loses)} Gbit/s, the pipeline with {_shown(wins)} Gbit/s,"
        f" where striped attention takes {min(slow):.1f} to {max(slow):.1f} times as long; between these the"
        " length decides. In mixed traffic, first come, first served, short prompts wait for long ones that"
        f" have all nodes: at half load the p90 of short ones is {waits[0]} with a pipeline, {waits[1]} with"
        f" striped attention, {waits[2]} on nodes apart. On a slow link sequence parallelism is overloaded,"
        " unless each prompt is given as many nodes as are worth it; on a fast one all of them are, at every"
        " length here. Every node of a sequence-parallel group holds all weights; a stage holds its part."
    )


def _wins(row: Sequence[Cell]) -> bool:
    """Return whether the pipeline is faster than striped attention in a row of the table by links."""
    return number(row[2]) < number(row[4])


def _shown(links: Sequence[float]) -> str:
    return " and ".join(f"{gbps:g}" for gbps in links) or "no"


EXPERIMENT = Experiment(
    "prefill_groups",
    "Prefill by pipelines and by sequence parallelism",
    "Mooncake, section 5.1: a pipeline of chunks communicates only at the boundaries of its stages, beside"
    " the computation, and needs no other groups for short prompts; sequence parallelism moves KVCache in"
    " every layer. No figures.",
    f"{NUM_NODES} nodes as one group, by roofline. Mixed traffic: {NUM_PROMPTS:,} prompts at random moments,"
    f" nine tenths of {SHORT[0]:,} to {SHORT[1]:,} tokens, the others of {LONG[0]:,} to {LONG[1]:,}; the"
    " load is a share of what the nodes compute apart.",
    remark,
    run,
)
